"""Random batches for advantage estimators and losses, with the nested lists they are made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from trainer.algorithms.batch import BatchView, LossBatch

NAN = float("nan")


@dataclass(frozen=True)
class Step:
    """reward: or None. tokens: (sampled, reference, teacher, value) of each trained token."""

    reward: float | None
    tokens: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True)
class Member:
    """sequences: of steps; each step is in one sequence."""

    group: int
    reward: float
    sequences: tuple[tuple[Step, ...], ...]


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
        step_trajectory=np.array(step_trajectory, np.int64),
        turn=np.array(turns, np.int64),
        step_rewards=np.array(rewards),
        group=np.array([member.group for member in members], np.int64),
        rewards=np.array([member.reward for member in members]),
    )


REWARDS = st.sampled_from([0.0, 1.0, 0.25, -0.5]) | st.floats(-3, 3, width=32)
LOGPROBS = st.floats(-8, -0.0078125, width=32)
TOKENS = st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-2, 2, width=32))


@st.composite
def members(draw: st.DrawFn, branches: int = 2) -> list[Member]:
    """Draw one to three groups of two to four trajectories, groups mixed in order."""
    groups = [g for g in range(draw(st.integers(1, 3))) for _ in range(draw(st.integers(2, 4)))]
    steps = st.builds(
        Step,
        st.none() | REWARDS,
        st.lists(TOKENS, min_size=1, max_size=3).map(tuple),
    )
    sequences = st.lists(
        st.lists(steps, min_size=1, max_size=3).map(tuple), min_size=1, max_size=branches
    ).map(tuple)
    return [Member(g, draw(REWARDS), draw(sequences)) for g in draw(st.permutations(groups))]


@st.composite
def loss_batches(draw: st.DrawFn, equal_advantages: bool = False) -> LossBatch:
    """Draw whole sequences with float64 columns; `logprobs` is a leaf with gradient."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    n = sum(lengths)

    def column(low: float, high: float) -> torch.Tensor:
        values = st.lists(st.floats(low, high, width=32), min_size=n, max_size=n)
        return torch.tensor(draw(values), dtype=torch.float64)

    logprobs = column(-3, -0.0078125)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = column(-2, 2)
    if equal_advantages:
        first = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
        advantages = advantages[first][sequence]
    mask = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    return LossBatch(
        logprobs=logprobs.clone().requires_grad_(),
        sampled_logprobs=logprobs + column(-1, 1),
        old_logprobs=logprobs + column(-1, 1),
        advantages=advantages,
        mask=torch.tensor(mask) | torch.tensor([i == 0 for i in range(n)]),
        sequence=sequence,
        step=torch.zeros(n, dtype=torch.int64),
        lengths=torch.tensor(lengths),
        ref_logprobs=column(-3, -0.0078125),
        entropy=column(0, 3),
    )
