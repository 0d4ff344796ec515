"""The state of one partition of assemble. Pure; all times are log timestamps in ms.

The state is a fold over state changes (`clawstream.stream_jobs.assemble.state.changes`).
`AssemblyFold` creates and applies them while it reads the inputs; a new owner rebuilds the state
from the changelog with the same changes. Payload (tokens, replies, metadata) is not part of the
state; only its offsets on `claw.steps` are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Raw, Struct

from clawstream.schemas.ids import is_anonymous_session, is_gateway_assigned, key_of_trajectory
from clawstream.stream_jobs.assemble.matching.anonymous_sessions import SessionIndex
from clawstream.stream_jobs.assemble.state.annotations import Annotations
from clawstream.stream_jobs.assemble.state.closed_store import ClosedStore
from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.log_time import Silences
from clawstream.stream_jobs.assemble.state.steps import call_suffix
from clawstream.stream_jobs.assemble.state.trajectories import (
    AwaitedTarget,
    OpenTrajectory,
    PendingOutputs,
    PendingTarget,
    RunTrajectory,
    SourceTopic,
)


@dataclass(slots=True)
class PartitionState:
    """The complete state of one partition.

    Attributes:
        applied, time, topic_ids: Of `claw.steps` and `claw.rewards`.
        silences: Of `claw.steps`.
        opened: Open trajectories by time of their last record.
        closed: Closed trajectories by closing time.
        waiting: Pending targets of each input, by offset.
        by_open_seq, session_indexes, anonymous_open, agent_open, waiting_for, waiting_bytes:
            Derived lookup tables, not stored. `anonymous_open` and `agent_open` hold the open
            trajectories of anonymous and of agent sessions; `waiting_for` holds the offsets of
            pending targets by what they wait for; `waiting_bytes` is the size of those of each
            input.
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
    waiting_bytes: list[int] = field(default_factory=lambda: [0, 0])
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

    def annotations(self, key: RunTrajectory) -> Annotations:
        """Return the annotations of an open or closed trajectory, to read."""
        trajectory = self.opened.get(key)
        return (trajectory if trajectory is not None else self.closed[key]).annotations

    def annotations_to_change(self, key: RunTrajectory) -> Annotations:
        """Return the annotations of an open or closed trajectory, for immediate modification."""
        trajectory = self.opened.get(key)
        return (trajectory if trajectory is not None else self.closed.change(key)).annotations

    def record_activity(self, key: RunTrajectory, at: int) -> OpenTrajectory:
        """Note the time of a trajectory's last record, and return the trajectory."""
        trajectory = self.opened[key]
        trajectory.last = at
        self.opened.move_to_end(key)
        if (timed := self.inactivity_timed(key)) is not None:
            timed[key] = None
            timed.move_to_end(key)
        return trajectory

    def inactivity_timed(self, key: RunTrajectory) -> OrderedDict[RunTrajectory, None] | None:
        """Return the table of trajectories that close by inactivity; None if this one does not."""
        name = key_of_trajectory(key[1])
        if not is_gateway_assigned(name):
            return None
        return self.anonymous_open if is_anonymous_session(name) else self.agent_open

    def session_index(self, key: RunTrajectory) -> SessionIndex | None:
        """Return the index of the trajectory's gateway-assigned session; None if it has none."""
        name = key_of_trajectory(key[1])
        if not is_gateway_assigned(name):
            return None
        return self.session_indexes.setdefault((key[0], name), SessionIndex())

    def evict(self, key: RunTrajectory) -> None:
        """Forget a closed trajectory."""
        closed = self.closed.pop(key)
        if (index := self.session_index(key)) is not None:
            index.forget(s.step_suffix for s in closed.steps)
            if not index:
                del self.session_indexes[key[0], key_of_trajectory(key[1])]

    def begin_wait(self, pending: PendingTarget) -> None:
        """Add a pending target."""
        self.waiting[pending.source][pending.offset] = pending
        self.waiting_bytes[pending.source] += pending.size
        self.waiting_for.setdefault(pending.awaited, {})[pending.offset] = None

    def end_wait(self, source: SourceTopic, offset: int) -> None:
        """Remove a pending target."""
        pending = self.waiting[source].pop(offset)
        self.waiting_bytes[source] -= pending.size
        awaited = pending.awaited
        left = self.waiting_for[awaited]
        del left[offset]
        if not left:
            del self.waiting_for[awaited]

    # -- snapshots

    def dump(self) -> bytes:
        """Encode the state. Requires that no output is pending."""
        return encode(
            _Stored(
                self.applied,
                self.time,
                self.topic_ids,
                self.silences,
                list(self.opened.items()),
                self.closed.encoded(),
                [pending for side in self.waiting for pending in side.values()],
            )
        )

    @classmethod
    def load(cls, packed: bytes) -> PartitionState:
        """Read the result of `dump`."""
        stored = _DECODER.decode(packed)
        state = cls(stored.applied, stored.time, stored.topic_ids, stored.silences)
        state.opened.update(stored.opened)
        state.closed = ClosedStore((key, bytes(closed)) for key, closed in stored.closed)
        state._derive_indexes()
        for pending in stored.waiting:
            state.begin_wait(pending)
        return state

    def _derive_indexes(self) -> None:
        """Rebuild the lookup tables from the trajectories."""
        for key in self.closed:
            if (index := self.session_index(key)) is not None:
                steps = self.closed[key].steps
                index.calls.update((call_suffix(s.step_suffix), key[1]) for s in steps)
        for key, trajectory in self.opened.items():
            self.by_open_seq[trajectory.open_seq] = key
            index, timed = self.session_index(key), self.inactivity_timed(key)
            if index is not None and timed is not None:
                timed[key] = None
                for at, step in enumerate(trajectory.steps):
                    index.add(key[1], at, step)


class _Stored(Struct):
    """A snapshot."""

    applied: list[int]
    time: list[int]
    topic_ids: list[str]
    silences: Silences
    opened: list[tuple[RunTrajectory, OpenTrajectory]]
    closed: list[tuple[RunTrajectory, Raw]]
    waiting: list[PendingTarget]


_DECODER = decoder(_Stored)
