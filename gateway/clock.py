"""Time, injected."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def _wall_micros() -> int:
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Clock:
    """micros: wall clock in microseconds, information only. monotonic: seconds, for every decision."""

    micros: Callable[[], int] = _wall_micros
    monotonic: Callable[[], float] = time.monotonic
