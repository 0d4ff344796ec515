"""Records of `claw.trajectories`: closed trajectories with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import Channel, Outcome, Tag, VersionSpan
from clawstream.schemas.records.steps import StepStatus

StepMarkKind = Literal["late", "duplicate", "retried", "orphan"]
Drift = Literal["root", "clean", "realigned", "forked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens stored once: a node of a trajectory's segment tree."""

    parent: int | None = None
    step_index: int | None = None
    token_ids: bytes
    logprobs: bytes | None = None
    versions: tuple[VersionSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStep:
    """One step of a closed trajectory, without its tokens: they are in the segments."""

    step_id: str
    index: int
    parent: int | None = None
    segment: int | None = None
    status: StepStatus
    finish_reason: str | None = None
    drift: Drift
    prompt_tokens: int
    response_tokens: int
    response_json: bytes
    oldest_version: str | None = None
    newest_version: str | None = None
    trainable: bool
    untrainable_reason: str | None = None
    tags: tuple[Tag, ...] = ()
    marks: tuple[str, ...] = ()
    offset: int
    logprobs_temperature: float | None = None
    tokenizer_fingerprint: str | None = None
    new_messages_json: bytes | None = None
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One closed trajectory, each token once. Key: trajectory key. Written once, when it closes."""

    run_id: str
    trajectory_key: str
    trajectory_id: str
    group_id: str
    group_size: int | None = None
    round: int | None = None
    channel: Channel
    outcome: Outcome
    reason: str | None = None
    opened_at: int
    closed_at: int
    metadata_json: bytes | None = None
    part: int
    parts: int
    segments: tuple[Segment, ...]
    steps: tuple[TrajectoryStep, ...]
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A mark on a step that came to light after its trajectory closed. Key: trajectory key."""

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str | None = None
    step_id: str
    mark: StepMarkKind
    evidence: str | None = None
    offset: int
