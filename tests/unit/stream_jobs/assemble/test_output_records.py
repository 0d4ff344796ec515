"""Outputs of assemble: trajectory parts, candidates within their size bound, cached payloads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.assemble import InMemoryPartition, session, step

from clawstream.runtime.kafka import Record
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Segment, Tag, Trajectory, TrajectoryStep
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.topics import MAX_RECORD_BYTES
from clawstream.stream_jobs.assemble.limits import STEPS_MAX
from clawstream.stream_jobs.assemble.output_records import candidate, in_parts, slices
from clawstream.stream_jobs.assemble.payload.cache import PayloadCache, StepPayload
from clawstream.stream_jobs.assemble.state.annotations import (
    REWARDS_MAX,
    Annotations,
    AssessmentState,
    CurationMark,
    CurationState,
    CurrentReward,
)
from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.trajectories import STEPS, ClosedStep, ClosedTrajectory
from clawstream.stream_jobs.reward.job import PartBuffer

CODEC = Codec()


def whole(segments: list[int], steps: list[int], metadata: int | None = None) -> Trajectory:
    """Return a trajectory.

    Args:
        segments: tokens of each segment.
        steps: size of each step's reply, in bytes.
        metadata: size of the metadata, in bytes.
    """
    return Trajectory(
        run_id="r", trajectory_key="k", trajectory_id="k", group_id="g", channel="train",
        outcome="completed", opened_at=0, closed_at=1,
        metadata_json=b"m" * metadata if metadata is not None else None, part=0, parts=1,
        segments=tuple(
            Segment(parent=i - 1 if i else None, token_ids=bytes(4 * n))
            for i, n in enumerate(segments)
        ),
        steps=tuple(
            TrajectoryStep(
                step_id=f"k~{i}.0", index=i, status="ok", drift="root", prompt_tokens=1,
                response_tokens=1, response_json=bytes(n), trainable=True, offset=i,
            )
            for i, n in enumerate(steps)
        ),
    )  # fmt: skip


def at(offset: int, timestamp_ms: int = 0) -> Record:
    return Record("claw.trajectories", 0, offset, timestamp_ms, b"k", b"", {})


@given(
    st.lists(st.integers(0, 600), max_size=12),
    st.lists(st.integers(0, 3000), max_size=12),
    st.none() | st.integers(0, 5000),
)
def test_parts_hold_everything_once_within_the_limit(
    segments: list[int], steps: list[int], metadata: int | None
) -> None:
    trajectory = whole(segments, steps, metadata)
    parts = list(in_parts(trajectory, 6000))
    assert [(p.part, p.parts) for p in parts] == [(i, len(parts)) for i in range(len(parts))]
    assert joined(parts) == trajectory
    assert all(len(CODEC.encode(p)) <= 6000 + 300 for p in parts)
    buffer = PartBuffer()
    assert [buffer.take(at(i), p) for i, p in enumerate(parts)] == [None] * (len(parts) - 1) + [
        trajectory
    ]


def test_parts_count_bytes_not_characters() -> None:
    steps = whole([], [0] * 40).steps
    wordy = replace(
        steps[0],
        finish_reason="\U0001f600" * 200,
        tags=(Tag(name="n", evidence="\U0001f600" * 200),),
    )
    trajectory = replace(whole([], []), steps=tuple(replace(wordy, index=s.index) for s in steps))
    assert all(len(CODEC.encode(p)) <= 6000 + 300 for p in in_parts(trajectory, 6000))


def test_a_writer_that_begins_anew_is_followed_and_holds_nothing_up() -> None:
    parts = list(in_parts(whole([500] * 6, [10]), 4000))
    buffer = PartBuffer()
    assert [buffer.take(at(10 + i), p) for i, p in enumerate(parts[:2])] == [None, None]
    assert buffer.done(11) == 9
    assert [buffer.take(at(12 + i), p) is not None for i, p in enumerate(parts)] == [False] * (
        len(parts) - 1
    ) + [True]
    assert buffer.done(99) == 99
    assert buffer.take(at(100), parts[1]) is None and buffer.done(100) == 100


def test_the_parts_of_two_writers_may_be_mixed() -> None:
    """Records in flight of a fenced writer can arrive between records of the next owner."""
    parts = list(in_parts(whole([500] * 6, [10]), 4000))
    buffer = PartBuffer()
    mixed = [parts[0], parts[1], parts[0], *parts[2:], *parts[1:]]
    assert [t for i, p in enumerate(mixed) if (t := buffer.take(at(i), p)) is not None] == [
        joined(parts)
    ]
    assert buffer.done(99) == 99


def test_what_never_becomes_whole_is_given_up() -> None:
    parts = list(in_parts(whole([500] * 6, [10]), 4000))
    for missing in (1, len(parts) - 1):
        for late in (at(200), at(20, 1001)):
            buffer = PartBuffer(expire_records=100, expire_ms=1000)
            came = [p for p in parts if p.part != missing]
            assert [buffer.take(at(10 + i), p) for i, p in enumerate(came)] == [None] * len(came)
            assert buffer.expire(at(99, 1000)) == [] and buffer.done(99) == 9
            assert buffer.expire(late) == [(at(10), parts[0])] and buffer.expire(late) == []
            assert buffer.done(late.offset) == late.offset


def closed(steps: int, reason: str | None = None) -> ClosedTrajectory:
    entries = [ClosedStep(f"{'C' * 26}{i}.0", 0, 5, reason, "r/4.0", "r/7.1") for i in range(steps)]
    return ClosedTrajectory(
        0,
        1,
        "completed",
        None,
        "train",
        None,
        4,
        2,
        entries,
        Annotations(),
        prompt_tokens=9,
        revision=3,
    )


def marked(
    suffix: str,
    quality: float | None = None,
    trainable: bool | None = None,
    tags: list[str] | None = None,
) -> CurationState:
    return CurationState([CurationMark(1, suffix, quality, trainable, tags, 0)])


def test_candidate_says_what_admission_needs() -> None:
    state = closed(2)
    state.annotations.marks = {
        "": marked("", quality=0.5, tags=["x"]),
        state.steps[1].step_suffix: marked(state.steps[1].step_suffix, trainable=False),
    }
    for slot in (("rule", "b"), ("env", "z"), ("env", "a")):
        r = CurrentReward(slot[0], slot[1], "1", None, 1.0, None, 0)  # type: ignore[arg-type]
        state.annotations.rewards.put(r)
    c, _ = candidate(("r", "k"), state, CODEC)
    assert (c.revision, c.group_id, c.group_size, c.round, c.prompt_tokens, c.trainable_tokens) == (
        3,
        "k",
        4,
        2,
        9,
        5,
    )
    assert (c.oldest_sync_index, c.newest_sync_index, c.quality, c.tags) == (4, 7, 0.5, ("x",))
    assert [(r.source, r.name) for r in c.rewards] == [("env", "a"), ("env", "z"), ("rule", "b")]
    assert [(s.trainable, s.reason) for s in c.steps] == [(True, None), (False, "curation")]
    assert decoder(ClosedTrajectory).decode(encode(state)) == state


LONGEST_KEY = "k" * 200


@pytest.mark.slow
def test_candidate_of_any_trajectory_names_its_steps() -> None:
    """The candidate has the maximum number of steps and rewards, and the longest key."""
    state = closed(STEPS_MAX)
    state.annotations.assessed = AssessmentState(1, 0.5, [0.9876] * STEPS_MAX)
    for i in range(REWARDS_MAX):
        r = CurrentReward(
            "judge", f"helpful-{i % 2}", "2026-11", state.steps[i // 2].step_suffix, 0.5, None, 1
        )
        state.annotations.rewards.put(r)
    c, _ = candidate(("r", LONGEST_KEY), state, CODEC)
    assert c.trainable and (len(c.steps), len(c.rewards)) == (STEPS_MAX, REWARDS_MAX)
    assert 0.9 * MAX_RECORD_BYTES < len(CODEC.encode(c)) <= MAX_RECORD_BYTES


def test_candidate_above_its_bound_is_not_trained() -> None:
    state = closed(2000)
    for i, s in enumerate(state.steps):
        state.annotations.marks[s.step_suffix] = marked(
            s.step_suffix, tags=[f"{i} {j} {'x' * 180}" for j in range(50)]
        )
    c, _ = candidate(("r", LONGEST_KEY), state, CODEC)
    assert len(CODEC.encode(c)) <= MAX_RECORD_BYTES and c.steps == ()
    assert not c.trainable and c.reason is not None and "2000 steps" in c.reason


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 400)), max_size=40))
def test_cache_stays_within_its_bytes_and_loses_the_oldest(puts: list[tuple[int, int]]) -> None:
    cache, order = PayloadCache(1000), list[int]()
    for offset, size in puts:
        cache.put(offset, bytes(size))
        order = [o for o in order if o != offset] + [offset]
        assert cache.bytes <= 1000
        kept = list(cache.split(dict.fromkeys(order, 0))[0])
        assert kept == order[len(order) - len(kept) :] and len(cache) == len(kept)
    for offset, _ in puts:
        cache.drop(offset)
    assert (cache.bytes, len(cache)) == (0, 0)


def test_equal_state_gives_equal_bytes() -> None:
    trajectory = whole([3, 4], [5])
    assert CODEC.encode(trajectory) == CODEC.encode(replace(trajectory))


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 100))
def test_slices_keep_order_and_bound(sizes: list[int], limit: int) -> None:
    given = {("r", str(i)): size for i, size in enumerate(sizes)}
    found = slices(given, given.__getitem__, limit)
    assert [key for run in found for key in run] == list(given)
    for run in found:
        assert len(run) == 1 or sum(given[key] for key in run) <= limit
    for run, after in itertools.pairwise(found):
        assert sum(given[key] for key in (*run, after[0])) > limit


def test_tags_of_a_step_come_out_with_their_evidence_and_with_their_names() -> None:
    tags = (Tag(name="sub_agent", evidence="header"), Tag(name="title", evidence="prompt"))
    w = InMemoryPartition().feed(
        (STEPS, 0, step("k", 0, tags=tags)), (STEPS, 1, session("k", "completed"))
    )
    assert w.trajectories["k"].steps[0].tags == tags
    assert w.last("k").steps[0].tags == ("sub_agent", "title")


def test_what_a_slice_counts_is_what_the_payload_takes() -> None:
    w = InMemoryPartition()
    first = step("k", 0, [1] * 3000, [2] * 1000, response_json=b'"%s"' % (b"x" * 50_000))
    w.decide(
        [
            (STEPS, 0, 0, first),
            (STEPS, 1, 1, step("k", 1, [1] * 3000 + [2] * 1000 + [3] * 500, [4] * 10)),
        ]
    )
    (trajectory,) = w.state.opened.values()
    kept = sum(p.size for p in w.payload.values() if isinstance(p, StepPayload))
    assert abs(trajectory.steps.size - kept) < 2048
