"""What is not trained adds nothing: advantages, losses and gradients of the rest stay equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batch_views import SEEDS
from support.trainer_runs import ANY_ID

from clawstream.schemas.algorithms import ALGORITHMS
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.assemble.payload.segment_tree import SampledTokens, build
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.objective import MinibatchSize, objective
from clawstream.trainer.algorithms.registry import LoadedAlgorithm, load
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import TrainingSequence, sequences_of_batch
from clawstream.trainer.data.view import batch_view, with_advantages, with_returns
from clawstream.trainer.model.update import passed_sequences

VOCABULARY = 40
CHANGES: list[dict[str, Any]] = [
    {},
    {"aggregation": "sequence_mean"},
    {"aggregation": "fixed_length"},
    {"aggregation": "token_mean", "entropy_coef": 0.1},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k1"},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    {"kl_coef": 0.1, "kl_in": "reward"},
    {"gamma": 0.9, "gae_lambda": 0.9},
    *(
        {"correction": correction, "correction_level": level}
        for correction in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    ),
]
"""Changes of settings; those that an algorithm does not read change nothing."""


@dataclass(frozen=True)
class Call:
    """A model call. trained: in the batch; reward: of the step."""

    name: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    trained: bool = True
    reward: float | None = None


@dataclass(frozen=True)
class Member:
    """A trajectory. reward: None where it has none."""

    name: str
    calls: tuple[Call, ...]
    reward: float | None


Groups = Sequence[Sequence[Member]]


class Result(NamedTuple):
    """advantages: of each trained token, by trajectory, call and place in its response."""

    advantages: Mapping[tuple[str, str, int], float]
    loss: float
    gradient: torch.Tensor


@cache
def trajectory_of(member: Member) -> Trajectory:
    def logprobs(call: Call) -> bytes:
        return pack_logprobs([-1.0 - token / VOCABULARY for token in call.response])

    tree = build(
        [
            SampledTokens(pack_ids(list(c.prompt)), pack_ids(list(c.response)), logprobs(c))
            for c in member.calls
        ]
    )
    steps = [
        TrajectoryStep(
            step_id=call.name,
            index=node.index,
            status="ok",
            drift=node.drift,
            prompt_tokens=len(call.prompt),
            response_tokens=len(call.response),
            response_json=b"{}",
            oldest_version="r/0.0",
            newest_version="r/0.0",
            trainable=call.trained,
            offset=at,
        )
        for at, (call, node) in enumerate(zip(member.calls, tree.nodes, strict=True))
    ]
    return Trajectory(
        run_id="r",
        trajectory_key=member.name,
        trajectory_id=member.name,
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        part=0,
        parts=1,
        segments=tree.segments,
        steps=tuple(sorted(steps, key=lambda step: step.index)),
    )


def batch_of(groups: Groups) -> ReadyBatch:
    def value(reward: float | None, step: str | None = None) -> RewardValue:
        return RewardValue(
            source="rule",
            name="r",
            function_version="1",
            value=reward,
            reward_revision=0,
            step_id=step,
        )

    def member(of: Member) -> BatchMember:
        steps = tuple(value(c.reward, c.name) for c in of.calls if c.reward is not None)
        return BatchMember(
            trajectory_id=of.name,
            trajectory_key=of.name,
            revision=0,
            rewards=(*(() if of.reward is None else (value(of.reward),)), *steps),
            untrainable_steps=(),
            trainable_tokens=1,
            place=Place(topic_id="id", partition=0, first_offset=0, last_offset=0),
        )

    return ReadyBatch(
        run_id="r",
        channel="train",
        batch_seq=0,
        groups=tuple(
            BatchGroup(group_id=str(i), round=0, n=len(group), members=tuple(map(member, group)))
            for i, group in enumerate(groups)
        ),
        policy_version=0,
        sync_every=1,
        algorithm="grpo",
        reward_weights={},
        input_topic_id="id",
        input_partition=0,
        input_from=0,
        input_to=0,
        content_hash="",
        trainable_tokens=0,
        created_at_event_time=0,
    )


def scored(sequence: TrainingSequence) -> TrainingSequence:
    """Add the columns of other models: each value depends on the token and its place."""
    at = np.flatnonzero(sequence.tokens.mask)
    ids = sequence.tokens.ids[at]

    def column(a: float, b: float) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.sin(a * ids + b * at).astype(np.float32)

    return replace(
        sequence,
        old_logprobs=-1.2 + 0.3 * column(1, 2),
        ref_logprobs=-1.4 + 0.3 * column(3, 1),
        teacher_logprobs=-1.1 + 0.3 * column(2, 5),
        values=column(1, 1),
    )


def result(groups: Groups, algorithm: LoadedAlgorithm) -> Result:
    """Train the batch on a policy that has a log-probability for each id and its predecessor."""
    members = [member for group in groups for member in group]
    data = sequences_of_batch(
        batch_of(groups),
        {member.name: trajectory_of(member) for member in members},
        algorithm.smallest_group,
        algorithm.rewards,
        ANY_ID,
    )
    view = batch_view([scored(s) for s in data.sequences], data.members, "r", 1)
    sequences: Sequence[TrainingSequence] = with_advantages(
        [scored(s) for s in data.sequences], algorithm.advantage(view, algorithm.settings)
    )
    if algorithm.returns is not None:
        sequences = with_returns(sequences, algorithm.returns(view, algorithm.settings))
    size = MinibatchSize(sum(sequence.trained_tokens for sequence in sequences), len(sequences))
    weights = torch.linspace(-1, 1, VOCABULARY**2, dtype=torch.float64).sin().requires_grad_()
    loss = 0.0
    learned = passed_sequences(sequences, algorithm)
    if learned:
        share = objective(loss_batch(learned, weights), algorithm.loss, algorithm.settings, size)
        share.backward()  # type: ignore[no-untyped-call]
        loss = share.item()
    return Result(
        dict(advantages(sequences, members)),
        loss,
        torch.zeros_like(weights) if weights.grad is None else weights.grad,
    )


def loss_batch(sequences: Sequence[TrainingSequence], weights: torch.Tensor) -> LossBatch:
    batch = collate(sequences, 1.0, torch.device("cpu"))
    before = batch.token_ids.flatten()[batch.before]
    logprobs = -1.0 + 0.5 * weights[before * VOCABULARY + batch.targets]
    return LossBatch(
        logprobs=logprobs,
        sampled_logprobs=batch.logprobs,
        old_logprobs=batch.old_logprobs,
        advantages=batch.advantages,
        mask=torch.ones(len(logprobs), dtype=torch.bool),
        sequence=batch.sequence,
        step=batch.step,
        lengths=batch.lengths,
        ref_logprobs=batch.ref_logprobs,
        teacher_logprobs=batch.teacher_logprobs,
        entropy=-logprobs * logprobs.exp(),
    )


def advantages(
    sequences: Sequence[TrainingSequence], members: Sequence[Member]
) -> Iterator[tuple[tuple[str, str, int], float]]:
    names = {m.name: {s.index: s.step_id for s in trajectory_of(m).steps} for m in members}
    for sequence in sequences:
        assert sequence.advantages is not None
        place: dict[str, int] = {}
        steps = sequence.tokens.trained().steps.tolist()
        for step, advantage in zip(steps, sequence.advantages.tolist(), strict=True):
            name = names[sequence.trajectory_id][step]
            place[name] = place.get(name, -1) + 1
            yield (sequence.trajectory_id, name, place[name]), advantage


def check_equal(found: Result, expected: Result, of: LoadedAlgorithm) -> None:
    said = f"{of.name} {of.settings}"
    assert found.advantages == pytest.approx(expected.advantages, rel=1e-5, abs=1e-6), said
    assert math.isclose(found.loss, expected.loss, rel_tol=1e-6, abs_tol=1e-8), said
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-5, atol=1e-8, msg=said)


HELLO, FIRST, MORE, SECOND = (1, 2), (3, 4), (5,), (6, 7)
TURNS = (
    Call("0", HELLO, FIRST),
    Call("1", (*HELLO, *FIRST, *MORE), SECOND, reward=5.0),
)
OTHER = Member("b", (Call("0", HELLO, (8,)),), 0.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_untrained_call_between_two_turns_changes_neither(name: str) -> None:
    """An aborted reply, a side question, a step of an uncertain version."""
    algorithm = load(name, {}, ())
    side = Call("side", (*HELLO, *FIRST, 9), (10, 11), trained=False)
    with_side = [Member("a", (TURNS[0], side, TURNS[1]), 1.0), OTHER]
    found = result([with_side], algorithm)
    check_equal(found, result([[Member("a", TURNS, 1.0), OTHER]], algorithm), algorithm)
    if name == "reinforce_pp":  # the returns of four tokens are 6, that of the last is 0
        assert found.advantages["a", "0", 0] == pytest.approx(0.5)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Groups, Groups]:
    """Draw a batch of trees, and the same one with other parts that are not trained."""
    sizes, seed = draw(st.lists(st.integers(2, 3), min_size=1, max_size=2)), draw(SEEDS)
    rng = np.random.default_rng(seed)

    def ids(most: int = 3) -> tuple[int, ...]:
        return tuple(rng.integers(1, 12, rng.integers(1, most + 1)).tolist())

    def calls() -> list[Call]:
        found: list[Call] = []
        for name in range(rng.integers(1, 5)):
            before: tuple[int, ...] = ()
            if found and rng.random() < 0.8:
                earlier = found[rng.integers(len(found))]
                before = earlier.prompt + earlier.response
            reward = float(rng.uniform(-2, 2)) if rng.random() < 0.5 else None
            found.append(Call(str(name), before + ids(), ids(), reward=reward))
        return found

    def with_others(trained: Sequence[Call]) -> tuple[Call, ...]:
        """Add calls that are not trained, at any place. Their replies are none of the others."""
        found = list(trained)
        for name in range(rng.integers(0, 4)):
            text = (0,)
            if found and rng.random() < 0.8:
                earlier = found[rng.integers(len(found))]
                text = earlier.prompt + earlier.response
            prompt = text[: rng.integers(1, len(text) + 1)]
            side = Call(
                f"side{name}", prompt + ids(2) * int(rng.integers(2)), (20 + name,), trained=False
            )
            found.insert(rng.integers(len(found) + 1), side)
        return tuple(found)

    groups, changed = [], []
    for g, size in enumerate(sizes):
        members = [Member(f"{g}-{m}", tuple(calls()), float(rng.integers(3))) for m in range(size)]
        others = [replace(member, calls=with_others(member.calls)) for member in members]
        if rng.random() < 0.5:
            others.append(Member(f"{g}-none", with_others(()), None))
        groups.append(members)
        changed.append(others)
    return groups, changed


@pytest.mark.slow
@given(batches(), st.sampled_from(CHANGES))
def test_parts_that_are_not_trained_change_nothing_for_any_algorithm(
    both: tuple[Groups, Groups], changes: dict[str, Any]
) -> None:
    groups, changed = both
    for name in ALGORITHMS:
        algorithm = load(name, changes, ())
        check_equal(result(changed, algorithm), result(groups, algorithm), algorithm)
