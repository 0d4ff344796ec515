"""How many groups a process may start, from the gateway's rollout budget. Pure.

Rollouts must not run ahead further than training may use: a group that starts too early is refused
as stale. The budget counts decided groups; groups in progress are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LEAST_IDLE_S = 60.0
"""Weight updates and restarts take this long without any death."""


class GroupBudget:
    """Counts the groups of one process among several that share a run.

    Each process counts the decided groups as if all processes had the same share of them, so the
    processes together keep within the capacity, give or take a group each. Another process that has
    died or has played all its tasks starts none of its share. It is noticed when this one may not
    start a group for the idle time, has none in progress and sees none decided, although training
    has capacity: then one process less is counted. A process that lives decides a group within the
    time that one rollout may take with all its attempts. If it takes longer, for example because
    its rollouts wait for a place, groups are started too early, and the count of processes stays
    too low. Admission's check of staleness stays exact.
    """

    def __init__(self, processes: int = 1, rollout_s: float = 0.0) -> None:
        """Start without capacity.

        Args:
            processes: that share the run.
            rollout_s: time that a rollout may take, with all its attempts, seconds.
        """
        self._processes = processes
        self._idle_s = max(LEAST_IDLE_S, rollout_s)
        self._journal: str | None = None
        self._decided_before = 0
        self._started = 0
        self._playing = 0
        self._capacity: int | None = 0
        self._decided = 0
        self._idle_since: float | None = None
        self.ended = False

    def update(self, budget: Mapping[str, Any], now: float) -> None:
        """Take the gateway's newest answer (`GET /runs/RUN/demand`).

        Args:
            budget: The answer.
            now: Monotonic time, seconds.
        """
        decided = budget["groups_admitted"] + budget["groups_refused"]
        if budget["journal_id"] != self._journal:
            # Totals of another journal do not include groups of this one.
            self._journal = budget["journal_id"]
            self._count_from(decided)
        news = decided != self._decided + self._decided_before
        self._decided = decided - self._decided_before
        self._capacity = budget["free_staleness_capacity"]
        self.ended = budget["ended"]
        if news or self._playing or self.free or not self._capacity:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= self._idle_s and self._processes > 1:
            self._processes -= 1
            self._idle_since = None
            self._count_from(decided)

    def _count_from(self, decided: int) -> None:
        self._decided_before, self._decided, self._started = decided, 0, 0

    def group_started(self) -> None:
        """Count a group that starts now."""
        self._started += 1
        self._playing += 1

    def group_ended(self) -> None:
        """Count a group whose rollouts have ended."""
        self._playing -= 1

    @property
    def free(self) -> bool:
        """Whether another group may start."""
        if self.ended:
            return False
        if self._capacity is None:
            return True
        in_progress = max(0, self._started * self._processes - self._decided)
        return in_progress + self._processes <= max(self._capacity, 0) or (
            self._capacity > 0 and in_progress == 0
        )
