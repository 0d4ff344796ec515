"""The changes of a partition's state: what the fold decides and the changelog stores. Pure; all
times are log timestamps in ms.

Each change is one record with its effect. The fold applies it when it is decided; a new owner
applies it again from the changelog.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder
from msgspec.structs import replace

from clawstream.schemas.records import Channel, Outcome
from clawstream.stream_jobs.assemble.matching.retries import why_retried
from clawstream.stream_jobs.assemble.state.annotations import Annotation
from clawstream.stream_jobs.assemble.state.encoding import decoder, encode
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.steps import OpenStep
from clawstream.stream_jobs.assemble.state.trajectories import (
    STEPS,
    ClosedStep,
    ClosedTrajectory,
    DeadLetterDecision,
    OpenTrajectory,
    PayloadPlace,
    PendingOutputs,
    PendingTarget,
    RunTrajectory,
    SourceTopic,
    StepMarkDecision,
)

LATE_MAX = 1000
"""Late steps remembered per trajectory. Beyond it, duplicates are marked again."""


class Change(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A change. In the changelog: an array of its tag and its fields."""

    def apply(self, state: PartitionState) -> None:
        """Apply the change to the state."""
        raise NotImplementedError


class Opened(Change, frozen=True, tag="o"):
    """A trajectory opened. open_seq: offset of its first record."""

    key: RunTrajectory
    at: int
    channel: Channel
    open_seq: int

    def apply(self, state: PartitionState) -> None:
        state.opened[self.key] = OpenTrajectory(self.open_seq, self.at, self.channel, self.at)
        state.by_open_seq[self.open_seq] = self.key


class Attributed(Change, frozen=True, tag="a"):
    """An open trajectory got attributes; the first value of each counts."""

    key: RunTrajectory
    at: int
    group_id: str | None = None
    group_size: int | None = None
    round: int | None = None
    meta: int | None = None
    traceparent: str | None = None

    def apply(self, state: PartitionState) -> None:
        trajectory = state.record_activity(self.key, self.at)
        for name in ("group_id", "group_size", "round", "meta", "traceparent"):
            if getattr(trajectory, name) is None:
                setattr(trajectory, name, getattr(self, name))


class StepAdded(Change, frozen=True, tag="s"):
    """An open trajectory got a step."""

    open_seq: int
    step: OpenStep

    def apply(self, state: PartitionState) -> None:
        key = state.by_open_seq[self.open_seq]
        steps = state.record_activity(key, self.step.at).steps
        steps.append(self.step)
        if (index := state.session_index(key)) is not None:
            index.add(key[1], len(steps) - 1, self.step)


class Retried(Change, frozen=True, tag="y"):
    """A step replaces another one. replaced, counted: their positions."""

    key: RunTrajectory
    replaced: int
    counted: int

    def apply(self, state: PartitionState) -> None:
        steps = state.opened[self.key].steps
        steps[self.replaced] = replace(steps[self.replaced], retried=self.counted)
        steps[self.counted] = replace(steps[self.counted], retried=None)


class Closed(Change, frozen=True, tag="c"):
    """A trajectory closed."""

    key: RunTrajectory
    outcome: Outcome
    reason: str | None
    at: int

    def apply(self, state: PartitionState) -> None:
        was = state.opened.pop(self.key)
        del state.by_open_seq[was.open_seq]
        if (timed := state.inactivity_timed(self.key)) is not None:
            timed.pop(self.key, None)
        if (index := state.session_index(self.key)) is not None:
            index.close(self.key[1], was.steps)
        for i, s in enumerate(was.steps):
            if s.retried is not None:
                was.steps[i] = replace(s, reason=why_retried(was.steps, i))
        state.pending.closings[self.key] = was
        closed = ClosedTrajectory(
            opened_at=was.opened_at,
            closed_at=self.at,
            outcome=self.outcome,
            reason=self.reason,
            channel=was.channel,
            group_id=was.group_id,
            group_size=was.group_size,
            round=was.round,
            steps=[
                ClosedStep(s.step_suffix, s.at, s.response, s.reason, s.oldest, s.newest, s.tags)
                for s in was.steps
            ],
            annotations=was.annotations,
            traceparent=was.traceparent,
        )
        state.closed.add(self.key, closed)


class PayloadLost(Change, frozen=True, tag="l"):
    """The payload of a closed trajectory was removed before it was written."""

    key: RunTrajectory
    reason: str

    def apply(self, state: PartitionState) -> None:
        closed = state.closed.change(self.key)
        closed.outcome, closed.reason = "lost", self.reason


class PayloadWritten(Change, frozen=True, tag="f"):
    """The payload of a closed trajectory was written. order: position of the step at each index;
    empty if unchanged.
    """

    key: RunTrajectory
    prompt_tokens: int
    order: Sequence[int]
    place: PayloadPlace

    def apply(self, state: PartitionState) -> None:
        closed = state.closed.change(self.key)
        if self.order:
            closed.steps = [closed.steps[at] for at in self.order]
        closed.prompt_tokens, closed.place = self.prompt_tokens, self.place


class Revised(Change, frozen=True, tag="v"):
    """A closed trajectory gets its next candidate revision."""

    key: RunTrajectory

    def apply(self, state: PartitionState) -> None:
        state.closed.change(self.key).revision += 1
        state.pending.revised[self.key] = None


class Evicted(Change, frozen=True, tag="z"):
    """A closed trajectory was forgotten."""

    key: RunTrajectory

    def apply(self, state: PartitionState) -> None:
        state.evict(self.key)


class Annotated(Change, frozen=True, tag="r"):
    """A trajectory got a reward, a curation mark or an assessment."""

    key: RunTrajectory
    annotation: Annotation

    def apply(self, state: PartitionState) -> None:
        state.annotations_to_change(self.key).add(self.annotation)


class TargetAwaited(Change, frozen=True, tag="w"):
    """An annotation or completion waits for its target."""

    pending: PendingTarget

    def apply(self, state: PartitionState) -> None:
        state.begin_wait(self.pending)


class WaitEnded(Change, frozen=True, tag="x"):
    """The wait of the record at an offset ended."""

    source: SourceTopic
    offset: int

    def apply(self, state: PartitionState) -> None:
        state.end_wait(self.source, self.offset)


class StepMarked(Change, frozen=True, tag="m"):
    """A late step is marked. hashed: hash of its step suffix."""

    mark: StepMarkDecision
    hashed: int

    def apply(self, state: PartitionState) -> None:
        state.pending.marks.append(self.mark)
        closed = state.closed.change(self.mark.key)
        if len(closed.late) < LATE_MAX:
            closed.late.append(self.hashed)


class DeadLettered(Change, frozen=True, tag="d"):
    """A record becomes a dead letter."""

    letter: DeadLetterDecision

    def apply(self, state: PartitionState) -> None:
        state.pending.dead_letters.append(self.letter)


class OutputsAcknowledged(Change, frozen=True, tag="D"):
    """All outputs decided so far are acknowledged."""

    def apply(self, state: PartitionState) -> None:
        state.pending = PendingOutputs()
        state.closed.pack()


class ClocksAdvanced(Change, frozen=True, tag="t"):
    """The clocks of the inputs advanced."""

    steps: int
    rewards: int

    def apply(self, state: PartitionState) -> None:
        state.time = [self.steps, self.rewards]


class SilenceNoted(Change, frozen=True, tag="h"):
    """`claw.steps` was silent. forget: how many of the oldest silences are dropped."""

    start: int
    end: int
    forget: int

    def apply(self, state: PartitionState) -> None:
        state.silences.add(self.start, self.end, self.forget)


class SourceReplaced(Change, frozen=True, tag="n"):
    """An input restarts on a replaced topic. applied: the offset before its first one."""

    source: SourceTopic
    topic_id: str
    applied: int

    def apply(self, state: PartitionState) -> None:
        pending = state.pending
        state.topic_ids[self.source] = self.topic_id
        state.applied[self.source] = self.applied
        state.time[self.source] = -1
        for offset in list(state.waiting[self.source]):
            state.end_wait(self.source, offset)
        # An offset of the former topic is another record in this one.
        pending.dead_letters = [d for d in pending.dead_letters if d.source != self.source]
        if self.source == STEPS:
            # Without its steps a closed trajectory cannot be told from a new one.
            unsent = pending.closings.keys() | pending.revised.keys()
            for key in [k for k in state.closed if k not in unsent]:
                state.evict(key)
        else:
            for key in [*state.opened, *state.closed]:
                state.annotations_to_change(key).forget_offsets()


_ANY_CHANGE: Any = reduce(or_, Change.__subclasses__())
_DECODER: Decoder[list[Change]] = decoder(list[_ANY_CHANGE])
HASHES = (
    "end_hash",
    "prompt_hash",
    "idempotency_hash",
    "reply_hash",
    "last_turn_hash",
    "messages_hash",
    "call_id_hash",
    "exchange_hash",
)
"""The hashes of an `OpenStep`."""


def encode_changes(changes: Iterable[Change]) -> tuple[bytes, bytes]:
    """Encode changes for a delta, and the hashes of their steps apart, 8 bytes each: as decimal
    digits they would add a fifth to the changelog after compression.
    """
    stored, hashes = list[Change](), array("q")
    for change in changes:
        if isinstance(change, StepAdded):
            step = change.step
            found = {name: h for name in HASHES if (h := getattr(step, name)) is not None}
            hashes.extend(found.values())
            change = StepAdded(change.open_seq, replace(step, **dict.fromkeys(found, 0)))
        stored.append(change)
    return encode(stored), hashes.tobytes()


def decode_changes(data: bytes, hashes: bytes) -> list[Change]:
    """Read the result of `encode_changes`. Raises ValueError for malformed content."""
    changes, left = _DECODER.decode(data), deque(array("q", hashes))
    for i, change in enumerate(changes):
        if isinstance(change, StepAdded):
            names = [name for name in HASHES if getattr(change.step, name) is not None]
            if len(names) > len(left):
                raise ValueError("fewer hashes than the steps have")
            step = replace(change.step, **{name: left.popleft() for name in names})
            changes[i] = StepAdded(change.open_seq, step)
    if left:
        raise ValueError(f"{len(left)} more hashes than the steps have")
    return changes
