"""The deadlines of one connection, on one timer of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping


class Deadlines:
    """Deadlines by name.

    To set or clear one costs no timer in most cases: the timer compares the deadlines when it
    fires.

    expired: Called when a deadline has passed; the deadline is then cleared.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, expired: Mapping[str, Callable[[], None]]
    ) -> None:
        self._loop, self._expired = loop, expired
        self._until: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._fires = float("inf")

    def set(self, name: str, seconds: float) -> None:
        """Set a deadline from now."""
        until = self._until[name] = self._loop.time() + seconds
        if until < self._fires:
            self._arm(until)

    def clear(self, name: str) -> None:
        """Clear a deadline, if it is set."""
        self._until.pop(name, None)

    def stop(self) -> None:
        """Clear all deadlines for good."""
        self._until, self._expired = {}, {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires, self._timer = until, self._loop.call_at(until, self._look)

    def _look(self) -> None:
        """Call what has expired; wait for the next deadline."""
        self._timer, self._fires = None, float("inf")
        now = self._loop.time()
        for name in [name for name, until in self._until.items() if until <= now]:
            if self._until.pop(name, None) is not None:  # an earlier one may have cleared it
                self._expired[name]()
        if self._until and (first := min(self._until.values())) < self._fires:
            self._arm(first)
