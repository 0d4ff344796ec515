"""Values over time in little memory: the newest in fine steps, older ones in coarse steps.

Each level keeps the highest value of each of its steps, so that a peak stays visible for as long as
the coarsest level reaches. A series takes 36 KB at most.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from math import ceil
from threading import Lock
from typing import NamedTuple

POINTS = 720
"""Points of a line, at most."""
SERIES_MAX = 500
"""Series that are kept; the one without a value for the longest time goes first."""


class Level(NamedTuple):
    """step_s: Length of a step. kept: Number of steps."""

    step_s: int
    kept: int


LEVELS = (Level(10, 400), Level(60, 780), Level(600, 1_100))
"""An hour, twelve hours and a week, each with a margin."""


class _Line:
    """The steps of one series and level: start times, ascending, and values."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._times, self._values = array("q"), array("d")

    def add(self, time_s: float, value: float) -> None:
        start = int(time_s // self._level.step_s) * self._level.step_s
        if self._times and start <= self._times[-1]:  # the clock may go back
            self._values[-1] = max(self._values[-1], value)
            return
        self._times.append(start)
        self._values.append(value)
        if len(self._times) > self._level.kept:
            del self._times[0], self._values[0]

    def values(self, first_s: int, step_s: int, points: int) -> list[float | None]:
        """Return the highest value of each step; None: none is known."""
        found: list[float | None] = [None] * points
        low = bisect_left(self._times, first_s)
        high = bisect_left(self._times, first_s + step_s * points)
        for time_s, value in zip(self._times[low:high], self._values[low:high], strict=True):
            place = (time_s - first_s) // step_s
            found[place] = max(value, found[place] or value)
        return found


class Lines(NamedTuple):
    """Series on one axis. x: Start times in seconds. series: Name to values; None: a gap."""

    x: list[int]
    series: dict[str, list[float | None]]


class History:
    """The values of all series, by kind and name. Thread-safe."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], tuple[_Line, ...]] = {}
        self._newest_s = 0.0
        self._lock = Lock()

    def add(self, time_s: float, samples: Mapping[tuple[str, str], float]) -> None:
        """Add a sample of each series.

        Args:
            time_s: Seconds since the epoch.
        """
        with self._lock:
            self._newest_s = time_s
            for key, value in samples.items():
                lines = self._series.pop(key, None) or tuple(_Line(level) for level in LEVELS)
                self._series[key] = lines  # the last ones have the newest values
                for line in lines:
                    line.add(time_s, value)
            while len(self._series) > SERIES_MAX:
                del self._series[next(iter(self._series))]

    def lines(self, kind: str, from_s: float, to_s: float) -> Lines:
        """Return the series of a kind that have a value in a time, by name.

        They have the finest steps that reach back to `from_s`, and at most `POINTS` points.
        """
        with self._lock:
            reach_s = self._newest_s - from_s
            fits = [i for i, level in enumerate(LEVELS) if level.step_s * level.kept >= reach_s]
            index = fits[0] if fits else len(LEVELS) - 1
            unit_s = LEVELS[index].step_s
            step_s = unit_s * max(1, ceil((to_s - from_s) / (POINTS * unit_s)))
            first_s = int(from_s // step_s) * step_s
            points = max(1, ceil((to_s - first_s) / step_s))
            found = {
                name: lines[index].values(first_s, step_s, points)
                for (of_kind, name), lines in self._series.items()
                if of_kind == kind
            }
        series = {n: found[n] for n in sorted(found) if any(v is not None for v in found[n])}
        return Lines([first_s + step_s * i for i in range(points)], series)
