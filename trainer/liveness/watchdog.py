"""Whether the work of a thread goes on within its time limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FACTOR = 5
"""Work may take this many times as long as the longest of its kind so far."""
MOST_S = 3600.0
"""Not even slow work of the past raises a limit above this."""


class Watchdog:
    """Knows the work that one thread has in hand, and its deadline.

    A thread that is stuck cannot say so itself; another one asks `in_time`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: In seconds."""
        self._clock = clock
        self._longest: dict[str, float] = {}
        self._work: tuple[str, float] | None = None
        self._began = clock()
        self._deadline: float | None = None

    @contextmanager
    def work(self, kind: str, limit_s: float) -> Iterator[None]:
        """Do work. Inside of other work, it interrupts that, whose time then begins again.

        Args:
            kind: Its longest time so far may raise its limit.
            limit_s: Lowest limit, in seconds.
        """
        outer = self._work
        self._switch((kind, limit_s))
        try:
            yield
        finally:
            self._switch(outer)

    def _switch(self, work: tuple[str, float] | None) -> None:
        now, longest = self._clock(), self._longest
        if self._work is not None:
            kind, _ = self._work
            longest[kind] = max(longest.get(kind, 0.0), now - self._began)
        self._work, self._began, self._deadline = work, now, None
        if work is not None:
            kind, limit_s = work
            self._deadline = now + max(limit_s, min(FACTOR * longest.get(kind, 0.0), MOST_S))

    @property
    def in_time(self) -> bool:
        """Whether there is work in hand, and its deadline has not passed. For other threads."""
        deadline = self._deadline
        return deadline is not None and self._clock() < deadline
