"""The task: reverse three digits. A tiny model, its imperfect warm start, sampling, the score.

A prompt is three digits and "="; the right reply is the digits in reverse order and the end token.
A quarter of the prompts is held out: neither the warm start nor the training uses them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DIGITS, LENGTH = 10, 3
EQUALS, END = DIGITS, DIGITS + 1
VOCABULARY = DIGITS + 2
REPLY_TOKENS = LENGTH + 1
"""The longest reply; a reply that has not ended by then is wrong."""

Prompt = tuple[int, ...]
PROMPTS: tuple[Prompt, ...] = tuple(
    (*digits, EQUALS) for digits in itertools.product(range(DIGITS), repeat=LENGTH)
)
HELD_OUT = tuple(prompt for prompt in PROMPTS if zlib.crc32(bytes(prompt)) % 4 == 0)
TRAINED = tuple(prompt for prompt in PROMPTS if zlib.crc32(bytes(prompt)) % 4)

WRONG_DIGITS = 0.35
"""Share of random digits in the demonstrations of the warm start."""


@dataclass(frozen=True)
class Sample:
    """A reply with the log-probability of each token at temperature 1."""

    prompt: Prompt
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def score(self) -> float:
        """1.0 for the right reply, else 0.0."""
        return float(self.tokens == (*reversed(self.prompt[:LENGTH]), END))


def make_model(directory: Path, seed: int = 0, steps: int = 300) -> Path:
    """Write a model that knows the form of a reply and guesses a third of the digits.

    Args:
        directory: of the Hugging Face files.
        seed: of weights and demonstrations.
        steps: of supervised training on noisy demonstrations.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16,
        initializer_range=0.06,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    prompts = torch.tensor(TRAINED)
    for _ in range(steps):
        rows = prompts[torch.randint(len(prompts), (128,))]
        replies = rows[:, :LENGTH].flip(1)
        guesses = torch.randint(DIGITS, replies.shape)
        replies = torch.where(torch.rand(replies.shape) < WRONG_DIGITS, guesses, replies)
        rows = torch.cat([rows, replies, torch.full((len(rows), 1), END)], 1)
        logits = model(rows[:, :-1]).logits[:, LENGTH:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), rows[:, LENGTH + 1 :].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def sample(model: Any, prompts: Sequence[Prompt], generator: torch.Generator) -> list[Sample]:
    """Sample a reply to each prompt at temperature 1."""
    rows, columns = torch.tensor(prompts), []
    for _ in range(REPLY_TOKENS):
        logprobs = model(input_ids=rows, use_cache=False).logits[:, -1].float().log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        columns.append(logprobs.gather(1, tokens))
        rows = torch.cat([rows, tokens], 1)
    values = torch.cat(columns, 1).tolist()
    found = []
    for prompt, tokens, logprobs in zip(
        prompts, rows[:, LENGTH + 1 :].tolist(), values, strict=True
    ):
        n = tokens.index(END) + 1 if END in tokens else REPLY_TOKENS
        found.append(Sample(prompt, tuple(tokens[:n]), tuple(logprobs[:n])))
    return found
