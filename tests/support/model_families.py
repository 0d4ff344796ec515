"""Tiny models with random weights, each in a shape that published models have.

Their tokenizers, like those of published models, do not encode a decoded reply to the same ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from support.byte_tokenizer import byte_tokenizer
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role + "\\n" + message.content }}<|im_end|>{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ "assistant\\n" }}{%- endif -%}
"""
THINKING = """\
{%- for message in messages -%}
{%- set content = message.content.split("</think>")[-1] if message.role == "assistant" else \
message.content -%}
<|im_start|>{{ message.role + "\\n" + content }}<|im_end|>{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ "assistant\\n" }}
{%- if enable_thinking is defined and not enable_thinking -%}{{ "<think>\\n\\n</think>\\n\\n" }}
{%- endif -%}{%- endif -%}
"""
"""Leaves the reasoning of earlier turns out, as Qwen3's template does: each turn is a branch."""
QWEN_TOKENS, QWEN_EMBEDDINGS = 151_669, 151_936
# vLLM's attention on CPUs has no smaller heads than 32.
SHAPE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def bfloat16_sharded(directory: Path) -> None:
    """Write an untied bfloat16 Llama in several files, with the generation defaults of a chat
    model, which must not apply to rollouts, and with a tensor that neither vLLM nor transformers
    loads, as files of 2023 have.
    """
    tokenizer = byte_tokenizer(CHATML, size=300)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, tie_word_embeddings=False, **SHAPE, **_ids(tokenizer))
    )
    network.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1,
        **_ids(tokenizer),
    )  # fmt: skip
    network.to(torch.bfloat16).save_pretrained(directory, max_shard_size="60KB")
    tokenizer.save_pretrained(directory)
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    computed, extra = "model.layers.0.self_attn.rotary_emb.inv_freq", "model-extra.safetensors"
    save_file({computed: torch.ones(16)}, directory / extra, {"format": "pt"})
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][computed] = extra
    file.write_text(json.dumps(index))


def tied_with_head(directory: Path) -> None:
    """Write a tied float32 Llama whose file holds its output head a second time."""
    tokenizer = byte_tokenizer(CHATML, size=300)
    network = LlamaForCausalLM(
        LlamaConfig(vocab_size=300, tie_word_embeddings=True, **SHAPE, **_ids(tokenizer))
    )
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})


def qwen3_like(directory: Path) -> None:
    """Write a tied bfloat16 Qwen3 with its vocabulary: fewer tokens than embeddings."""
    tokenizer = byte_tokenizer(THINKING, size=QWEN_TOKENS)
    config = Qwen3Config(
        vocab_size=QWEN_EMBEDDINGS, head_dim=32, tie_word_embeddings=True, **SHAPE,
        **_ids(tokenizer),
    )  # fmt: skip
    network = Qwen3ForCausalLM(config)
    network.generation_config = GenerationConfig(
        do_sample=True, temperature=0.6, top_p=0.95, top_k=20, **_ids(tokenizer)
    )
    network.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


FAMILIES: Mapping[str, Callable[[Path], None]] = {
    "bfloat16-sharded": bfloat16_sharded,
    "tied-with-head": tied_with_head,
    "qwen3": qwen3_like,
}


def write_family(name: str, directory: Path) -> Path:
    """Write a model of FAMILIES; the same name gives the same weights."""
    torch.manual_seed(0)
    FAMILIES[name](directory)
    return directory
