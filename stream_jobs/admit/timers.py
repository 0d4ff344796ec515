"""Event time, and the deadlines of groups and open batches in it. Pure.

A timer is never cancelled: when it fires, its owner checks whether it still matters. Timers of
equal time fire in the order of their owners' names, so the order depends only on the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from schemas.records import Tick
from stream_jobs.admit.group import GroupKey


class EventTime:
    """The lowest time of the source partitions' last ticks. tickers: Number of partitions."""

    def __init__(self, tickers: int) -> None:
        self._tickers = tickers
        self._last: dict[int, int] = {}

    def after(self, tick: Tick) -> int | None:
        """Return the event time after a tick, ms; None before every partition has ticked.

        Raises:
            ValueError: The tick names no source partition, or no time.
        """
        if not 0 <= tick.partition < self._tickers or tick.event_time is None:
            raise ValueError(
                f"tick of partition {tick.partition} of {self._tickers} with event time "
                f"{tick.event_time}: must name a source partition and its event time"
            )
        if tick.event_time > self._last.get(tick.partition, -1):
            self._last[tick.partition] = tick.event_time
        return min(self._last.values()) if len(self._last) == self._tickers else None


class Timer(NamedTuple):
    """A deadline. at: event time, ms. batch: the owner is an open batch with key ("", key)."""

    at: int
    batch: bool
    owner: GroupKey


class TimerQueue:
    """A heap of timers, rebuilt when most of them belong to decided owners."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []

    def add(self, deadline: Timer) -> None:
        """Schedule a timer."""
        heapq.heappush(self._heap, deadline)

    def next(self, now: int) -> Timer | None:
        """Remove and return the earliest timer that is due, or None."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0].at <= now else None

    def replace(self, deadlines: Iterable[Timer]) -> None:
        """Replace all timers."""
        self._heap = sorted(set(deadlines))

    def mostly_stale(self, owners: int) -> bool:
        """Return True when the queue holds so many stale timers that a rebuild pays."""
        return len(self._heap) > 1024 + 4 * owners
