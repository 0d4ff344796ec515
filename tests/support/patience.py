"""Limits of waits, in seconds of a machine that is not busy."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_S = 0.05
PATIENCE_S = 180.0


class Patience:
    """A limit that runs more slowly while more tasks want a processor than there are processors.

    A busy machine thus makes a test slow, and not red.
    """

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._seconds = self._left = seconds
        self._seen = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds of a quiet machine that are left."""
        now = time.monotonic()
        self._left -= (now - self._seen) * min(1.0, (os.cpu_count() or 1) / load())
        self._seen = now
        return self._left

    def check(self, what: object) -> None:
        """Raise AssertionError with `what` if no time is left."""
        assert self.left_s > 0, f"not within {self._seconds:g} s: {what}"


def load() -> float:
    """Return how many tasks have wanted a processor in the last minute, at least one."""
    return max(1.0, os.getloadavg()[0])


def until(condition: Callable[[], T], what: object = None, seconds: float = PATIENCE_S) -> T:
    """Poll until the condition is true, and return its value.

    Raises:
        AssertionError: It is not true within the time.
    """
    patience = Patience(seconds)
    while not (value := condition()):
        patience.check(what or condition)
        time.sleep(POLL_S)
    return value


async def until_async(
    condition: Callable[[], T],
    what: object = None,
    seconds: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> T:
    """Do the same as `until` without blocking the event loop."""
    patience = Patience(seconds)
    while not (value := condition()):
        patience.check(what or condition)
        await asyncio.sleep(poll_s)
    return value
