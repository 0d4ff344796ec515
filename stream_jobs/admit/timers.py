"""TimerQueue in event time, of groups and of open batches. Pure.

A deadline is never taken back: when it comes, its owner looks whether it still matters. Ties are in
the order of the owners' names, so that the order depends on nothing but the log.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from stream_jobs.admit.group import GroupKey


class Timer(NamedTuple):
    """at: event time, milliseconds.

    batch: whether the owner is an open batch, whose key is ("", key).
    """

    at: int
    batch: bool
    owner: GroupKey


class TimerQueue:
    """A heap that is built anew when most of it is of owners long gone."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []

    def add(self, deadline: Timer) -> None:
        """Plan one."""
        heapq.heappush(self._heap, deadline)

    def next(self, now: int) -> Timer | None:
        """Take the earliest one that has come, if any."""
        return heapq.heappop(self._heap) if self._heap and self._heap[0].at <= now else None

    def replace(self, deadlines: Iterable[Timer]) -> None:
        """Forget all and plan these."""
        self._heap = sorted(set(deadlines))

    def mostly_stale(self, owners: int) -> bool:
        """Return True when the queue holds so many stale timers that a rebuild pays."""
        return len(self._heap) > 1024 + 4 * owners
