"""Random batches for advantage estimators and losses, with the nested lists they are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from clawstream.trainer.algorithms.batch import BatchView, LossBatch

NAN = float("nan")


@dataclass(frozen=True)
class Step:
    """reward: or None. tokens: (sampled, reference, teacher, value) of each trained token."""

    reward: float | None
    tokens: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Member:
    """sequences: of steps; each step is in one sequence. cut: their last replies were cut."""

    group: int
    reward: float
    sequences: tuple[tuple[Step, ...], ...]
    cut: bool = False


def view_of(members: list[Member]) -> BatchView:
    """Return the view of members; every sequence has a token."""
    sequence, step, position, columns = [], [], [], []
    sequence_trajectory: list[int] = []
    step_trajectory: list[int] = []
    turns: list[int] = []
    rewards: list[float] = []
    for index, member in enumerate(members):
        turn = 0
        for steps in member.sequences:
            place = 0
            for part in steps:
                for token in part.tokens:
                    sequence.append(len(sequence_trajectory))
                    step.append(len(rewards))
                    position.append(place)
                    columns.append(token)
                    place += 1
                step_trajectory.append(index)
                turns.append(turn)
                rewards.append(NAN if part.reward is None else part.reward)
                turn += 1
            sequence_trajectory.append(index)
    sampled, ref, teacher, values = (np.array([token[i] for token in columns]) for i in range(4))
    return BatchView(
        sampled_logprobs=sampled,
        ref_logprobs=ref,
        teacher_logprobs=teacher,
        values=values,
        sequence=np.array(sequence, np.int64),
        step=np.array(step, np.int64),
        position=np.array(position, np.int64),
        staleness=np.zeros(len(step)),
        sequence_trajectory=np.array(sequence_trajectory, np.int64),
        cut=np.array([members[owner].cut for owner in sequence_trajectory], bool),
        step_trajectory=np.array(step_trajectory, np.int64),
        turn=np.array(turns, np.int64),
        step_rewards=np.array(rewards),
        group=np.array([member.group for member in members], np.int64),
        rewards=np.array([member.reward for member in members]),
    )


SEEDS = st.integers(0, 2**32 - 1)
"""Hypothesis draws the shapes; a seed draws the numbers, which is ten times as fast."""


def reward(rng: np.random.Generator) -> float:
    """Return a usual reward, so that equal ones are common, or any other."""
    return float(rng.choice([0.0, 1.0, 0.25, -0.5, rng.uniform(-3, 3)]))


def token(rng: np.random.Generator) -> tuple[float, float, float, float]:
    sampled, ref, teacher = (-rng.uniform(0.01, 8, 3)).tolist()
    return sampled, ref, teacher, float(rng.uniform(-2, 2))


@st.composite
def members(draw: st.DrawFn, branches: int = 2) -> list[Member]:
    """Draw one to three groups of two to four trajectories, groups mixed in order."""
    sizes, rng = (
        draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)),
        np.random.default_rng(draw(SEEDS)),
    )
    groups = rng.permutation([g for g, size in enumerate(sizes) for _ in range(size)])

    def step() -> Step:
        tokens = tuple(token(rng) for _ in range(rng.integers(1, 4)))
        return Step(reward(rng) if rng.random() < 0.5 else None, tokens)

    def sequence() -> tuple[Step, ...]:
        return tuple(step() for _ in range(rng.integers(1, 4)))

    return [
        Member(
            int(g),
            reward(rng),
            tuple(sequence() for _ in range(rng.integers(1, branches + 1))),
        )
        for g in groups
    ]


@st.composite
def loss_batches(draw: st.DrawFn, equal_advantages: bool = False) -> LossBatch:
    """Draw whole sequences with float64 columns; `logprobs` is a leaf with gradient."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    rng, n = np.random.default_rng(draw(SEEDS)), sum(lengths)

    def column(low: float, high: float) -> torch.Tensor:
        return torch.from_numpy(rng.uniform(low, high, n))

    logprobs = column(-3, -0.01)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = column(-2, 2) * torch.from_numpy(rng.random(n) < 0.9)
    if equal_advantages:
        first = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
        advantages = advantages[first][sequence]
    mask = torch.from_numpy(rng.random(n) < 0.7)
    mask[0] = True
    return LossBatch(
        logprobs=logprobs.clone().requires_grad_(),
        sampled_logprobs=logprobs + column(-1, 1),
        old_logprobs=logprobs + column(-1, 1),
        advantages=advantages,
        mask=mask,
        sequence=sequence,
        step=torch.zeros(n, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        ref_logprobs=column(-3, -0.01),
        entropy=column(0, 3),
    )
