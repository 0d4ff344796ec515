"""Open and closed trajectories, targets that are waited for, and decided outputs. Pure; all times
are log timestamps in ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Literal

from msgspec import Struct, field

from clawstream.schemas.records import Channel, Outcome, StepMarkKind
from clawstream.stream_jobs.assemble.state.annotations import Annotation, Annotations
from clawstream.stream_jobs.assemble.state.encoding import encode
from clawstream.stream_jobs.assemble.state.steps import OpenSteps

RunTrajectory = tuple[str, str]
"""(run id, trajectory id). The trajectory id equals the trajectory key, except in gateway-assigned
sessions.
"""
SourceTopic = Literal[0, 1]
STEPS: SourceTopic = 0
REWARDS: SourceTopic = 1
AwaitedTarget = tuple[SourceTopic, RunTrajectory, str | int | None]
"""Lookup key of a pending target: for an annotation the trajectory and the step suffix, for a
completion the trajectory and the hash of its event id.
"""
PayloadPlace = tuple[str, int, int, int]
"""Topic id, partition, first and last offset of a trajectory's payload on `claw.trajectories`."""


class OpenTrajectory(Struct, array_like=True):
    """A trajectory that has not closed.

    Attributes:
        open_seq: Offset on `claw.steps` of the record that opened it. Identifies the trajectory
            in the changelog.
        last: Time of its last record, ms.
        meta: Offset of the opened event that carries metadata.
        traceparent: Trace context of the first call that has one.
    """

    open_seq: int
    opened_at: int
    channel: Channel
    last: int
    group_id: str | None = None
    group_size: int | None = None
    round: int | None = None
    meta: int | None = None
    steps: OpenSteps = field(default_factory=OpenSteps)
    annotations: Annotations = field(default_factory=Annotations)
    traceparent: str | None = None


class ClosedStep(Struct, frozen=True, array_like=True):
    """The part of a step that later candidate revisions need."""

    step_suffix: str
    at: int
    response: int
    reason: str | None
    oldest: str | None
    newest: str | None
    tags: list[str] | None = None


class ClosedTrajectory(Struct, array_like=True, dict=True):
    """A closed trajectory, reduced to what later rewards and marks need.

    Attributes:
        steps: In log order until the payload is written, then by index.
        prompt_tokens: Environment tokens, each counted once.
        place: None before the first output.
        revision: Last decided candidate revision; -1 before the first.
        late: Hashes of the ids of late steps.
    """

    opened_at: int
    closed_at: int
    outcome: Outcome
    reason: str | None
    channel: Channel
    group_id: str | None
    group_size: int | None
    round: int | None
    steps: list[ClosedStep]
    annotations: Annotations
    prompt_tokens: int = 0
    place: PayloadPlace | None = None
    revision: int = -1
    late: list[int] = field(default_factory=list)
    traceparent: str | None = None

    @cached_property
    def step_times(self) -> dict[str, int]:
        """Arrival time of each step by its suffix, ms. Steps may change their order, not these."""
        return {s.step_suffix: s.at for s in self.steps}


class Completion(Struct, frozen=True, array_like=True, tag="c"):
    """The end of a trajectory. event: hash of its event id. rewards: see `SessionEvent`."""

    outcome: Outcome
    reason: str | None
    event: int
    rewards: dict[str, float] | None = None


class PendingTarget(Struct, frozen=True, array_like=True):
    """An annotation or completion whose target is not known yet.

    Attributes:
        key: Trajectory, or gateway-assigned session.
        step_suffix: Step that it waits for; None for the trajectory.
        what: Takes effect when the target arrives; a completion only after the time limit.
    """

    source: SourceTopic
    offset: int
    at: int
    key: RunTrajectory
    step_suffix: str | None
    what: Annotation | Completion

    @property
    def size(self) -> int:
        """Return its size in a snapshot, bytes: a mark has up to 50 tags, an assessment a number
        for each step.
        """
        return len(encode(self))

    @property
    def awaited(self) -> AwaitedTarget:
        """Return the lookup key. For a completion it only detects duplicates."""
        step = self.what.event if isinstance(self.what, Completion) else self.step_suffix
        return self.source, self.key, step


class StepMarkDecision(Struct, frozen=True, array_like=True):
    """A decided StepMark."""

    key: RunTrajectory
    step_id: str
    kind: StepMarkKind
    evidence: str | None
    offset: int


class DeadLetterDecision(Struct, frozen=True, array_like=True):
    """A decided dead letter: the record at `offset` of an input."""

    source: SourceTopic
    offset: int
    reason: str
    detail: str


@dataclass(slots=True)
class PendingOutputs:
    """Decided outputs that are not yet acknowledged. closings: closed trajectories with their
    steps. revised: trajectories with a new revision.
    """

    closings: dict[RunTrajectory, OpenTrajectory] = dataclass_field(default_factory=dict)
    revised: dict[RunTrajectory, None] = dataclass_field(default_factory=dict)
    marks: list[StepMarkDecision] = dataclass_field(default_factory=list)
    dead_letters: list[DeadLetterDecision] = dataclass_field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.closings or self.revised or self.marks or self.dead_letters)
