"""The times of a trajectory: when its steps were called, and the moments that are shown first."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from clawstream.inspector.queries.trajectory import Moment, Span, main_moments, spans

BEGAN = datetime(2026, 1, 2)


def step(began_s: float | None, ended_s: float | None) -> dict[str, Any]:
    times = [None if s is None else BEGAN + timedelta(seconds=s) for s in (began_s, ended_s)]
    return {"received_at": times[0], "finished_at": times[1]}


def test_a_span_is_a_share_of_the_time_between_the_first_and_the_last_call() -> None:
    assert spans([step(0, 2), step(None, 3), step(4, 8)]) == [
        Span(2.0, 0.0, 25.0),
        None,
        Span(4.0, 50.0, 50.0),
    ]


def test_steps_without_times_have_no_span() -> None:
    assert spans([step(None, None)]) == [None]
    assert spans([]) == []


def test_calls_of_no_length_have_a_place() -> None:
    assert spans([step(1, 1)]) == [Span(0.0, 0.0, 0.0)]


def test_the_first_moment_and_the_last_of_each_place_are_shown_first() -> None:
    moments = [
        Moment(BEGAN + timedelta(seconds=i), where, what, index, float(i))
        for i, (where, what, index) in enumerate(
            [
                ("gateway", "step 0: request", 0),
                ("gateway", "step 0: last token", 0),
                ("Kafka", "step 0", 0),
                ("gateway", "step 1: request", 1),
                ("gateway", "step 1: last token", 1),
                ("Kafka", "step 1", 1),
                ("assemble", "closed", None),
                ("assemble", "payload", None),
            ]
        )
    ]
    assert [m.what for m in main_moments(moments)] == [
        "step 0: request",
        "step 1: last token",
        "step 1",
        "closed",
        "payload",
    ]
    assert main_moments([]) == []
