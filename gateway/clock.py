"""Injectable clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def _wall_micros() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Clock:
    """Source of time.

    micros: Wall clock in microseconds, for records only. monotonic: Seconds, for all decisions.
    """

    micros: Callable[[], int] = _wall_micros
    monotonic: Callable[[], float] = time.monotonic
