"""A tiny tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(
    template: str, special: Sequence[str] = CHATML_TOKENS, size: int = 0
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes.

    Args:
        template: Of chats.
        special: Special tokens; the first ones are `CHATML_TOKENS`.
        size: Number of tokens; words that no text is split into fill it up.
    """
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"Ġw{i}" for i in range(size - len(words))]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )
