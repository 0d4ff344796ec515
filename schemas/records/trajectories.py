"""Records of `claw.trajectories`: closed trajectories with their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import (
    Channel,
    EventId,
    Int32,
    Millis,
    Outcome,
    PackedFloats,
    PackedInts,
    RunId,
    Tag,
    TrajectoryKey,
    VersionSpan,
)
from clawstream.schemas.records.steps import StepStatus

StepMarkKind = Literal["late", "duplicate", "retried", "orphan"]
Drift = Literal["root", "clean", "realigned", "forked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens stored once: a node of a trajectory's segment tree."""

    parent: Int32 | None = None
    """Index of the segment this one continues; null: it starts at the first token."""
    step_index: Int32 | None = None
    """Step whose policy sampled these tokens; null: written by the environment."""
    token_ids: PackedInts
    """Token ids."""
    logprobs: PackedFloats | None = None
    """Log-probability of each sampled token at sampling time, as many as ids; null: environment."""
    versions: tuple[VersionSpan, ...] = ()
    """Weight versions of sampled tokens, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStep:
    """One step of a closed trajectory, without its tokens: they are in the segments."""

    step_id: str
    """`<call id>.<choice>`."""
    index: Int32
    """Position in the trajectory: causal prefix order, then log order."""
    parent: Int32 | None = None
    """Index of the step whose prompt and response this one's prompt starts with; null: none."""
    segment: Int32 | None = None
    """Index of the segment with the response; the prompt is the path from the root to its parent;
    null: no tokens.
    """
    status: StepStatus
    """How the call ended."""
    finish_reason: str | None = None
    """Why sampling stopped, in the engine's words."""
    drift: Drift
    """How the prompt continues what was sampled before."""
    prompt_tokens: Int32
    """Number of prompt tokens, 0 when not known."""
    response_tokens: Int32
    """Number of sampled tokens, 0 when not known."""
    response_json: bytes
    """The reply's message as the agent got it, JSON."""
    oldest_version: str | None = None
    """Version with the lowest sync index among the sampled tokens."""
    newest_version: str | None = None
    """Version with the highest sync index among the sampled tokens."""
    trainable: bool
    """False when the step cannot be trained: no tokens or log-probabilities, aborted, version not
    certain.
    """
    untrainable_reason: str | None = None
    """Why it can't be trained; null: it can."""
    tags: tuple[Tag, ...] = ()
    """Labels with evidence."""
    marks: tuple[str, ...] = ()
    """Marks: duplicate, retried."""
    offset: int
    """Offset of the step on `claw.steps`, partition as this trajectory's."""
    logprobs_temperature: float | None = None
    """Temperature of the distribution that its log-probabilities are of: the logits are divided by
    it when they are recomputed. Null: not known.
    """
    tokenizer_fingerprint: str | None = None
    """Digest of the vocabulary of the engine's tokenizer: which token each id stands for; null: not
    known.
    """
    new_messages_json: bytes | None = None
    """Messages of its request after the last reply in it, JSON array; long strings lose their
    middle. Null: not recorded (`jobs.new_messages_bytes`), or unreadable.
    """
    images: tuple[str, ...] = ()
    """SHA-256 in hex of each image that its request holds, in order: its name in the blob store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One closed trajectory, each token once. Key: trajectory key. Written once, when it closes."""

    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str
    """The trajectory: equal to the key, or `<key>~<ulid>` in an anonymous session."""
    group_id: str
    """Group; the trajectory's own id when none was given."""
    group_size: Int32 | None = None
    """Number of members that the group is to have, from the opened event; null: not given."""
    round: Int32 | None = None
    """Round of the group, from the opened event; null: not given."""
    channel: Channel
    outcome: Outcome
    reason: str | None = None
    """For failed, abandoned, lost and replaced."""
    opened_at: Millis
    """Log timestamp of its first record."""
    closed_at: Millis
    """Log timestamp at which it closed."""
    metadata_json: bytes | None = None
    """From the opened event, JSON object."""
    part: Int32
    """Number of this part, from 0."""
    parts: Int32
    """Number of parts; steps and segments of all parts are concatenated."""
    segments: tuple[Segment, ...]
    """Segment tree; a parent comes before its children."""
    steps: tuple[TrajectoryStep, ...]
    """Steps by index."""
    traceparent: str | None = None
    """Trace context of the span of the trajectory's client (W3C): that of its first call that has
    one; null: no call has one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMark:
    """A mark on a step that came to light after its trajectory closed. Key: trajectory key."""

    event_id: EventId
    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str | None = None
    """Trajectory; null: unknown."""
    step_id: str
    """Step."""
    mark: StepMarkKind
    """late, duplicate, retried, orphan."""
    evidence: str | None = None
    """What it was concluded from."""
    offset: int
    """Offset of the step on `claw.steps`."""
