"""A tiny model with random weights, in a shape that published models have.

Its tokenizer, like theirs, does not encode a decoded reply to the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role + "\\n" + message.content }}<|im_end|>{{ "\\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>{{ "assistant\\n" }}{%- endif -%}
"""
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


def byte_tokenizer(size: int, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `size` tokens: bytes, then words that no text is split into."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{i}" for i in range(size - len(words))]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def _ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_bfloat16_sharded(directory: Path) -> Path:
    """Write an untied bfloat16 Llama in several files, with the generation defaults of a chat
    model: they must not apply to rollouts.
    """
    torch.manual_seed(0)
    tokenizer = byte_tokenizer(300, CHATML)
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
    return directory
