"""Compute the rollout budget of a run from its admission journal. A pure fold.

The budget tells rollout workers how many replacements the run needs, and how many groups may be
undecided. The journal of admission, `claw.ready-batches.<run>.<channel>`, lists the admitted and
refused groups and the policy that applied; `claw.weights` gives the progress of training. Neither
lists groups that have begun but are not yet decided: the client that begins groups must count them.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

from gateway.errors import BudgetUnknown
from schemas.records import (
    AdmissionPolicy,
    Channel,
    Late,
    PolicyApplied,
    ReadyBatch,
    Refused,
    WeightVersion,
)

Journaled = ReadyBatch | Refused | Late | PolicyApplied
KEPT = 256
"""Refusals that are listed; older ones are only counted."""
DETAIL_CHARS = 300
RUN_ENDED = "run_ended"
"""Reason of a refusal that requests no replacement, because nobody would train it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Describe a group that was refused whole, as in the reply.

    offset: on the journal. n: trajectories requested instead. total: `replacements_total` up to and
    including this refusal.
    """

    offset: int
    group_id: str
    round: int | None
    n: int
    reason: str
    detail: str | None
    total: int


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """Hold the budget up to `read_to`, the next offset of the journal.

    Totals count from the journal's start. replacements: requested trajectories, by reason.
    refusals: the newest that request replacements, oldest first. dropped: offset of the newest
    refusal that is no longer listed. newest_sync_index: of the newest version of the surviving
    chain, which is the last version on the log.
    """

    read_to: int
    policy: AdmissionPolicy | None
    next_batch_seq: int
    groups_admitted: int
    groups_refused: int
    replacements: dict[str, int]
    replacements_total: int
    refusals: tuple[Refusal, ...]
    dropped: int | None
    newest_sync_index: int | None
    ended: bool

    def after(self, offset: int | None) -> tuple[tuple[Refusal, ...], bool]:
        """Return the listed refusals after an offset, and whether some after it were dropped.

        Args:
            offset: Offset on the journal; None: from the start.
        """
        if offset is None:
            return self.refusals, self.dropped is not None
        gap = self.dropped is not None and self.dropped > offset
        return tuple(r for r in self.refusals if r.offset > offset), gap

    def free_capacity(self, channel: Channel, loaded: int | None = None) -> int | None:
        """Return how many groups may be undecided at once without a new one being refused as stale.

        The number includes the groups already in progress. Of a group whose oldest token is of
        version v, admission requires

            floor(batch_seq / sync_every) - v <= max_staleness

        So the group must enter a batch below (v + max_staleness + 1) * sync_every, and each batch
        below that takes batch_groups groups. The result is an upper bound where batches close by
        tokens.

        Args:
            channel: Channel of the groups.
            loaded: Lowest sync index that an engine samples with, if lower than the newest.

        Returns:
            The number of groups. None: unbounded, because no age is too high. 0 before the first
            policy or version, and after the end of the run.
        """
        if self.ended or self.policy is None:
            return 0
        policy = self.policy
        if channel == "val" or policy.max_staleness is None:
            return None
        if self.newest_sync_index is None:
            return 0
        version = self.newest_sync_index if loaded is None else min(loaded, self.newest_sync_index)
        end = (version + policy.max_staleness + 1) * policy.sync_every
        return max(0, end - self.next_batch_seq) * policy.batch_groups


@dataclass(slots=True)
class RolloutBudget:
    """Fold the journal of one run and channel.

    Memory is bounded by KEPT refusals, whatever the journal's length.
    """

    run_id: str
    _read_to: int = 0
    _policy: AdmissionPolicy | None = None
    _next_seq: int = 0
    _admitted: int = 0
    _refused: int = 0
    _asked: Counter[str] = field(default_factory=Counter)
    _total: int = 0
    _refusals: deque[Refusal] = field(default_factory=deque)
    _dropped: int | None = None
    _newest: int | None = None
    _ended: bool = False

    def apply(self, offset: int, record: Journaled) -> None:
        """Apply the journal's next record."""
        self._read_to = offset + 1
        match record:
            case ReadyBatch():
                self._next_seq = record.batch_seq + 1
                self._admitted += len(record.groups)
            case PolicyApplied():
                self._policy = record.policy
            case Refused():
                self._refuse(offset, record)
            case Late():
                pass  # a late reward does not change the budget

    def apply_version(self, version: WeightVersion) -> None:
        """Apply the next record of the weights log; versions of other runs are ignored.

        After a rollback of the trainer, its newest record gives the current version.
        """
        if version.run_id == self.run_id:
            self._newest = version.sync_index

    def _refuse(self, offset: int, refused: Refused) -> None:
        self._ended = self._ended or refused.reason == RUN_ENDED
        self._refused += refused.whole_group
        if refused.n == 0 or refused.reason == RUN_ENDED:
            return
        self._total += refused.n
        self._asked[refused.reason] += refused.n
        detail = None if refused.detail is None else refused.detail[:DETAIL_CHARS]
        self._refusals.append(
            Refusal(
                offset,
                refused.group_id,
                refused.round,
                refused.n,
                refused.reason,
                detail,
                self._total,
            )
        )
        if len(self._refusals) > KEPT:
            self._dropped = self._refusals.popleft().offset

    def snapshot(self) -> BudgetSnapshot:
        """Return the current budget as an independent value."""
        return BudgetSnapshot(
            self._read_to, self._policy, self._next_seq, self._admitted, self._refused,
            dict(self._asked), self._total,
            tuple(self._refusals), self._dropped, self._newest, self._ended,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """Hold the state of a journal as last read.

    journal_id: id of the topic; an offset is valid only for this id. age_s: seconds since the
    journal was last read to its end.
    """

    journal_id: str
    snapshot: BudgetSnapshot
    age_s: float


class BudgetSource(Protocol):
    """Read the budget of a run and channel."""

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        """Return the state of a journal; None when the journal does not exist.

        Raises:
            BudgetUnknown: The journal cannot be read now.
            Overloaded: Too many journals are followed.
        """
        ...


class InMemoryBudgets:
    """Hold journals in memory, for tests and demos. reachable=False: every read fails."""

    def __init__(self) -> None:
        self.journals: dict[tuple[str, Channel], RolloutBudget] = {}
        self.reachable = True
        self._ends: Counter[tuple[str, Channel]] = Counter()

    def put(self, run_id: str, channel: Channel, *records: Journaled | WeightVersion) -> None:
        """Apply records of the journal, at offsets 0, 1, ..., and of the weights log.

        Without records, create an empty journal.
        """
        at = (run_id, channel)
        budget = self.journals.setdefault(at, RolloutBudget(run_id))
        for record in records:
            if isinstance(record, WeightVersion):
                budget.apply_version(record)
            else:
                budget.apply(self._ends[at], record)
                self._ends[at] += 1

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        if not self.reachable:
            raise BudgetUnknown("the memory journals were told not to answer")
        budget = self.journals.get((run_id, channel))
        return None if budget is None else BudgetReading("memory", budget.snapshot(), 0.0)
