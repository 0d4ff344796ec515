"""Segment trees to training sequences: every sampled token of a trainable step exactly once, under
its own context.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_runs import ANY_ID

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Segment,
    Trajectory,
    TrajectoryStep,
    VersionSpan,
)
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.trainer.algorithms.advantages.grpo import grpo
from clawstream.trainer.data.minibatches import micro_batches, minibatches
from clawstream.trainer.data.sequences import (
    ReadableIds,
    Tokens,
    TrainingSequence,
    sequences_of,
    sequences_of_batch,
)
from clawstream.trainer.data.trajectories import scans
from clawstream.trainer.data.view import batch_view, with_advantages
from clawstream.trainer.errors import PayloadUnreadable


def step(
    index: int,
    *,
    trainable: bool = True,
    version: str | None = "r/0.0",
    temperature: float | None = None,
) -> TrajectoryStep:
    return TrajectoryStep(
        step_id=f"t~{index}.0",
        index=index,
        status="ok",
        drift="clean",
        prompt_tokens=0,
        response_tokens=0,
        response_json=b"{}",
        oldest_version=version,
        newest_version=version,
        trainable=trainable,
        offset=index,
        logprobs_temperature=temperature,
    )


def env(ids: list[int], parent: int | None = None) -> Segment:
    return Segment(parent=parent, token_ids=pack_ids(ids))


def said(
    ids: list[int], index: int, parent: int | None, spans: tuple[VersionSpan, ...] = ()
) -> Segment:
    logprobs = pack_logprobs([-i / 8 for i in ids])
    return Segment(
        parent=parent, step_index=index, token_ids=pack_ids(ids), logprobs=logprobs, versions=spans
    )


def trajectory(segments: list[Segment], steps: list[TrajectoryStep], name: str = "t") -> Trajectory:
    return Trajectory(
        run_id="r",
        trajectory_key=name,
        trajectory_id=name,
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        part=0,
        parts=1,
        segments=tuple(segments),
        steps=tuple(steps),
    )


def ids(sequence: TrainingSequence) -> tuple[int, ...]:
    return tuple(sequence.tokens.ids.tolist())


def mask(sequence: TrainingSequence) -> str:
    return "".join("01"[on] for on in sequence.tokens.mask.tolist())


def logprobs(sequence: TrainingSequence) -> tuple[float, ...]:
    """0.0 where nothing is trained."""
    return tuple(np.where(sequence.tokens.mask, sequence.tokens.logprobs, 0.0).tolist())


def temperatures(sequence: TrainingSequence) -> list[float | None]:
    """None where the step states none."""
    return [None if math.isnan(t) else t for t in sequence.tokens.temperatures.tolist()]


def test_redacted_tokens_have_no_log_probability_and_are_not_trained() -> None:
    sampled = Segment(
        parent=0,
        step_index=0,
        token_ids=pack_ids([3, 4, 5]),
        logprobs=pack_logprobs([-0.5, float("nan"), -1.0]),
    )
    (sequence,) = sequences_of(trajectory([env([1]), sampled], [step(0)]), ())
    assert mask(sequence) == "0101"
    assert logprobs(sequence) == (0.0, -0.5, 0.0, -1.0)


def test_a_linear_conversation_is_one_row() -> None:
    tree = trajectory(
        [env([1, 2]), said([3, 4], 0, 0), env([5], 1), said([6], 1, 2)], [step(0), step(1)]
    )
    (sequence,) = sequences_of(tree, ())
    assert ids(sequence) == (1, 2, 3, 4, 5, 6)
    assert mask(sequence) == "001101"
    assert logprobs(sequence) == (0.0, 0.0, -3 / 8, -4 / 8, 0.0, -6 / 8)
    assert sequence.tokens.steps.tolist() == [-1, -1, 0, 0, -1, 1]
    assert sequence.tokens.versions.tolist() == [None, None, "r/0.0", "r/0.0", None, "r/0.0"]


def test_each_trained_token_has_the_temperature_of_its_step() -> None:
    """A trajectory may mix temperatures; what is not known, and what is not trained, has none."""
    segments = [
        env([1, 2]),
        said([3, 4], 0, 0),
        env([5], 1),
        said([6], 1, 2),
        env([7], 3),
        said([8, 9], 2, 4),
    ]
    steps = [step(0, temperature=0.7), step(1), step(2, temperature=0.3)]
    (sequence,) = sequences_of(trajectory(segments, steps), ())
    first, last = [pytest.approx(0.7)] * 2, [pytest.approx(0.3)] * 2
    assert temperatures(sequence) == [None, None, *first, None, None, None, *last]
    (sequence,) = sequences_of(trajectory(segments, steps), ("t~0.0",))
    assert temperatures(sequence) == [*[None] * 7, *last]


def test_a_fork_trains_the_shared_tokens_in_its_first_row_only() -> None:
    tree = trajectory(
        [env([1]), said([2], 0, 0), env([3], 1), said([4], 1, 2), env([5], 1), said([6], 2, 4)],
        [step(0), step(1), step(2)],
    )
    first, second = sequences_of(tree, ())
    assert (ids(first), mask(first)) == ((1, 2, 3, 4), "0101")
    assert (ids(second), mask(second)) == ((1, 2, 5, 6), "0001")
    assert logprobs(second) == (0.0, 0.0, 0.0, -6 / 8)


def test_untrainable_steps_are_context_and_rows_end_at_the_last_trained_token() -> None:
    segments = [
        env([1]),
        said([2], 0, 0),
        env([3], 1),
        said([4], 1, 2),
        env([5], 3),
        said([6], 2, 4),
    ]
    (sequence,) = sequences_of(
        trajectory(segments, [step(0), step(1, trainable=False), step(2)]), ()
    )
    assert mask(sequence) == "010001"
    (sequence,) = sequences_of(
        trajectory(segments, [step(0), step(1), step(2)]), ("t~1.0", "t~2.0")
    )
    assert ids(sequence) == (1, 2)
    assert (
        sequences_of(trajectory(segments, [step(0), step(1), step(2)]), ("t~0.0", "t~1.0", "t~2.0"))
        == []
    )


def test_versions_follow_the_spans_of_a_step_also_across_its_segments() -> None:
    spans = (
        VersionSpan(version="r/1.0", start=0, end=3),
        VersionSpan(version="r/2.0", start=3, end=4),
    )
    tree = trajectory(
        [env([1]), said([2, 3], 0, 0, spans), said([4, 5], 0, 1, spans)], [step(0, version=None)]
    )
    (sequence,) = sequences_of(tree, ())
    assert sequence.tokens.versions.tolist() == [None, "r/1.0", "r/1.0", "r/1.0", "r/2.0"]


@pytest.mark.parametrize(
    ("segments", "steps"),
    [
        ([env([1]), said([2], 7, 0)], [step(0)]),
        (
            [
                env([1]),
                Segment(
                    parent=0,
                    step_index=0,
                    token_ids=pack_ids([2, 3]),
                    logprobs=pack_logprobs([-1.0]),
                ),
            ],
            [step(0)],
        ),
        ([env([1], 1), said([2], 0, 0)], [step(0)]),
    ],
)
def test_a_broken_tree_is_an_error(segments: list[Segment], steps: list[TrajectoryStep]) -> None:
    with pytest.raises(PayloadUnreadable):
        sequences_of(trajectory(segments, steps), ())


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Any tree: unique token ids, so that a token names its place."""
    segments: list[Segment] = []
    steps: list[TrajectoryStep] = []
    for index in range(draw(st.integers(1, 12))):
        parent = draw(st.integers(0, index - 1)) if index else None
        ids = [100 * index + k for k in range(draw(st.integers(1, 4)))]
        if index and draw(st.booleans()):
            segments.append(said(ids, len(steps), parent))
            steps.append(step(len(steps), trainable=draw(st.booleans())))
        else:
            segments.append(env(ids, parent))
    return trajectory(segments, steps)


@given(trees(), st.sets(st.integers(0, 11)))
def test_each_sampled_token_of_a_trainable_step_is_trained_once_under_its_path(
    tree: Trajectory, off: set[int]
) -> None:
    untrainable = {f"t~{i}.0" for i in off}
    context: dict[int, tuple[int, ...]] = {}
    expected: list[int] = []
    paths: list[tuple[int, ...]] = []
    for index, segment in enumerate(tree.segments):
        before = paths[segment.parent] if segment.parent is not None else ()
        own = tuple(100 * index + k for k in range(len(segment.token_ids) // 4))
        paths.append(before + own)
        for k, token in enumerate(own):
            context[token] = before + own[:k]
        if segment.step_index is not None:
            of = tree.steps[segment.step_index]
            if of.trainable and of.step_id not in untrainable:
                expected += own
    sequences = sequences_of(tree, untrainable)
    trained = Counter(t for s in sequences for t in s.tokens.trained().ids.tolist())
    assert trained == Counter(expected)
    for sequence in sequences:
        path = ids(sequence)
        assert sequence.tokens.mask[-1], "nothing is computed behind the last trained token"
        for i, on in enumerate(sequence.tokens.mask):
            assert path[:i] == context[path[i]]
            assert logprobs(sequence)[i] == (-path[i] / 8 if on else 0.0)


@given(st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=2), min_size=1, max_size=6))
def test_any_linear_conversation_is_one_row(turns: list[list[int]]) -> None:
    segments: list[Segment] = []
    for i, (heard, told) in enumerate(turns):
        segments.append(env([1] * heard, len(segments) - 1 if segments else None))
        segments.append(said([2] * told, i, len(segments) - 1))
    assert len(sequences_of(trajectory(segments, [step(i) for i in range(len(turns))]), ())) == 1


# -- batches


def member(
    name: str, *values: float | None, partition: int = 0, first: int = 0, last: int = 0
) -> BatchMember:
    rewards = tuple(
        RewardValue(source="rule", name="r", function_version="1", value=v, reward_revision=0)
        for v in values
    )
    return BatchMember(
        trajectory_id=name,
        trajectory_key=name,
        revision=0,
        rewards=rewards,
        untrainable_steps=(),
        trainable_tokens=1,
        place=Place(topic_id="id", partition=partition, first_offset=first, last_offset=last),
    )


def batch(*groups: BatchGroup, weights: dict[str, float] | None = None) -> ReadyBatch:
    return ReadyBatch(
        run_id="r",
        channel="train",
        batch_seq=0,
        groups=groups,
        policy_version=0,
        sync_every=1,
        algorithm="grpo",
        reward_weights=weights or {},
        input_topic_id="id",
        input_partition=0,
        input_from=0,
        input_to=0,
        content_hash="",
        trainable_tokens=0,
        created_at_event_time=0,
    )


def test_the_advantage_of_a_batch_is_per_group_and_weighted() -> None:
    payload = {n: trajectory([env([1]), said([2], 0, 0)], [step(0)], n) for n in "abcd"}
    groups = (
        BatchGroup(group_id="1", round=0, n=2, members=(member("a", 1.0), member("b", 0.0))),
        BatchGroup(group_id="2", round=0, n=2, members=(member("c", 5.0), member("d", 5.0))),
    )
    data = sequences_of_batch(
        batch(*groups, weights={"rule/r": 2.0}), payload, 2, "trajectory", ANY_ID
    )
    view = batch_view(data.sequences, data.members, "r", 3)
    sequences = with_advantages(data.sequences, grpo(view, AlgorithmSettings(std_offset=0.3)))
    std = 2.0**0.5
    assert [r.advantages.tolist() for r in sequences if r.advantages is not None] == [
        pytest.approx([a]) for a in (1 / (std + 0.3), -1 / (std + 0.3), 0.0, 0.0)
    ]
    assert (data.rewards, data.groups, data.unrewarded) == ((2.0, 0.0, 10.0, 10.0), 2, ())


@pytest.mark.parametrize("logprob", [float("-inf"), float("inf")])
def test_a_token_with_an_infinite_log_probability_is_not_trained_but_counted(
    logprob: float,
) -> None:
    """Minus infinity would weigh as much as the bound of the ratio allows."""
    some = Segment(
        parent=0, step_index=0, token_ids=pack_ids([3, 4]), logprobs=pack_logprobs([-0.5, logprob])
    )
    alone = Segment(
        parent=0, step_index=0, token_ids=pack_ids([3]), logprobs=pack_logprobs([logprob])
    )
    payload = {
        name: trajectory([env([1]), s], [step(0)], name) for name, s in (("a", some), ("b", alone))
    }
    group = BatchGroup(group_id="1", round=0, n=2, members=(member("a", 1.0), member("b", 0.0)))
    found = sequences_of_batch(batch(group), payload, 2, "trajectory", ANY_ID)
    (sequence,) = found.sequences
    assert (sequence.trajectory_id, mask(sequence), logprobs(sequence)) == (
        "a",
        "010",
        (0.0, -0.5, 0.0),
    )
    assert found.sampled_at_zero == {"a": 1, "b": 1}, "of the second nothing else is left"


def test_a_missing_reward_is_never_zero() -> None:
    payload = {n: trajectory([env([1]), said([2], 0, 0)], [step(0)], n) for n in "abcde"}
    groups = (
        BatchGroup(
            group_id="1", round=0, n=3, members=(member("a", 1.0), member("b"), member("c", 0.0))
        ),
        BatchGroup(group_id="2", round=0, n=2, members=(member("d", 5.0), member("e", None))),
    )
    data = sequences_of_batch(batch(*groups), payload, 2, "trajectory", ANY_ID)
    assert [r.trajectory_id for r in data.sequences] == ["a", "c"]
    assert (data.rewards, data.groups) == ((1.0, 0.0), 1)
    assert sorted(data.unrewarded) == ["b", "d", "e"]


@pytest.mark.parametrize("bad", [99, -1, 5000])
def test_paths_end_before_ids_that_the_model_cannot_compute_and_the_others_are_whole(
    bad: int,
) -> None:
    """The first path of the fork has the bad id behind the sampled tokens that both share."""
    tree = [
        env([1]),
        said([2, 3], 0, 0),
        env([4, bad], 1),
        said([5, 6, 7], 1, 2),
        env([8], 1),
        said([9], 2, 4),
    ]
    payload = {n: trajectory(tree, [step(0), step(1), step(2)], n) for n in "ab"}
    group = BatchGroup(group_id="1", round=0, n=2, members=(member("a", 1.0), member("b", 0.0)))
    found = sequences_of_batch(batch(group), payload, 2, "trajectory", ReadableIds(5000, {99}))
    trained = [s.tokens.trained().ids.tolist() for s in found.sequences]
    assert trained == [[2, 3, 9]] * 2
    assert not any(bad in s.tokens.ids for s in found.sequences)
    lost = (found.with_media, found.outside_vocabulary)
    assert lost == (({"a": 3, "b": 3}, {}) if bad == 99 else ({}, {"a": 3, "b": 3}))


def test_a_group_of_one_is_left_out_where_the_algorithm_compares() -> None:
    """A client names the size of its group: it ends no trainer."""
    lonely = BatchGroup(group_id="1", round=0, n=1, members=(member("a", 1.0),))
    found = sequences_of_batch(
        batch(lonely), {"a": trajectory([], [], "a")}, 2, "trajectory", ANY_ID
    )
    assert (found.sequences, found.unrewarded) == ((), ("a",))


def sequence(length: int) -> TrainingSequence:
    n = length
    zeros = np.zeros(n, np.float32)
    tokens = Tokens(
        np.ones(n, np.int32),
        np.arange(n) > 0,
        zeros,
        zeros,
        np.full(n, None, object),
        np.zeros(n, np.int32),
    )
    return TrainingSequence("t", tokens)


@given(
    st.lists(st.integers(2, 40), max_size=30),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_minibatches_cover_every_epoch_and_depend_on_the_batch_alone(
    lengths: list[int], count: int, epochs: int, seq: int
) -> None:
    sequences = [sequence(n) for n in lengths]
    parts = list(minibatches(sequences, count, epochs, 1, seq))
    assert parts == list(minibatches(sequences, count, epochs, 1, seq))
    assert all(parts) and len(parts) == epochs * min(count, len(sequences))
    assert Counter(len(r.tokens.ids) for p in parts for r in p) == Counter(
        {n: c * epochs for n, c in Counter(lengths).items()}
    )


def test_the_sequences_of_a_group_stay_in_one_minibatch() -> None:
    sequences = [replace(sequence(3), group=i % 5) for i in range(15)]
    parts = list(minibatches(sequences, 2, 1, 1, 0))
    groups = [{s.group for s in part} for part in parts]
    assert sorted(map(len, groups)) == [2, 3] and not groups[0] & groups[1]
    assert len(list(minibatches(sequences, 6, 1, 1, 0))) == 6, "fewer groups: by sequences"


@given(st.lists(st.integers(2, 40), max_size=30), st.integers(1, 100))
def test_micro_batches_stay_within_the_padded_tokens(lengths: list[int], limit: int) -> None:
    parts = micro_batches([sequence(n) for n in lengths], limit, packed=False)
    assert sorted(len(r.tokens.ids) for p in parts for r in p) == sorted(lengths)
    for part in parts:
        assert len(part) == 1 or len(part) * max(len(r.tokens.ids) for r in part) <= limit


# -- places


def test_scans_merge_what_is_near_and_take_all_partitions_at_once() -> None:
    members = [
        member("a", partition=0, first=0, last=1),
        member("b", partition=0, first=40, last=40),
        member("c", partition=1, first=7, last=9),
        member("d", partition=0, first=90_000, last=90_001),
    ]
    assert scans(members) == [{0: (0, 40), 1: (7, 9)}, {0: (90_000, 90_001)}]
    assert scans([]) == []


def test_parts_are_joined_in_order() -> None:
    whole = trajectory(
        [env([1]), said([2], 0, 0), env([3], 1), said([4], 1, 2)], [step(0), step(1)]
    )
    first = trajectory([env([1]), said([2], 0, 0)], [step(0)])
    second = trajectory([env([3], 1), said([4], 1, 2)], [step(1)])
    assert joined([first, second]) == whole
