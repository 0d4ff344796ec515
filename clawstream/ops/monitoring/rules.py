"""Judge consumers by samples of their positions. Pure.

The rules are those of LinkedIn's Burrow ("Consumer Lag Evaluation Rules"), with two differences.
Kafka shows positions but not when they were committed, so the time of a commit is when the position
was seen to move. And lag is counted in data records, because ticks and transaction markers keep the
offsets of an idle consumer above zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Literal

from schemas.settings import Settings

Status = Literal["ok", "behind", "absent", "stopped", "stalled"]
STATUSES: Sequence[Status] = ("ok", "behind", "absent", "stopped", "stalled")
"""From the best to the worst.

ok: It reads, or there is nothing to read. behind: It reads, but its lag grows with every sample.
absent: Records wait, and nobody has ever committed a position. stopped: It has read, but not for
its patience. stalled: It has not moved in the whole window.
"""
PROBLEMS: frozenset[Status] = frozenset({"stopped", "stalled"})

PATIENCE_S = 15.0
"""How long a healthy consumer may make no progress, beside the work of one commit."""
BATCH_S = 3600.0
"""Longest training of one batch, and upload of a checkpoint, that is not taken for a stall.

The trainer's position moves between batches.
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a consumer of a partition.

    Attributes:
        time_s: When it was taken, on any clock.
        committed: Next offset to read; None: never committed.
        records: Data records in between; may be an upper bound above zero.
    """

    time_s: float
    committed: int | None
    records: int


def status_of(window: Sequence[Sample], patience_s: float) -> Status:
    """Judge one consumer of one partition.

    Args:
        window: Samples, oldest first; one that is older than the patience is needed for a problem.
        patience_s: How long a healthy consumer may make no progress with work left.
    """
    if not window:
        return "ok"
    last = window[-1]
    recent = [s for s in window if s.time_s >= last.time_s - patience_s]
    if any(s.records == 0 for s in recent):
        return "ok"
    moves = [after for before, after in pairwise(window) if after.committed != before.committed]
    still_since = moves[-1].time_s if moves else window[0].time_s
    if last.time_s - still_since >= patience_s:
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


def _calls_in_turn(settings: Settings) -> int:
    """Return how many calls of functions a child process answers one by one for a batch, at most.

    The reward job's position moves between batches.
    """
    jobs, functions = settings.jobs, settings.functions
    runs = {*jobs.reward_functions, *jobs.quality_functions}
    trajectories = min(jobs.batch_records, functions.calls_at_once)
    return max(map(jobs.child_functions, runs), default=0) * ceil(
        trajectories / functions.processes
    )


def patience_s(settings: Settings, role: str) -> float:
    """Return how long the consumer of a role may make no progress with work left, in seconds.

    Args:
        role: The group's name without the prefix.
    """
    match role.partition(".")[0]:
        case "reward":
            return PATIENCE_S + settings.functions.timeout_s * max(1, _calls_in_turn(settings))
        case "compare":  # its position stays before the first group that waits for members
            return PATIENCE_S + settings.admit.policy.group_deadline_s
        case "lake":
            return PATIENCE_S + settings.lake.flush_interval_s
        case "trainer":
            return BATCH_S
    return PATIENCE_S
