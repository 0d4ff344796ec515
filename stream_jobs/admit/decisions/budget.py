"""Fold the journal of a run and channel into its rollout budget. Pure.

Rollouts learn from the budget how many replacements the run asks for, and how far its batches are.
It counts decided groups only: the client that begins groups must count those in progress.
"""

from __future__ import annotations

from collections import Counter, deque
from operator import attrgetter
from typing import Any

from clawstream.schemas.records import (
    BudgetRefusal,
    Channel,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RolloutBudget,
)
from clawstream.stream_jobs.admit.decisions.journal import JournalRecord

LISTED = 256
"""Refusals that are listed; older ones are only counted."""
DETAIL_CHARS = 300
RUN_ENDED = "run_ended"
"""Reason of a refusal that requests no replacement: it would not be trained."""

_FIELDS = ("offset", "group_id", "round", "n", "reason", "detail", "total")
_VALUES = attrgetter(*_FIELDS)


class BudgetFold:
    """The budget of one journal. Memory is bounded by LISTED refusals."""

    def __init__(self, run_id: str, channel: Channel, journal_id: str) -> None:
        """Begin a budget. journal_id: Topic id of the journal."""
        self._ids = (run_id, channel, journal_id)
        self.read_to = 0
        """Next offset of the journal."""
        self._policy: dict[str, int | None] = {}
        self._next_seq = self._admitted = self._refused = self._total = 0
        self._replacements = Counter[str]()
        # Values of BudgetRefusal: building that record for each refusal takes longer than all else.
        self._refusals = deque[tuple[Any, ...]]()
        self._dropped: int | None = None
        self._ended = False

    @classmethod
    def of(cls, budget: RolloutBudget) -> BudgetFold:
        """Return the fold that gives this budget."""
        fold = cls(budget.run_id, budget.channel, budget.journal_id)
        fold.read_to = budget.read_to
        if budget.policy_version is not None:
            names = ("policy_version", "max_staleness", "sync_every", "batch_groups")
            fold._policy = {name: getattr(budget, name) for name in names}
        fold._next_seq, fold._admitted = budget.next_batch_seq, budget.groups_admitted
        fold._refused, fold._total = budget.groups_refused, budget.replacements_total
        fold._replacements = Counter(budget.replacements)
        fold._refusals = deque(map(_VALUES, budget.refusals))
        fold._dropped, fold._ended = budget.dropped, budget.ended
        return fold

    def apply(self, offset: int, record: JournalRecord) -> None:
        """Apply the journal's next record, which is at `offset`."""
        self.read_to = offset + 1
        match record:
            case ReadyBatch():
                self._next_seq = record.batch_seq + 1
                self._admitted += len(record.groups)
            case Refused():
                self._refuse(offset, record)
            case PolicyApplied(policy=policy):
                train = self._ids[1] == "train"
                self._policy = {
                    "policy_version": policy.policy_version,
                    "max_staleness": policy.max_staleness,
                    "sync_every": policy.sync_every,
                    "batch_groups": policy.batch_groups if train else policy.val_groups,
                }

    def _refuse(self, offset: int, refused: Refused) -> None:
        n, reason, detail = refused.n, refused.reason, refused.detail
        self._refused += refused.whole_group
        self._ended = self._ended or reason == RUN_ENDED
        if n == 0 or reason == RUN_ENDED:
            return
        self._total += n
        self._replacements[reason] += n
        if len(self._refusals) == LISTED:
            self._dropped = self._refusals.popleft()[0]
        detail = None if detail is None else detail[:DETAIL_CHARS]
        self._refusals.append(
            (offset, refused.group_id, refused.round, n, reason, detail, self._total)
        )

    def budget(self) -> RolloutBudget:
        """Return the budget as an independent value."""
        run_id, channel, journal_id = self._ids
        return RolloutBudget(
            run_id=run_id,
            channel=channel,
            journal_id=journal_id,
            read_to=self.read_to,
            next_batch_seq=self._next_seq,
            groups_admitted=self._admitted,
            groups_refused=self._refused,
            replacements=dict(self._replacements),
            replacements_total=self._total,
            refusals=tuple(
                BudgetRefusal(**dict(zip(_FIELDS, r, strict=True))) for r in self._refusals
            ),
            dropped=self._dropped,
            ended=self._ended,
            **self._policy,
        )
