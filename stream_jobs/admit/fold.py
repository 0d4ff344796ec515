"""Form batches from the candidates of one run and channel: a pure fold over the candidate log.

`AdmissionFold.fold` takes the records of one partition of the candidates topic in offset order and
returns the records for the journal. Its only clock is the ticks on that log, so the same log always
gives the same batches. Decisions are stored in the journal
(`clawstream.stream_jobs.admit.decisions.state`); the remaining state follows from the undecided
candidates. This is the only place that checks staleness.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    Channel,
    Late,
    PolicyApplied,
    ReadyBatch,
    Refused,
    RunEnded,
    Tick,
)
from clawstream.stream_jobs.admit.batches import OpenBatches
from clawstream.stream_jobs.admit.decisions.journal import (
    CandidateLog,
    Decision,
    InputRecord,
    Invalid,
    JournalRecord,
    content_hash,
)
from clawstream.stream_jobs.admit.decisions.state import Decided, ResumePoint
from clawstream.stream_jobs.admit.eligibility import staleness_refusal
from clawstream.stream_jobs.admit.group import (
    Group,
    Member,
    evaluate_group,
    split_by_record_size,
    to_batch_group,
)
from clawstream.stream_jobs.admit.open_groups import OpenGroups
from clawstream.stream_jobs.admit.policy import policy_rejection
from clawstream.stream_jobs.admit.timers import Timer, TimerQueue
from clawstream.stream_jobs.worker.event_time import EventTime


class AdmissionFold:
    """Hold the state of one run and channel. Performs no I/O and reads no clock.

    A candidate costs O(1) amortised, however many groups are open. A policy change visits every
    open group once.
    """

    def __init__(
        self,
        run_id: str,
        channel: Channel,
        source: CandidateLog,
        resume_point: ResumePoint | None = None,
    ) -> None:
        resume_point = ResumePoint() if resume_point is None else resume_point
        self.run_id, self.channel, self.source = run_id, channel, source
        self.policy = resume_point.policy
        self.now: int | None = None
        """Event time, milliseconds; None until every source partition has ticked."""
        self._resume_point, self.state = resume_point, resume_point.state
        self._input_to, self._step = resume_point.input_to, resume_point.resume_from - 1
        self._event_time = EventTime(source.tickers)
        self._groups = OpenGroups(self.state)
        # By first offset: a restart resumes at the first.
        self._pending: OrderedDict[str, Group] = OrderedDict()
        self._batches = OpenBatches(channel)
        self._timers = TimerQueue()
        # Newest revisions from before the run's first policy.
        self._before_policy = OrderedDict[str, tuple[Candidate, InputRecord]]()
        self._ended: int | None = None
        self._out: list[Decision] = []

    def initial_records(self) -> list[JournalRecord]:
        """Return the records to journal before the first fold: on a recreated topic, the current
        policy.
        """
        if not self._resume_point.renewed or self.policy is None:
            return []
        applied = self._policy_applied(self.policy, self._resume_point.resume_from)
        self.state.apply(applied)
        return [applied]

    def fold(self, entry: InputRecord) -> list[Decision]:
        """Apply the next record and return the decisions that it causes, in order.

        Ignores records of other runs and channels. Of records before `resume_from`, only ticks
        count.
        """
        if entry.offset < self._resume_point.resume_from and not isinstance(entry.event, Tick):
            return []
        self._step = entry.offset
        self._input_to = max(self._input_to, entry.offset + 1)
        match entry.event:
            case Tick():
                self._tick(entry.event)
            case Candidate(run_id=self.run_id, channel=self.channel):
                self._candidate(entry.event, entry)
            case AdmissionPolicy(run_id=self.run_id):
                self._set_policy(entry.event)
            case RunEnded(run_id=self.run_id):
                self._end()
        out, self._out = self._out, []
        return out

    @property
    def replaying(self) -> bool:
        """Return True while the journal already holds every decision of this step."""
        return self._step < self._resume_point.replay_until

    @property
    def input_from(self) -> int:
        """Return the lowest undecided offset, where a restart resumes.

        The end of a run stays undecided for ever.
        """
        first = self._step + 1 if self._ended is None else self._ended
        if self._pending:
            tid, group = next(iter(self._pending.items()))
            first = min(first, group.members[tid].first_offset)
        if self._before_policy:
            first = min(first, next(iter(self._before_policy.values()))[1].offset)
        return first

    # -- one record

    def _tick(self, tick: Tick) -> None:
        try:
            now = self._event_time.after(tick)
        except ValueError as e:
            self._out.append(Invalid(self._step, str(e)))
            return
        if now is None or now == self.now:
            return
        while (due := self._timers.next(now)) is not None:
            # Time passes deadline by deadline, however far apart the ticks are: no group is
            # evaluated before its own deadline.
            self.now = due.at if self.now is None else max(self.now, due.at)
            if due.batch:
                if self._batches.overdue(due.owner[1], self._in_force, self.now):
                    self._close(due.owner[1], all_of_it=True)
            elif (group := self._groups.get(due.owner)) is not None:
                self._evaluate(group)
        self.now = now

    def _candidate(self, c: Candidate, entry: InputRecord) -> None:
        if self.policy is None and self._ended is None:
            early = self._before_policy.get(c.trajectory_id)
            if early is None or c.revision > early[0].revision:
                self._before_policy[c.trajectory_id] = (
                    c,
                    entry if early is None else dataclasses.replace(entry, offset=early[1].offset),
                )
            return
        group = self._pending.get(c.trajectory_id)
        if group is not None:
            old = group.members[c.trajectory_id]
            if c.revision > old.candidate.revision:
                self._join(group, Member(c, entry.place, old.first_offset))
            return
        decided = self.state.decided(c.trajectory_id)
        if decided is not None:
            self._already_decided(c, decided)
        elif c.outcome == "replaced":
            self._refuse_one(c, None, "replaced", "another trajectory takes its place")
        elif self._ended is not None:
            self._refuse_one(c, None, "run_ended", "came after the end of the run")
        else:
            group = self._group_for(c)
            if group is not None:
                self._pending[c.trajectory_id] = group
                self._join(group, Member(c, entry.place, entry.offset))

    def _already_decided(self, c: Candidate, decided: Decided) -> None:
        """Handle a decided trajectory that arrives again: duplicate, late, or reopened."""
        if self.replaying:
            return
        if c.opened_at > decided.at:
            self._refuse_one(
                c, None, "duplicate", f"opened at {c.opened_at}, decided at {decided.at}"
            )
        elif c.revision > decided.revision:
            late = Late(
                run_id=self.run_id,
                channel=self.channel,
                trajectory_id=c.trajectory_id,
                revision=c.revision,
                missed_batch_seq=decided.batch_seq,
                input_to=self._input_to,
            )
            self._journal(late)

    def _set_policy(self, policy: AdmissionPolicy) -> None:
        rejection = policy_rejection(policy, self.policy)
        if rejection is not None:
            self._out.append(Invalid(self._step, rejection))
            return
        if self.policy is not None and policy.policy_version == self.policy.policy_version:
            return  # sent again
        first, self.policy = self.policy is None, policy
        if (
            self._resume_point.newest is None
            or policy.policy_version > self._resume_point.newest.policy_version
        ):
            self._journal(self._policy_applied(policy, self._step))
        if first:
            return self._fold_before_policy()
        for group in self._groups:
            group.apply_policy(policy)
        self._reschedule_all()
        self._evaluate_all()

    def _end(self) -> None:
        """Admit all ready groups in a last, smaller batch; refuse the others."""
        if self._ended is not None:
            return
        self._ended = self._step
        self._evaluate_all()
        self._fold_before_policy()

    def _fold_before_policy(self) -> None:
        """Fold the candidates that arrived before the first policy, in order of first arrival.

        Candidates not yet folded remain undecided, so `input_from` must include them.
        """
        while self._before_policy:
            self._candidate(*self._before_policy.popitem(last=False)[1])

    def _evaluate_all(self) -> None:
        """Evaluate all groups before closing a batch: a group may have to leave its batch."""
        for group in list(self._groups):
            self._evaluate(group, close=False)
        for key in self._batches.open():
            self._close(key, all_of_it=self._ended is not None)

    # -- groups

    def _group_for(self, c: Candidate) -> Group | None:
        """Return the group of the trajectory, or None after refusing it because its round is
        closed.
        """
        opened_at = None if self.replaying else c.opened_at
        number, takes = self._groups.rounds.assign(c.group_id, c.round, opened_at)
        if not takes:
            self._refuse_one(c, number, "round_closed", f"round {number} takes no more members")
            return None
        group = self._groups.get((c.group_id, number))
        if group is None:
            n = c.group_size if c.group_size is not None else self._in_force.group_size
            group = self._groups.begin((c.group_id, number), max(1, n))
        return group

    def _join(self, group: Group, member: Member) -> None:
        """Add a member, or a new revision of a member, to its group."""
        policy = self._in_force
        member.apply_policy(policy)
        before = group.first_closed_at if group.members else None
        group.put(member)
        if group.first_closed_at != before:
            self._schedule(Timer(group.deadline(policy), False, group.key))
        if group.awaiting_input:
            self._schedule(Timer(group.reward_deadline(policy), False, group.key))
        self._evaluate(group)

    def _evaluate(self, group: Group, close: bool = True) -> None:
        """Evaluate the group; keep it waiting, refuse it, or put it into an open batch."""
        verdict = evaluate_group(
            group, self._in_force, self.channel, self.now, self._ended is not None
        )
        if verdict is None:
            self._batches.remove(group)
            group.verdict = None
            return
        if group.closed_to_new_at is None and group.arrived < group.n and self.now is not None:
            self._groups.close_to_new(group, self.now)
        if verdict.refusal is not None:
            self._refuse(group, verdict.refusal, verdict.detail)
            return
        is_new = self._batches.put(
            group, verdict, self._log_time(m.candidate for m in verdict.usable)
        )
        # A replayed step passed this check earlier, against a lower batch number.
        stale = None if self.replaying else self._stale(group)
        if stale is not None:
            self._refuse(group, "stale", stale)
        elif group.batch is not None:
            if is_new and self.channel == "val":
                self._schedule(
                    Timer(
                        group.entered_at + self._in_force.val_deadline_ms, True, ("", group.batch)
                    )
                )
            if close:
                self._close(group.batch)

    def _stale(self, group: Group) -> str | None:
        """Return why the group is too stale for the next batch, or None."""
        if self.channel == "val" or group.verdict is None:
            return None
        oldest = group.verdict.oldest_sync_index
        return staleness_refusal(oldest, self.state.next_seq, self._in_force)

    # -- deadlines

    def _schedule(self, deadline: Timer) -> None:
        self._timers.add(deadline)
        if self._timers.mostly_stale(len(self._pending) + len(self._groups)):
            self._reschedule_all()

    def _reschedule_all(self) -> None:
        """Rebuild all timers after a policy change, or when most timers are stale."""
        policy, due = self._in_force, []
        for group in self._groups:
            due.append(Timer(group.deadline(policy), False, group.key))
            if group.awaiting_input:
                due.append(Timer(group.reward_deadline(policy), False, group.key))
        if self.channel == "val":
            for group in self._batches.waiting():
                due.append(
                    Timer(group.entered_at + policy.val_deadline_ms, True, ("", group.batch or 0))
                )
        self._timers.replace(due)

    # -- decisions

    def _close(self, key: int, all_of_it: bool = False) -> None:
        """Emit the open batch as long as it is full; with `all_of_it` also the rest.

        Checks staleness against the number that the batch receives.
        """
        while chosen := self._batches.full(key, self._in_force, all_of_it):
            stale = [(g, why) for g in chosen if (why := self._stale(g)) is not None]
            for group, why in stale:
                self._refuse(group, "stale", why)
            if not stale:
                self._admit(chosen)

    def _admit(self, groups: list[Group]) -> None:
        """Journal the refusals of dropped members, then the batch."""
        policy, seq, topic = self._in_force, self.state.next_seq, self.source
        built = []
        usable: list[Member] = []
        for group in groups:
            self._batches.remove(group)
            if group.verdict is None:
                raise RuntimeError(f"group {group.key}: in a batch without a verdict")
            for member, lack in group.verdict.dropped:
                self._refuse_one(member.candidate, group.key[1], lack.reason, lack.detail)
            usable += group.verdict.usable
            built.append(to_batch_group(group, group.verdict.usable))
        at = self._log_time(m.candidate for m in usable)
        for group in groups:
            self._forget(group)
        batch = ReadyBatch(
            run_id=self.run_id, channel=self.channel, batch_seq=seq, groups=tuple(built),
            policy_version=policy.policy_version, sync_every=policy.sync_every,
            algorithm=policy.algorithm, reward_weights=policy.reward_weights,
            input_topic_id=topic.topic_id, input_partition=topic.partition,
            input_from=self.input_from, input_to=self._input_to,
            content_hash="", created_at_event_time=at,
            trainable_tokens=sum(m.candidate.trainable_tokens for m in usable),
        )  # fmt: skip
        self._journal(dataclasses.replace(batch, content_hash=content_hash(batch)))

    def _refuse(self, group: Group, reason: str, detail: str | None) -> None:
        """Refuse a whole group; the last record asks for n new trajectories.

        Members that do not fit into one record are refused in earlier records of the same round.
        """
        self._batches.remove(group)
        members = [group.members[tid].candidate for tid in sorted(group.members)]
        self._forget(group)
        at = self._log_time(members)
        *first, last = split_by_record_size(members)
        for some in first:
            self._journal(self._refused(group.key, some, reason, detail, at, None))
        self._journal(self._refused(group.key, last, reason, detail, at, group.n))

    def _refuse_one(
        self, c: Candidate, number: int | None, reason: str, detail: str | None
    ) -> None:
        """Refuse one trajectory.

        Args:
            number: The round in which it counts as a member; None: no round.
        """
        self._pending.pop(c.trajectory_id, None)
        self._journal(
            self._refused((c.group_id, number), [c], reason, detail, self._log_time([c]), None)
        )

    def _forget(self, group: Group) -> None:
        self._groups.remove(group)
        for tid in group.members:
            self._pending.pop(tid, None)

    def _journal(self, decision: JournalRecord) -> None:
        self.state.apply(decision)
        self._out.append(decision)

    def _refused(
        self,
        key: tuple[str, int | None],
        members: list[Candidate],
        reason: str,
        detail: str | None,
        at: int,
        n: int | None,
    ) -> Refused:
        return Refused(
            run_id=self.run_id, channel=self.channel, group_id=key[0], round=key[1],
            trajectory_ids=tuple(c.trajectory_id for c in members),
            revisions=tuple(c.revision for c in members),
            whole_group=n is not None, reason=reason, detail=detail, n=n or 0,
            input_topic_id=self.source.topic_id,
            input_from=self.input_from, input_to=self._input_to, event_time=at,
            traceparents=_traceparents(members),
        )  # fmt: skip

    def _policy_applied(self, policy: AdmissionPolicy, offset: int) -> PolicyApplied:
        return PolicyApplied(
            run_id=self.run_id,
            channel=self.channel,
            policy=policy,
            input_topic_id=self.source.topic_id,
            from_offset=offset,
        )

    def _log_time(self, candidates: Iterable[Candidate]) -> int:
        """Return the event time, or a later closing time: one source partition may lag behind."""
        return max(self.now or 0, *(c.closed_at for c in candidates))

    @property
    def _in_force(self) -> AdmissionPolicy:
        if self.policy is None:
            raise RuntimeError(f"run {self.run_id}: nothing can be decided before its first policy")
        return self.policy


def _traceparents(members: Sequence[Candidate]) -> tuple[str | None, ...]:
    """Return the trace context of each member; nothing when none has one."""
    found = tuple(c.traceparent for c in members)
    return found if any(found) else ()
