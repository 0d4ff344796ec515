"""Detect a run that learns nothing because all rewards within each group are equal. Pure.

Such groups are refused as `zero_variance`, which is normal now and then. If nothing else happens,
the reward function or the task is wrong (always 0.0, always 1.0), or no reward arrives at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records import ReadyBatch, Refused
from clawstream.stream_jobs.admit.decisions.journal import Decision

REASON = "zero_variance"
FIRST = 8
"""Groups in a row before the first warning; each later warning needs twice as many."""


@dataclass(frozen=True, slots=True)
class EqualRewardsWarning:
    """in_a_row: groups refused since the last one that was admitted.

    detail: of the last one, with the value.
    """

    in_a_row: int
    refused_groups: int
    admitted_groups: int
    detail: str | None


class EqualRewards:
    """Count the decided groups of one channel since the process started."""

    def __init__(self) -> None:
        self.refused_groups = self.admitted_groups = 0
        self._in_a_row, self._said_at = 0, FIRST

    def observe(self, decision: Decision) -> EqualRewardsWarning | None:
        """Count a decision; return a warning at 8, 16, 32, ... refused groups in a row."""
        if isinstance(decision, ReadyBatch):
            self.admitted_groups += len(decision.groups)
            self._in_a_row, self._said_at = 0, FIRST
        if (
            not isinstance(decision, Refused)
            or not decision.whole_group
            or decision.reason != REASON
        ):
            return None
        self.refused_groups += 1
        self._in_a_row += 1
        if self._in_a_row < self._said_at:
            return None
        self._said_at *= 2
        return EqualRewardsWarning(
            self._in_a_row, self.refused_groups, self.admitted_groups, decision.detail
        )
