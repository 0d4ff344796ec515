"""A vision model with random weights, small enough for any machine.

It has LLaVA's architecture and the contract tests' tokenizer.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from support.contract import IM_END, build_tokenizer
from tokenizers import AddedToken
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from clawstream.demo import model

IMAGE = "<image>"
SIDE, PATCH = 28, 14
IMAGE_TOKENS = (SIDE // PATCH) ** 2
TEMPLATE = f"""\
{{%- for message in messages -%}}
<|im_start|>{{{{ message.role + "\\n" }}}}
{{%- if message.content is string -%}}{{{{ message.content }}}}
{{%- else -%}}
{{%- for part in message.content -%}}\
{{{{ "{IMAGE}" if part.type == "image" else part.text }}}}{{%- endfor -%}}
{{%- endif -%}}
{IM_END}
{{%- endfor -%}}
{{%- if add_generation_prompt -%}}<|im_start|>{{{{ "assistant\\n" }}}}{{%- endif -%}}
"""


def make_vision_model(directory: Path) -> tuple[Any, Any]:
    """Write model and processor; return both.

    The log-probabilities depend strongly on the image.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(IMAGE, normalized=False, special=True)])
    tokenizer.chat_template = TEMPLATE
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=model.MAX_TOKENS,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=32,
        image_size=SIDE,
        patch_size=PATCH,
    )
    place = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=place, vision_feature_layer=-1
    )
    network = LlavaForConditionalGeneration(config).float().eval()
    network.save_pretrained(directory)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    processor = LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        chat_template=TEMPLATE,
        image_token=IMAGE,
        num_additional_image_tokens=1,
    )
    processor.save_pretrained(directory)
    return network, processor


def image_of(colour: str) -> Image.Image:
    """Return an image of one colour."""
    return Image.new("RGB", (40, 30), colour)


def encoded(image: Image.Image) -> str:
    """Return the image as base64-encoded PNG."""
    data = io.BytesIO()
    image.save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()
