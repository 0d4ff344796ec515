"""A tiny Qwen2-VL with random weights: images of any size, and positions in three dimensions."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen2VLProcessor,
)

from demo.model import build_tokenizer

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


class ImagesOnly(Qwen2VLProcessor):
    """Qwen's processor without that of videos, which needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def make_qwen_vision_model() -> tuple[Any, Any]:
    """Return the model and its processor."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "initializer_range": 0.3,
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
