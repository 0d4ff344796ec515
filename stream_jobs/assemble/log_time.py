"""Log time without its silences: the clock by which trajectories time out. Pure; all times are log timestamps in ms.

While Kafka is away nobody can record anything, and what gateways keep in their spools meanwhile comes behind the records that tell how late it
is by then. So a time in which a partition took no record, not even one of the ticks that come every second, counts as no time: what
waits, waits as long as before. The same holds for a broker's clock that jumps ahead.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Silences:
    """The silences of one partition, in order. starts, ends: of each; totals: ms of silence up to the end of each, those forgotten included."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)

    def elapsed(self, since: int, until: int) -> int:
        """Time from one moment to another without what was silent in between."""
        return until - since if not self.starts else self._lively(until) - self._lively(since)

    def _lively(self, at: int) -> int:
        """Time without all silence before a moment."""
        last = bisect_left(self.starts, at) - 1
        if last < 0:
            return at - (self.totals[0] - (self.ends[0] - self.starts[0]))
        return at - self.totals[last] + max(0, self.ends[last] - at)

    def expired(self, now: int, longest: int) -> int:
        """How many of them lie so far back that nothing can wait since before them. longest: time after which nothing waits."""
        count = 0
        while count < len(self.ends) and self.elapsed(self.ends[count], now) > longest:
            count += 1
        return count

    def add(self, start: int, end: int, forget: int) -> None:
        """Note a silence behind all others. forget: how many of the oldest are of no use any more."""
        total = (self.totals[-1] if self.totals else 0) + end - start
        self.starts.append(start)
        self.ends.append(end)
        self.totals.append(total)
        del self.starts[:forget], self.ends[:forget], self.totals[:forget]

    def dump(self) -> list[list[int]]:
        """For a snapshot."""
        return [self.starts, self.ends, self.totals]

    @classmethod
    def load(cls, plain: list[list[int]]) -> Silences:
        """What `dump` gave."""
        return cls(*plain)
