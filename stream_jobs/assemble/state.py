"""The state of one partition of assemble, and how state changes modify it. Pure; all times are log
timestamps in ms.

The state is a fold over state changes: small JSON arrays `[kind, ...]`. `AssemblyFold` creates
and applies them while it reads the inputs; a new owner rebuilds the state from the changelog
with the same `PartitionState.apply`. Payload (tokens, replies, metadata) is not part of the
state; only its offsets on `claw.steps` are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from schemas.ids import is_anonymous_session, is_gateway_assigned, key_of_trajectory
from schemas.records import Channel, Outcome, StepMarkKind
from stream_jobs.assemble.closed_store import ClosedStore
from stream_jobs.assemble.log_time import Silences
from stream_jobs.assemble.matching.anonymous_sessions import SessionIndex
from stream_jobs.assemble.matching.retries import why_retried
from stream_jobs.assemble.model import (
    STEPS,
    Annotations,
    AssessmentState,
    AwaitedTarget,
    ChangeKind,
    ClosedStep,
    ClosedTrajectory,
    CurationState,
    CurrentReward,
    DeadLetterDecision,
    OpenStep,
    OpenTrajectory,
    PendingOutputs,
    PendingTarget,
    RunTrajectory,
    SourceTopic,
    StateChange,
    StepMarkDecision,
    call_suffix,
)

LATE_MAX = 1000
"""Late steps remembered per trajectory. Beyond it, duplicates are marked again."""


@dataclass(slots=True)
class PartitionState:
    """The complete state of one partition.

    Attributes:
        applied, time, topic_ids: Of `claw.steps` and `claw.rewards`.
        silences: Of `claw.steps`.
        opened: Open trajectories by time of their last record.
        closed: Closed trajectories by closing time.
        waiting: Pending targets of each input, by offset.
        by_open_seq, session_indexes, anonymous_open, agent_open, waiting_for: Derived lookup
            tables, not stored. `anonymous_open` and `agent_open` hold the open trajectories of
            anonymous and of agent sessions; `waiting_for` holds the offsets of pending targets
            by what they wait for.
    """

    applied: list[int] = field(default_factory=lambda: [-1, -1])
    time: list[int] = field(default_factory=lambda: [-1, -1])
    topic_ids: list[str] = field(default_factory=lambda: ["", ""])
    silences: Silences = field(default_factory=Silences)
    opened: OrderedDict[RunTrajectory, OpenTrajectory] = field(default_factory=OrderedDict)
    by_open_seq: dict[int, RunTrajectory] = field(default_factory=dict)
    closed: ClosedStore = field(default_factory=ClosedStore)
    waiting: tuple[OrderedDict[int, PendingTarget], OrderedDict[int, PendingTarget]] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )
    pending: PendingOutputs = field(default_factory=PendingOutputs)
    waiting_for: dict[AwaitedTarget, dict[int, None]] = field(default_factory=dict)
    session_indexes: dict[RunTrajectory, SessionIndex] = field(default_factory=dict)
    anonymous_open: OrderedDict[RunTrajectory, None] = field(default_factory=OrderedDict)
    agent_open: OrderedDict[RunTrajectory, None] = field(default_factory=OrderedDict)

    @property
    def event_time(self) -> int:
        """Return the event time of the partition: the minimum over its inputs; -1 before both have
        records.
        """
        return min(self.time)

    def apply(self, entry: StateChange) -> None:
        """Apply one state change."""
        kind, *args = entry
        _APPLY[kind](self, *args)

    # -- one method for each kind of entry; the constant beside it is its kind

    def _opened(self, run: str, key: str, at: int, channel: Channel, open_seq: int) -> None:
        self.opened[run, key] = OpenTrajectory(open_seq, at, channel, at)
        self.by_open_seq[open_seq] = (run, key)

    def _attributed(self, run: str, key: str, at: int, given: Mapping[str, Any]) -> None:
        trajectory = self._record_activity((run, key), at)
        for name, value in given.items():
            if getattr(trajectory, name) is None:
                setattr(trajectory, name, value)

    def _step_added(self, open_seq: int, step: list[Any]) -> None:
        entry, key = OpenStep(*step), self.by_open_seq[open_seq]
        steps = self._record_activity(key, entry.at).steps
        steps.append(entry)
        if (index := self._session_index(key)) is not None:
            index.add(key[1], len(steps) - 1, entry)

    def _retried(self, run: str, key: str, replaced: int, counted: int) -> None:
        steps = self.opened[run, key].steps
        steps[replaced] = steps[replaced]._replace(retried=counted)
        steps[counted] = steps[counted]._replace(retried=None)

    def _record_activity(self, key: RunTrajectory, at: int) -> OpenTrajectory:
        trajectory = self.opened[key]
        trajectory.last = at
        self.opened.move_to_end(key)
        if (timed := self._inactivity_timed(key)) is not None:
            timed[key] = None
            timed.move_to_end(key)
        return trajectory

    def _inactivity_timed(self, key: RunTrajectory) -> OrderedDict[RunTrajectory, None] | None:
        """Return the table of trajectories that close by inactivity; None if this one does not."""
        name = key_of_trajectory(key[1])
        return (
            None
            if not is_gateway_assigned(name)
            else self.anonymous_open
            if is_anonymous_session(name)
            else self.agent_open
        )

    def _session_index(self, key: RunTrajectory) -> SessionIndex | None:
        """Return the index of the trajectory's gateway-assigned session; None if it has none."""
        name = key_of_trajectory(key[1])
        return (
            self.session_indexes.setdefault((key[0], name), SessionIndex())
            if is_gateway_assigned(name)
            else None
        )

    def _closed(self, run: str, key: str, outcome: Outcome, reason: str | None, at: int) -> None:
        was = self.opened.pop((run, key))
        del self.by_open_seq[was.open_seq]
        if (timed := self._inactivity_timed((run, key))) is not None:
            timed.pop((run, key), None)
        if (index := self._session_index((run, key))) is not None:
            index.close(key, was.steps)
        for i, s in enumerate(was.steps):
            if s.retried is not None:
                was.steps[i] = s._replace(reason=why_retried(was.steps, i))
        self.pending.closings[run, key] = was
        steps = [
            ClosedStep(s.step_suffix, s.at, s.response, s.reason, s.oldest, s.newest, s.tags)
            for s in was.steps
        ]
        closed = ClosedTrajectory(
            was.opened_at,
            at,
            outcome,
            reason,
            was.channel,
            was.group_id,
            was.group_size,
            was.round,
            steps,
            was.annotations,
        )
        self.closed.add((run, key), closed)

    def _payload_lost(self, run: str, key: str, reason: str) -> None:
        closed = self.closed.change((run, key))
        closed.outcome, closed.reason = "lost", reason

    def _payload_written(
        self, run: str, key: str, prompt_tokens: int, order: list[int], place: list[Any]
    ) -> None:
        closed = self.closed.change((run, key))
        if order:
            closed.steps = [closed.steps[at] for at in order]
        closed.prompt_tokens = prompt_tokens
        closed.place = (place[0], place[1], place[2], place[3])

    def _revised(self, run: str, key: str) -> None:
        self.closed.change((run, key)).revision += 1
        self.pending.revised[run, key] = None

    def _evicted(self, run: str, key: str) -> None:
        closed = self.closed.pop((run, key))
        if (index := self._session_index((run, key))) is not None:
            index.forget(s.step_suffix for s in closed.steps)
            if not index:
                del self.session_indexes[run, key_of_trajectory(key)]

    def _rewarded(self, run: str, key: str, reward: list[Any]) -> None:
        entry = CurrentReward(*reward)
        annotations = self._annotations((run, key))
        if annotations.accepts_reward(entry):
            annotations.rewards[entry.slot] = entry

    def _curated(
        self,
        run: str,
        key: str,
        event: int,
        target: str,
        fields: Mapping[str, Any],
        offset: int = -1,
    ) -> None:
        annotations = self._annotations((run, key))
        if event not in annotations.seen:
            annotations.seen[event] = None
            annotations.marks.setdefault(target, CurationState()).apply(fields, offset)

    def _assessed(self, run: str, key: str, assessed: list[Any]) -> None:
        annotations = self._annotations((run, key))
        if annotations.accepts_assessment(assessed):
            annotations.assessed = AssessmentState(*assessed)

    def _target_awaited(
        self,
        source: SourceTopic,
        offset: int,
        at: int,
        run: str,
        key: str,
        step_suffix: str | None,
        entry: StateChange,
    ) -> None:
        self.waiting[source][offset] = waiting = PendingTarget(
            source, offset, at, (run, key), step_suffix, entry
        )
        self.waiting_for.setdefault(waiting.awaited, {})[offset] = None

    def _wait_ended(self, source: SourceTopic, offset: int) -> None:
        awaited = self.waiting[source].pop(offset).awaited
        left = self.waiting_for[awaited]
        del left[offset]
        if not left:
            del self.waiting_for[awaited]

    def _step_marked(
        self,
        run: str,
        key: str,
        step_id: str,
        kind: StepMarkKind,
        why: str | None,
        offset: int,
        hashed: int,
    ) -> None:
        self.pending.marks.append(StepMarkDecision((run, key), step_id, kind, why, offset))
        closed = self.closed.change((run, key))
        if len(closed.late) < LATE_MAX:
            closed.late.append(hashed)

    def _dead_lettered(self, source: SourceTopic, offset: int, reason: str, detail: str) -> None:
        self.pending.dead_letters.append(DeadLetterDecision(source, offset, reason, detail))

    def _outputs_acknowledged(self) -> None:
        self.pending = PendingOutputs()
        self.closed.pack()

    def _clocks_advanced(self, steps: int, rewards: int) -> None:
        self.time = [steps, rewards]

    def _silence_noted(self, start: int, end: int, forget: int) -> None:
        self.silences.add(start, end, forget)

    def _source_replaced(self, source: SourceTopic, topic_id: str, applied: int) -> None:
        """Restart an input on a replaced topic. Without its steps a closed trajectory cannot be
        told from a new one.
        """
        self.topic_ids[source] = topic_id
        self.applied[source] = applied
        self.time[source] = -1
        for offset in list(self.waiting[source]):
            self._wait_ended(source, offset)
        # An offset of the former topic: in this one another record lies there.
        self.pending.dead_letters = [b for b in self.pending.dead_letters if b.source != source]
        if source == STEPS:
            for key in [
                k
                for k in self.closed
                if k not in self.pending.closings and k not in self.pending.revised
            ]:
                self._evicted(*key)
        else:
            for key in [*self.opened, *self.closed]:
                self._annotations(key).forget_offsets()

    def _derive_indexes(self) -> None:
        """Rebuild the lookup tables from the trajectories."""
        for run, key in self.closed:
            if (index := self._session_index((run, key))) is not None:
                index.calls.update(
                    (call_suffix(s.step_suffix), key) for s in self.closed[run, key].steps
                )
        for (run, key), trajectory in self.opened.items():
            index, timed = self._session_index((run, key)), self._inactivity_timed((run, key))
            if index is not None and timed is not None:
                timed[run, key] = None
                for at, step in enumerate(trajectory.steps):
                    index.add(key, at, step)

    def _annotations(self, key: RunTrajectory) -> Annotations:
        """Return the annotations of an open or closed trajectory, for immediate modification."""
        trajectory = self.opened.get(key)
        return (
            trajectory.annotations
            if trajectory is not None
            else self.closed.change(key).annotations
        )

    # -- snapshots

    def dump(self) -> bytes:
        """Return the state as JSON. Requires that no output is pending."""
        return orjson.dumps(
            {
                "applied": self.applied,
                "time": self.time,
                "topic_ids": self.topic_ids,
                "silences": self.silences.dump(),
                "opened": [[*k, v.dump()] for k, v in self.opened.items()],
                "closed": self.closed.dump(),
                "waiting": [
                    [w.source, w.offset, w.at, *w.key, w.step_suffix, w.entry]
                    for side in self.waiting
                    for w in side.values()
                ],
            }
        )

    @classmethod
    def load(cls, packed: bytes) -> PartitionState:
        """Read the result of `dump`."""
        plain = orjson.loads(packed)
        state = cls(
            plain["applied"],
            plain["time"],
            plain["topic_ids"],
            Silences.load(plain["silences"]),
        )
        for run, key, trajectory in plain["opened"]:
            state.opened[run, key] = opened = OpenTrajectory.load(trajectory)
            state.by_open_seq[opened.open_seq] = (run, key)
        state.closed = ClosedStore(
            ((run, key), orjson.dumps(trajectory)) for run, key, trajectory in plain["closed"]
        )
        state._derive_indexes()
        for w in plain["waiting"]:
            state._target_awaited(*w)
        return state


_APPLY: Mapping[str, Any] = {
    ChangeKind.OPENED: PartitionState._opened,
    ChangeKind.ATTRIBUTED: PartitionState._attributed,
    ChangeKind.STEP_ADDED: PartitionState._step_added,
    ChangeKind.RETRIED: PartitionState._retried,
    ChangeKind.CLOSED: PartitionState._closed,
    ChangeKind.PAYLOAD_LOST: PartitionState._payload_lost,
    ChangeKind.PAYLOAD_WRITTEN: PartitionState._payload_written,
    ChangeKind.REVISED: PartitionState._revised,
    ChangeKind.EVICTED: PartitionState._evicted,
    ChangeKind.REWARDED: PartitionState._rewarded,
    ChangeKind.CURATED: PartitionState._curated,
    ChangeKind.ASSESSED: PartitionState._assessed,
    ChangeKind.TARGET_AWAITED: PartitionState._target_awaited,
    ChangeKind.WAIT_ENDED: PartitionState._wait_ended,
    ChangeKind.STEP_MARKED: PartitionState._step_marked,
    ChangeKind.DEAD_LETTERED: PartitionState._dead_lettered,
    ChangeKind.OUTPUTS_ACKNOWLEDGED: PartitionState._outputs_acknowledged,
    ChangeKind.CLOCKS_ADVANCED: PartitionState._clocks_advanced,
    ChangeKind.SILENCE_NOTED: PartitionState._silence_noted,
    ChangeKind.SOURCE_REPLACED: PartitionState._source_replaced,
}
