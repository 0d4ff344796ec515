"""What a run asks of those who make its rollouts: replacements, and how many groups may be under way. A pure fold over its journal.

The journal of admission, `claw.ready-batches.<run>.<channel>`, says what was admitted and refused and by which policy; `claw.weights` how far
training is. What is under way, begun and not yet decided, is on neither: whoever begins groups must count them.
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
"""Reason of a refusal that asks for nothing: nobody will train the replacement."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A group that was refused whole, as the reply shows it. offset: on the journal. n: trajectories asked for instead. total:
    `replacements_total` up to and with it.
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
    """What a journal and the weights log say up to `read_to`, the next offset of the journal. Totals count from the journal's start.

    replacements: trajectories asked for, by reason. refusals: the newest that ask for some, oldest first. dropped: offset of the newest one that
    is listed no more. newest_sync_index: of the newest version of the surviving chain, which is the last one on the log.
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
        """The refusals behind an offset, and whether some behind it are listed no more. None: from the start."""
        if offset is None:
            return self.refusals, self.dropped is not None
        gap = self.dropped is not None and self.dropped > offset
        return tuple(r for r in self.refusals if r.offset > offset), gap

    def free_capacity(self, channel: Channel, loaded: int | None = None) -> int | None:
        """Groups that may be undecided at once, all of those that are under way included, so that none begun now is refused as stale.

        Admission demands floor(batch_seq / sync_every) - v <= max_staleness of a group whose oldest token is of version v. So it must come into a
        batch below (v + max_staleness + 1) * sync_every, and each batch up to there takes batch_groups groups. loaded: the lowest sync index
        that an engine samples with, if lower than the newest. None: nothing bounds it, for no age is too high. An upper bound where
        batches close by tokens. 0 before the first policy or version, and after the end of the run.
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
    """The fold of one run and channel. Memory: KEPT refusals, whatever the journal's length."""

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
        """The journal's next record."""
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
                pass  # a late reward changes nothing of what is wanted

    def apply_version(self, version: WeightVersion) -> None:
        """The weights log's next record; those of other runs are passed over. A trainer that went back is where it now is."""
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
        """What it says now, as a value of its own."""
        return BudgetSnapshot(
            self._read_to, self._policy, self._next_seq, self._admitted, self._refused, dict(self._asked), self._total,
            tuple(self._refusals), self._dropped, self._newest, self._ended,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BudgetReading:
    """What is known of a journal. journal_id: of its topic; offsets of another one mean nothing. age_s: since it was known to be all."""

    journal_id: str
    snapshot: BudgetSnapshot
    age_s: float


class BudgetSource(Protocol):
    """Knows journals."""

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        """What the journal of a run and channel says; None when there is none. Raises BudgetUnknown, or Overloaded."""
        ...


class InMemoryBudgets:
    """Journals in memory, for tests and try-outs. reachable=False: no answer."""

    def __init__(self) -> None:
        self.journals: dict[tuple[str, Channel], RolloutBudget] = {}
        self.reachable = True
        self._ends: Counter[tuple[str, Channel]] = Counter()

    def put(self, run_id: str, channel: Channel, *records: Journaled | WeightVersion) -> None:
        """Fold records of the journal, at offsets 0, 1, ..., and of the weights log. Without any: a journal that is empty."""
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
