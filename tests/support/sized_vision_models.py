"""Tiny models with random weights that give images of another size other placeholder tokens.

Qwen2-VL has positions in three dimensions. Idefics3 cuts images into tiles, as SmolVLM does, whose
processor needs more libraries.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from clawstream.demo.model import build_tokenizer

QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
IDEFICS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES)


class ImagesOnly(Qwen2VLProcessor):
    """Qwen's processor without that of videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def tokenizer_with(special: tuple[str, ...]) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def text_of(tokenizer: Any) -> dict[str, Any]:
    """Return the configuration of a language model."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
    }


def make_idefics_model() -> tuple[Any, Any]:
    """Return the model and its processor."""
    torch.manual_seed(0)
    tokenizer = tokenizer_with(IDEFICS)
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Idefics3Config(
        text_config={"model_type": "llama", **text_of(tokenizer)},
        vision_config=vision,
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    network = Idefics3ForConditionalGeneration(config).float().eval()
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    return network, Idefics3Processor(images, tokenizer, image_seq_len=4)


def make_qwen_vision_model() -> tuple[Any, Any]:
    """Return the model and its processor."""
    torch.manual_seed(0)
    tokenizer = tokenizer_with(QWEN)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(QWEN))
    text = text_of(tokenizer) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
    )
    network = Qwen2VLForConditionalGeneration(config).float().eval()
    images = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112})
    return network, ImagesOnly(images, tokenizer)
