"""The deadlines of groups and open batches in event time. Pure.

A timer is never cancelled: when it fires, its owner checks whether it still matters. Timers of
equal time fire in the order of their owners' names, so the order depends only on the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from clawstream.stream_jobs.admit.group import GroupKey


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
