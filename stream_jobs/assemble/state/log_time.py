"""Log time without silences: the clock for time-outs of trajectories. Pure; all times are log
timestamps in ms.

While Kafka is unavailable nothing is recorded, and records from the gateways' spools arrive
after the ticks that carry the new time. Therefore an interval in which a partition received no
record, not even a tick, does not count towards any time-out. The same rule covers a broker clock
that jumps ahead.
"""

from __future__ import annotations

from bisect import bisect_left

from msgspec import Struct, field


class Silences(Struct, array_like=True):
    """The silences of one partition in order. totals: ms of silence up to the end of each,
    forgotten ones included.
    """

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def elapsed(self, since: int, until: int) -> int:
        """Return the time between two moments without the silences between them, ms."""
        return until - since if not self.starts else self._lively(until) - self._lively(since)

    def _lively(self, at: int) -> int:
        """Return a moment minus all silence before it, ms."""
        last = bisect_left(self.starts, at) - 1
        if last < 0:
            return at - (self.totals[0] - (self.ends[0] - self.starts[0]))
        return at - self.totals[last] + max(0, self.ends[last] - at)

    def expired(self, now: int, longest: int) -> int:
        """Return how many of the oldest silences are too old to affect a time-out. longest: the
        longest time-out, ms.
        """
        count = 0
        while count < len(self.ends) and self.elapsed(self.ends[count], now) > longest:
            count += 1
        return count

    def add(self, start: int, end: int, forget: int) -> None:
        """Append a silence, and drop the `forget` oldest ones."""
        total = (self.totals[-1] if self.totals else 0) + end - start
        self.starts.append(start)
        self.ends.append(end)
        self.totals.append(total)
        del self.starts[:forget], self.ends[:forget], self.totals[:forget]
