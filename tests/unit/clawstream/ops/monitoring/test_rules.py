"""Test the rules that name stalled consumers, over windows of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.ops.monitoring.rules import (
    PATIENCE_S,
    PROBLEMS,
    STATUSES,
    Sample,
    Status,
    status_of,
    worst,
)


def samples(*seen: tuple[int | None, int], every_s: float = 5.0) -> list[Sample]:
    """Return a window. seen: The committed offset and the records left of each."""
    return [Sample(i * every_s, committed, records) for i, (committed, records) in enumerate(seen)]


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        ([], "ok"),
        ([(5, 9)], "ok"),
        ([(5, 9)] * 3, "ok"),
        ([(5, 9)] * 4, "stalled"),
        ([(5, 1), (5, 3), (5, 7), (5, 9)], "stalled"),
        ([(5, 9), (5, 9), (5, 0), (5, 9)], "ok"),
        ([(5, 0), (5, 9), (5, 9), (5, 9), (5, 9)], "stalled"),
        ([(4, 9), (5, 9), (5, 9), (5, 9), (5, 9)], "stopped"),
        ([(4, 9), (5, 9), (5, 9), (5, 9)], "ok"),
        ([(9, 1), (3, 9), (3, 9), (3, 9), (3, 9)], "stopped"),
        ([(None, 9)] * 4, "absent"),
        ([(None, 0)] * 4, "ok"),
        ([(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)], "behind"),
        ([(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)], "ok"),
        ([(1, 1), (2, 2), (3, 3), (4, 2), (5, 5)], "ok"),
    ],
)
def test_statuses(seen: Sequence[tuple[int | None, int]], status: Status) -> None:
    assert status_of(samples(*seen)) == status


windows = st.lists(
    st.tuples(st.floats(0.1, 20), st.none() | st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=12,
).map(
    lambda seen: [
        Sample(sum(gap for gap, *_ in seen[: i + 1]), committed, records)
        for i, (_, committed, records) in enumerate(seen)
    ]
)


@given(windows)
def test_a_problem_stands_still_for_its_patience_with_work_left(window: list[Sample]) -> None:
    status, last = status_of(window), window[-1]
    recent = [s for s in window if s.time_s >= last.time_s - PATIENCE_S]
    if status in PROBLEMS or status == "absent":
        assert {s.committed for s in recent} == {last.committed}
        assert all(s.records for s in recent)
        assert last.time_s - window[0].time_s >= PATIENCE_S
        assert (status == "absent") == (last.committed is None)
    if status == "stalled":
        assert {s.committed for s in window} == {last.committed}


@given(windows, st.floats(-1e6, 1e6), st.integers(0, 1000))
def test_only_differences_of_times_and_offsets_count(
    window: list[Sample], seconds: float, offsets: int
) -> None:
    quarters = [replace(s, time_s=round(s.time_s * 4) / 4) for s in window]
    moved = [
        replace(
            s,
            time_s=s.time_s + round(seconds),
            committed=None if s.committed is None else s.committed + offsets,
        )
        for s in quarters
    ]
    assert status_of(moved) == status_of(quarters)


@given(windows, st.integers(1, 3))
def test_to_stand_still_for_longer_ends_as_a_problem(window: list[Sample], records: int) -> None:
    last = replace(window[-1], records=records, committed=window[-1].committed or 0)
    later = [replace(last, time_s=last.time_s + s) for s in (0.5, 8.0, 16.0)]
    assert status_of([*window, *later]) in PROBLEMS


def test_a_heartbeat_is_progress_and_its_end_is_a_stop() -> None:
    """Samples every 5 s of a consumer at one position, with a heartbeat at every other one."""
    beating = [Sample(5.0 * i, 5, 9, f"beat {i // 2}") for i in range(20)]
    assert {status_of(beating[:n]) for n in range(len(beating))} == {"ok"}
    more = [replace(s, records=9 + i) for i, s in enumerate(beating)]
    assert status_of(more) == "behind"
    last = beating[-1]
    later = [replace(last, time_s=last.time_s + 5.0 * i) for i in range(1, 5)]
    statuses = [status_of([*beating, *later[:n]]) for n in range(5)]
    assert statuses == ["ok", "ok", "stopped", "stopped", "stopped"]
    assert status_of([*beating, replace(last, records=0)]) == "ok"


def test_the_worst_status() -> None:
    assert worst(["ok", "stalled", "behind"]) == "stalled" and worst([]) == "ok"
    assert STATUSES[-1] == "stalled"
