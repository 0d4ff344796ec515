"""Fold the journal into the state of decisions that admission resumes from. Pure.

After a crash, admission folds the candidates again from `ResumePoint.resume_from`. Decided
candidates fold to nothing. At the last journaled step the remaining state equals the state before
the crash: partial groups, partial batches, timers. Event time additionally needs ticks before
`resume_from`, which the reader fetches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.schemas.records import (
    AdmissionPolicy,
    Late,
    PolicyApplied,
    ReadyBatch,
    Refused,
)
from clawstream.stream_jobs.admit.decisions.budget import BudgetFold
from clawstream.stream_jobs.admit.decisions.compact_map import CompactMap
from clawstream.stream_jobs.admit.decisions.journal import JournalRecord
from clawstream.stream_jobs.admit.decisions.rounds import ClosedRounds
from clawstream.stream_jobs.admit.group import GroupKey
from clawstream.stream_jobs.admit.policy import is_of_settings

_REFUSED = -1
"""Stored in place of a batch number for a refused trajectory."""


class Decided(NamedTuple):
    """A decision: admitted in batch_seq, or refused (None). at: log time, ms."""

    revision: int
    batch_seq: int | None
    at: int


@dataclass(slots=True)
class DecisionState:
    """The decisions of a journal, from its first record on.

    Memory for the life of a run: 34 bytes for each decided trajectory and each group id, plus the
    buckets of `CompactMap`; entries of `ClosedRounds.others` take more.

    refused_members: Members refused one by one, of rounds that are still open.
    turned_away: Trajectories refused because their round was full or closed to new members.
    decided_count: Trajectories named by the records.
    budget: Of the acknowledged records; needs their offsets, so `apply` does not change it.
    The other fields describe the candidates topic of the last records: its id, the applied
    policies, `input_from` (None before the first decision), the last step (`stepped_to`), and
    `input_to`, the offset up to which it was read.
    """

    decisions: CompactMap = field(default_factory=CompactMap)
    rounds: ClosedRounds = field(default_factory=ClosedRounds)
    refused_members: Counter[GroupKey] = field(default_factory=Counter)
    turned_away: Counter[GroupKey] = field(default_factory=Counter)
    next_seq: int = 0
    decided_count: int = 0
    newest: PolicyApplied | None = None
    of_settings: PolicyApplied | None = None
    topic_id: str | None = None
    applied: list[PolicyApplied] = field(default_factory=list)
    input_from: int | None = None
    stepped_to: int = 0
    input_to: int = 0
    budget: BudgetFold | None = None

    def decided(self, trajectory_id: str) -> Decided | None:
        """Return the decision on a trajectory, or None."""
        found = self.decisions.get(trajectory_id)
        if found is None:
            return None
        at, revision, seq = found
        return Decided(revision, None if seq == _REFUSED else seq, at)

    def apply(self, record: JournalRecord) -> None:
        """Apply the next record of the journal."""
        if not isinstance(record, Late) and record.input_topic_id != self.topic_id:
            # The candidates topic was recreated.
            self.topic_id, self.applied = record.input_topic_id, []
            self.input_from, self.stepped_to, self.input_to = None, 0, 0
        match record:
            case ReadyBatch():
                self._admitted(record)
            case Refused():
                self._refused(record)
            case Late():
                old = self.decided(record.trajectory_id)
                self._decide(
                    record.trajectory_id,
                    record.revision,
                    record.missed_batch_seq,
                    old.at if old else 0,
                )
            case PolicyApplied():
                self._apply_policy(record)
        if not isinstance(record, PolicyApplied):
            self.stepped_to = max(self.stepped_to, record.input_to - 1)
            self.input_to = max(self.input_to, record.input_to)
        if isinstance(record, ReadyBatch | Refused):
            self.input_from = record.input_from

    def _apply_policy(self, record: PolicyApplied) -> None:
        self.applied.append(record)
        self.newest = record
        self.of_settings = record if is_of_settings(record.policy) else self.of_settings
        self.stepped_to = max(self.stepped_to, record.from_offset)
        self.input_to = max(self.input_to, record.from_offset)

    def _decide(self, trajectory_id: str, revision: int, batch_seq: int | None, at: int) -> None:
        self.decisions.put(
            trajectory_id, (at, revision, _REFUSED if batch_seq is None else batch_seq)
        )
        self.decided_count += 1

    def _admitted(self, batch: ReadyBatch) -> None:
        at = batch.created_at_event_time
        self.next_seq = batch.batch_seq + 1
        for group in batch.groups:
            for member in group.members:
                self._decide(member.trajectory_id, member.revision, batch.batch_seq, at)
            self._close((group.group_id, group.round), group.n, len(group.members), at)

    def _refused(self, refused: Refused) -> None:
        at = refused.event_time or 0
        for tid, revision in zip(refused.trajectory_ids, refused.revisions, strict=True):
            self._decide(tid, revision, None, at)
        if refused.round is None:
            return
        key = (refused.group_id, refused.round)
        if refused.whole_group:
            self._close(key, refused.n, len(refused.trajectory_ids), at)
        elif refused.reason != "round_closed":
            self.refused_members[key] += len(refused.trajectory_ids)
        elif (rounds := self.rounds.of(refused.group_id)).closed(refused.round):
            rounds.turned_away(refused.round)
            self.rounds.put(refused.group_id, rounds)
        else:
            self.turned_away[key] += 1

    def _close(self, key: GroupKey, n: int, members: int, at: int) -> None:
        left = n - members - self.refused_members.pop(key, 0) - self.turned_away.pop(key, 0)
        rounds = self.rounds.of(key[0])
        rounds.close(key[1], at, left)
        self.rounds.put(key[0], rounds)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The state in which admission starts. Offsets refer to the candidates topic that exists now.

    state: Receives all further decisions. policy: In force at `resume_from`. newest: The last
    applied policy. of_settings: The last applied policy that settings published. replay_until:
    Offset of the last journaled step; all decisions below it are in the journal. renewed: The
    candidates topic was recreated, so no earlier offset applies.
    """

    state: DecisionState = field(default_factory=DecisionState)
    policy: AdmissionPolicy | None = None
    newest: AdmissionPolicy | None = None
    of_settings: AdmissionPolicy | None = None
    next_seq: int = 0
    resume_from: int = 0
    replay_until: int = 0
    input_to: int = 0
    renewed: bool = False


def resume_from_journal(
    journal: Iterable[JournalRecord], topic_id: str, low: int, state: DecisionState | None = None
) -> ResumePoint:
    """Return the resume point of a journal.

    Args:
        journal: Records after those in `state`.
        topic_id: Id of the current candidates topic.
        low: First offset that the candidates topic still holds.
        state: State of the earlier records, from a checkpoint.
    """
    state = DecisionState() if state is None else state
    for record in journal:
        state.apply(record)
    newest = state.newest.policy if state.newest is not None else None
    of_settings = state.of_settings.policy if state.of_settings is not None else None
    if state.topic_id not in (None, topic_id):
        return ResumePoint(
            state, newest, newest, of_settings, state.next_seq, low, low, low, renewed=True
        )
    resume_from = low if state.input_from is None else state.input_from
    policy = next((a.policy for a in reversed(state.applied) if a.from_offset <= resume_from), None)
    return ResumePoint(
        state, policy, newest, of_settings, state.next_seq,
        resume_from, max(low, state.stepped_to), max(low, state.input_to),
    )  # fmt: skip
