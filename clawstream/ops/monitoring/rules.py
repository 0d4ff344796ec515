"""Judge consumers by samples of their positions. Pure.

The rules are those of LinkedIn's Burrow ("Consumer Lag Evaluation Rules"), with three differences.
Kafka shows positions but not when they were committed, so the time of a commit is when it was seen
to change. A consumer that works for long between two positions commits the same one again, with
other metadata. And lag is counted in data records, because ticks and transaction markers keep the
offsets of an idle consumer above zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Status = Literal["ok", "behind", "absent", "stopped", "stalled"]
STATUSES: Sequence[Status] = ("ok", "behind", "absent", "stopped", "stalled")
"""From the best to the worst.

ok: It reads, or there is nothing to read. behind: It reads, but its lag grows with every sample.
absent: Records wait, and nobody has ever committed a position. stopped: It has read, but not for
`PATIENCE_S`. stalled: It has not moved in the whole window.
"""
PROBLEMS: frozenset[Status] = frozenset({"stopped", "stalled"})

PATIENCE_S = 15.0
"""How long a healthy consumer may commit neither a position nor a heartbeat with work left.

Heartbeats come every 5 s. A stall is seen this long, and two samples, after it began.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a consumer of a partition.

    Attributes:
        time_s: When it was taken, on any clock.
        committed: Next offset to read; None: never committed.
        records: Data records in between; may be an upper bound above zero.
        metadata: Of the commit; a change is progress, too.
    """

    time_s: float
    committed: int | None
    records: int
    metadata: str = ""

    @property
    def commit(self) -> tuple[int | None, str]:
        """What changes when the consumer makes progress."""
        return self.committed, self.metadata


def status_of(window: Sequence[Sample]) -> Status:
    """Judge one consumer of one partition.

    Args:
        window: Samples, oldest first; a problem needs one that is older than `PATIENCE_S`.
    """
    if not window:
        return "ok"
    last = window[-1]
    recent = [s for s in window if s.time_s >= last.time_s - PATIENCE_S]
    if any(s.records == 0 for s in recent):
        return "ok"
    moves = [after for before, after in pairwise(window) if after.commit != before.commit]
    still_since = moves[-1].time_s if moves else window[0].time_s
    if last.time_s - still_since >= PATIENCE_S:
        if last.committed is None:
            return "absent"
        return "stopped" if moves else "stalled"
    if len(recent) < len(window) and _grows([s.records for s in recent]):
        return "behind"
    return "ok"


def _grows(lags: Sequence[int]) -> bool:
    return lags[-1] > lags[0] and all(after >= before for before, after in pairwise(lags))


def worst(statuses: Sequence[Status]) -> Status:
    """Return the worst of some statuses, "ok" for none."""
    return max(statuses, key=STATUSES.index, default="ok")
