"""Properties that hold for any interleaving, duplicates, batches and crashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.assemble import (
    ANONYMOUS_KEY,
    CODEC,
    InMemoryPartition,
    assessment,
    content,
    curation,
    reward,
    session,
    step,
)
from support.examples import examples

from clawstream.schemas.records import SessionEvent, Tick
from clawstream.stream_jobs.assemble.changelog import ChangelogReader
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic

KEYS = ("a", "b", ANONYMOUS_KEY)
MOMENT = st.integers(0, 400)
CARRIED = st.sampled_from([None, {"a": 0.0}, {"a": 1.0, "b": 0.5}])
"""The rewards of a completion."""


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[tuple[int, Any]], list[tuple[int, Any]]]:
    """Draw a steps topic and a rewards topic, each with ascending timestamps."""
    steps: list[Any] = []
    chains: dict[str, list[int]] = {k: [1] for k in KEYS}
    numbers = dict.fromkeys(KEYS, 0)
    for _ in range(draw(st.integers(1, 14))):
        key = draw(st.sampled_from(KEYS))
        kind = draw(
            st.sampled_from(
                ["step", "step", "step", "fork", "blind", "opened", "completed", "tick"]
            )
        )
        if kind in ("step", "fork", "blind"):
            n = numbers[key]
            numbers[key] += 1
            prompt = chains[key] if kind != "fork" else [1, 7]
            more: dict[str, Any] = {"prompt_token_ids": None} if kind == "blind" else {}
            more["status"] = draw(st.sampled_from(["ok", "ok", "aborted"]))
            more["idempotency_key"] = draw(st.sampled_from([None, None, "i"]))
            steps.append(step(key, n, prompt, [n + 10], **more))
            chains[key] = [*prompt, n + 10, 2]
        elif kind == "tick" or (key == ANONYMOUS_KEY and kind == "opened"):
            steps.append(Tick(partition=0))
        elif key == ANONYMOUS_KEY:
            n, value = draw(st.integers(0, 4)), draw(CARRIED)
            end = session(key, kind, f"{n}-{kind}-{value}", step_id=f"{key}~C{n}.0", rewards=value)
            steps.append(end)
        else:
            value = draw(CARRIED) if kind == "completed" else None
            name = f"{key}-{kind}-{draw(st.integers(0, 1))}-{value}"
            steps.append(session(key, kind, name, metadata_json=b"{}", rewards=value))
    rewards: list[Any] = [
        replace(
            reward(e.trajectory_key, value, name=name),
            trajectory_id=e.trajectory_key if e.step_id is not None else None,
            step_id=e.step_id,
        )
        for e in steps
        if isinstance(e, SessionEvent)
        for name, value in (e.rewards or {}).items()
    ]
    for i in range(draw(st.integers(0, 10))):
        key, n = draw(st.sampled_from(KEYS)), draw(st.none() | st.integers(0, 3))
        n = 0 if n is None and key == ANONYMOUS_KEY else n
        if draw(st.integers(0, 3)) == 0 and key != ANONYMOUS_KEY:
            rewards.append(
                assessment(
                    key,
                    0.5,
                    *draw(st.lists(st.sampled_from([0.25, 1.0]), max_size=3)),
                    revision=i % 3,
                )
            )
        elif draw(st.booleans()):
            made = reward(
                key, draw(st.sampled_from([0.0, 1.0, None])), n, "a", draw(st.integers(0, 2))
            )
            rewards.append(replace(made, trajectory_id=draw(st.sampled_from([None, key]))))
        else:
            rewards.append(curation(key, f"e{i}", n, trainable=draw(st.booleans())))
    logs = []
    for log in (steps, draw(st.permutations(rewards))):
        at = 0
        timed = []
        for event in log:
            at += draw(MOMENT)
            timed.append((at, event))
        timed.append((at + 5000, Tick(partition=0)))
        logs.append(timed)
    return logs[0], logs[1]


def again(draw: st.DrawFn, log: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Repeat some records of a topic at later positions."""
    out = list(log)
    for _ in range(draw(st.integers(0, 3))):
        source = draw(st.integers(0, len(out) - 1))
        at = draw(st.integers(source + 1, len(out)))
        out.insert(at, (out[at - 1][0], out[source][1]))
    return out


def merged(
    draw: st.DrawFn, logs: Sequence[list[tuple[int, Any]]]
) -> list[tuple[SourceTopic, int, int, Any]]:
    """Draw an interleaving that keeps the order within each topic."""
    left = [list(enumerate(log)) for log in logs]
    out: list[tuple[SourceTopic, int, int, Any]] = []
    while left[0] or left[1]:
        source: SourceTopic = STEPS if not left[1] or (left[0] and draw(st.booleans())) else REWARDS
        offset, (at, event) = left[source].pop(0)
        out.append((source, offset, at, event))
    return out


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_any_interleaving_with_duplicates_and_crashes_gives_the_same(data: st.DataObject) -> None:
    logs = data.draw(inputs())
    plain = InMemoryPartition()
    for source in (STEPS, REWARDS):
        plain.batch([(source, i, at, e) for i, (at, e) in enumerate(logs[source])])
    # A dead letter for a missing target may find its target when it is sent again: that is the
    # purpose of replaying dead letters. So such logs get no duplicates.
    records = merged(
        data.draw, logs if plain.dead_letters else [again(data.draw, log) for log in logs]
    )
    other, at = InMemoryPartition(), 0
    while at < len(records):
        size = data.draw(st.integers(1, 5))
        other.decide(records[at : at + size])
        at += size
        moment = data.draw(
            st.sampled_from(["go on", "crash before outputs", "crash after outputs", "snapshot"])
        )
        if moment == "crash before outputs":
            other.crash()
            continue
        other.emit()
        if moment == "crash after outputs":
            other.crash()
        elif moment == "snapshot":
            other.snapshot()
    assert content(other) == content(plain)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_state_rebuilt_from_the_log_equals_the_state(data: st.DataObject) -> None:
    records = merged(data.draw, data.draw(inputs()))
    w, at = InMemoryPartition(), 0
    while at < len(records):
        size = data.draw(st.integers(1, 4))
        w.batch(records[at : at + size])
        at += size
        if data.draw(st.integers(0, 3)) == 0:
            w.snapshot()
    w.decide([])
    log = ChangelogReader()
    for offset, value in enumerate(w.log, 1):
        log.read(offset, CODEC.decode(value), len(value))
    assert log.seq == w.seq
    # Changes by ticks alone may be missing from the changelog.
    ticks_alone = {"applied": None, "time": None}
    assert _fields(log.state) | ticks_alone == _fields(w.state) | ticks_alone
    assert PartitionState.load(log.state.dump()) == log.state


def _fields(state: PartitionState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in PartitionState.__slots__}


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_reading_again_changes_nothing(data: st.DataObject) -> None:
    records = merged(data.draw, data.draw(inputs()))
    w = InMemoryPartition().batch(records)
    before, seq = content(w), w.seq
    w.decide([])
    w.batch(records)
    assert content(w) == before and w.seq <= seq + 1
