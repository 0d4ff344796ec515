"""The fixed workload: rollouts of one prompt, with turns and forks, and the model that trains it.

It has the same tokens in two forms: paths of the segment trees, as the trainer has them, and steps,
a row for each model call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.trainer.data.sequences import Tokens, TrainingSequence

VOCABULARY = 4096
"""Token ids are below it; a model may have more."""
TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the workload, in tokens; `forks`: rollouts that fork in their middle turn."""

    prompt: int
    turns: int
    reply: int
    tool: int
    rollouts: int
    forks: int


FULL = Shape(prompt=2048, turns=10, reply=48, tool=16, rollouts=8, forks=2)
CHECK = Shape(prompt=64, turns=3, reply=8, tool=4, rollouts=4, forks=1)


TWO_LAYERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
HALF_BILLION = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""The sizes of Qwen2.5-0.5B: 494 million parameters."""


def write_model(directory: Path, shape: Shape, sizes: Mapping[str, int] = TWO_LAYERS) -> Path:
    """Write a Qwen3 with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        max_position_embeddings=2 * (shape.prompt + shape.turns * (shape.reply + shape.tool)),
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def paths(shape: Shape, seed: int = 0) -> list[TrainingSequence]:
    """Return the paths of all rollouts of a group: every reply is trained in one of them."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, VOCABULARY, shape.prompt)
    found = []
    for rollout in range(shape.rollouts):
        turns = [_turn(shape, rng) for _ in range(shape.turns)]
        advantage = 1.0 if rollout % 2 else -1.0
        found.append(_path(shape, seed, rollout, prompt, turns, 0, advantage))
        if rollout < shape.forks:
            middle = shape.turns // 2
            again = [*turns[:middle], *(_turn(shape, rng) for _ in range(shape.turns - middle))]
            found.append(_path(shape, seed, rollout, prompt, again, middle, advantage))
    return found


def steps(sequences: list[TrainingSequence]) -> list[TrainingSequence]:
    """Return a sequence for each step: its reply, with all tokens before it as context."""
    return [step for sequence in sequences for step in _steps(sequence)]


def _steps(sequence: TrainingSequence) -> Iterator[TrainingSequence]:
    tokens = sequence.tokens
    for step in sorted({*tokens.steps[tokens.mask].tolist()}):
        own = tokens.mask & (tokens.steps == step)
        end = int(np.flatnonzero(own)[-1]) + 1
        cut = Tokens._make(column[:end] for column in tokens._replace(mask=own))
        assert sequence.advantages is not None
        advantages = sequence.advantages[: int(own.sum())]
        yield TrainingSequence(sequence.trajectory_id, cut, advantages)


def _turn(shape: Shape, rng: np.random.Generator) -> NDArray[np.int64]:
    return rng.integers(2, VOCABULARY, shape.tool + shape.reply)


def _path(
    shape: Shape,
    group: int,
    rollout: int,
    prompt: NDArray[np.int64],
    turns: list[NDArray[np.int64]],
    trained_from: int,
    advantage: float,
) -> TrainingSequence:
    """Return a path; the replies of turns before `trained_from` are trained in another one."""
    ids = np.concatenate([prompt, *turns]).astype(np.int32)
    steps = np.full(len(ids), -1, np.int32)
    mask = np.zeros(len(ids), bool)
    at = len(prompt)
    for turn, tokens in enumerate(turns):
        reply = slice(at + shape.tool, at + len(tokens))
        steps[reply], mask[reply] = turn, turn >= trained_from
        at += len(tokens)
    tokens = Tokens(
        ids,
        mask,
        np.full(len(ids), -np.log(VOCABULARY), np.float32),
        np.full(len(ids), TEMPERATURE, np.float32),
        np.full(len(ids), None, object),
        steps,
    )
    advantages = np.full(int(mask.sum()), advantage, np.float32)
    return TrainingSequence(f"{group}.{rollout}", tokens, advantages, group=group)
