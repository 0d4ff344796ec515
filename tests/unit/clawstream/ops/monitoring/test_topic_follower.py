"""Test what the monitor makes of weights, reports of workers and dead letters."""

from __future__ import annotations

from typing import Any, cast

from clawstream.ops.monitoring.topic_follower import FORGOTTEN_S, FollowedState, TopicFollower
from clawstream.runtime.kafka import Record
from clawstream.schemas.records import DeadLetter, DeadLetterResolved, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings

NOW_S = 10_000.0


def version(index: int, run: str = "r") -> WeightVersion:
    return WeightVersion(
        version_id=f"{run}/{index}.0", run_id=run, sync_index=index, attempt=0, format="full",
        files=(), channel="train", metrics={}, created_at=0,
    )  # fmt: skip


def report(worker: str, silent_s: float, serves: str | None = None) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker, base_url="http://w", models=(), state="ready", weight_version=serves,
        run_id="r", heartbeat_at=int((NOW_S - silent_s) * 1e6), heartbeat_interval_ms=2000,
        started_at=0, loads=0,
    )  # fmt: skip


def letter(offset: int) -> DeadLetter:
    return DeadLetter(
        topic="claw.steps", topic_id="t", partition=0, offset=offset, timestamp_ms=0,
        process="lake", reason="invalid", detail="", created_at=0,
    )  # fmt: skip


def resolved(offset: int) -> DeadLetterResolved:
    return DeadLetterResolved(
        topic="claw.steps", topic_id="t", partition=0, offset=offset, action="dismissed", by="me",
        created_at=0,
    )  # fmt: skip


def shown(*events: Any) -> dict[tuple[str, ...], float]:
    state = FollowedState("r")
    for event in events:
        state.fold(event)
    return {(name.removeprefix("clawstream_"), *at): v for name, at, v in state.values(NOW_S)}


def test_a_dead_letter_is_open_until_it_is_resolved_however_often_it_is_written() -> None:
    opened = {0: 0, 1: 2, 2: 2, 3: 1, 4: 1}
    events = [letter(1), letter(2)], [letter(1)], [resolved(1)], [letter(1)]
    for count, expected in opened.items():
        known = [event for some in events[:count] for event in some]
        assert shown(*known)["dead_letters_open",] == expected


def test_versions_and_silence_of_each_worker() -> None:
    gone = report("gone", FORGOTTEN_S + 1)
    assert shown(
        version(1), version(4), version(9, run="s"), report("w", 3, "r/1.0"), gone, letter(1)
    ) == {
        ("dead_letters_open",): 1,
        ("newest_version",): 4,
        ("worker_lag_versions", "w"): 3,
        ("worker_heartbeat_age_seconds", "w"): 3,
        ("worker_heartbeat_interval_seconds", "w"): 2,
    }


def test_a_worker_that_has_ended_is_not_shown() -> None:
    state = FollowedState("r")
    state.fold(report("w", 3))
    state.forget_worker("w")
    assert [name for name, *_ in state.values(NOW_S)] == ["clawstream_dead_letters_open"]


def test_a_tombstone_with_any_key_does_not_end_the_reader() -> None:
    class OneTombstone:
        def __init__(self) -> None:
            self.left = [[Record("claw.workers", 0, 0, 0, b"\xff", None, {})]]

        def poll(self, *_: Any) -> list[Record]:
            return self.left.pop() if self.left else []

    follower = TopicFollower(cast(Any, None), Settings())
    follower._reader = cast(Any, OneTombstone())
    assert list(follower.poll().workers(NOW_S)) == []
