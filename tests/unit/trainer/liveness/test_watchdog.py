"""The time limits of a thread's work, on a clock of the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from clawstream.trainer.liveness.watchdog import FACTOR, MOST_S, Watchdog


@dataclass
class Clock:
    """now: In seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def allowed_s(watchdog: Watchdog, clock: Clock) -> float:
    """Return the time until the work in hand is not in time any more, in steps of 1 s."""
    began = clock.now
    while watchdog.in_time:
        clock.now += 1.0
    return clock.now - began


def test_work_is_in_time_until_its_limit_and_idleness_never_is() -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    assert not watchdog.in_time
    with watchdog.work("pass", 60.0):
        assert allowed_s(watchdog, clock) == 60.0
    assert not watchdog.in_time


@pytest.mark.parametrize(
    ("took_s", "limit_s"), [(1.0, 60.0), (40.0, FACTOR * 40.0), (3600.0, MOST_S)]
)
def test_the_longest_work_of_a_kind_raises_its_limit(took_s: float, limit_s: float) -> None:
    clock = Clock()
    watchdog = Watchdog(clock)
    for seconds in (took_s, 0.5):
        with watchdog.work("pass", 60.0):
            clock.now += seconds
    with watchdog.work("pass", 60.0):
        assert allowed_s(watchdog, clock) == limit_s
    with watchdog.work("file", 60.0):
        assert allowed_s(watchdog, clock) == 60.0


def test_work_inside_of_other_work_has_its_own_time() -> None:
    """Many passes take longer than the batch may take between two of them."""
    clock = Clock()
    watchdog = Watchdog(clock)
    with watchdog.work("batch", 10.0):
        for _ in range(100):
            clock.now += 1.0
            with watchdog.work("pass", 60.0):
                clock.now += 30.0
                assert watchdog.in_time
        assert allowed_s(watchdog, clock) == 10.0
    with watchdog.work("batch", 10.0):
        assert allowed_s(watchdog, clock) == FACTOR * 10.0


def test_an_error_ends_the_work() -> None:
    watchdog = Watchdog(Clock())
    with pytest.raises(ValueError, match="x"), watchdog.work("pass", 60.0):
        raise ValueError("x")
    assert not watchdog.in_time
