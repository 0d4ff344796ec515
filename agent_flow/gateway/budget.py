"""How many groups a process may start, from the gateway's rollout budget. Pure.

Rollouts must not run ahead further than training may use: a group that starts too early is refused
as stale. The budget counts decided groups; groups in progress are counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class GroupBudget:
    """Counts the groups of one process among several that share a run.

    Each process counts the decided groups as if all processes had the same share of them, so the
    processes together keep within the capacity, give or take a group each. Admission's check of
    staleness stays exact.
    """

    def __init__(self, processes: int = 1) -> None:
        self._processes = processes
        self._journal: str | None = None
        self._decided_before = 0
        self._started = 0
        self._capacity: int | None = 0
        self._decided = 0
        self.ended = False

    def update(self, budget: Mapping[str, Any]) -> None:
        """Take the gateway's newest answer (`GET /runs/RUN/demand`)."""
        decided = budget["groups_admitted"] + budget["groups_refused"]
        if budget["journal_id"] != self._journal:
            # Totals of another journal do not include groups of this one.
            self._journal, self._decided_before, self._started = budget["journal_id"], decided, 0
        self._decided = decided - self._decided_before
        self._capacity = budget["free_staleness_capacity"]
        self.ended = budget["ended"]

    def started(self) -> None:
        """Count a group that starts now."""
        self._started += 1

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
