"""Records of `claw.ready-batches.*`: admission's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.candidates import AdmissionPolicy
from clawstream.schemas.records.parts import Channel, Int32, Millis, Place, RewardValue, RunId


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """One trajectory of a batch, at exactly one revision."""

    trajectory_id: str
    """Trajectory."""
    trajectory_key: str
    """Key of the trajectory."""
    revision: int
    """Candidate revision that was admitted."""
    place: Place
    """Payload on `claw.trajectories`."""
    rewards: tuple[RewardValue, ...]
    """The rewards of exactly that revision."""
    untrainable_steps: tuple[str, ...]
    """Step ids that must not be trained."""
    trainable_tokens: int
    """Sampled tokens of the trainable steps."""
    oldest_sync_index: int | None = None
    """Lowest sync index among its trainable tokens."""
    traceparent: str | None = None
    """Its trace context (Candidate, `traceparent`); null: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a batch."""

    group_id: str
    """Group."""
    round: Int32
    """Round of the group id within the run, from 0."""
    n: Int32
    """Group size asked for; members may be fewer."""
    members: tuple[BatchMember, ...]
    """Usable members, by trajectory id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBatch:
    """A batch to train. batch_seq is contiguous from 0. Key: run."""

    run_id: RunId
    channel: Channel
    batch_seq: int
    """Number of the batch."""
    groups: tuple[BatchGroup, ...]
    """In the order in which they became ready."""
    policy_version: int
    """AdmissionPolicy that held."""
    sync_every: Int32
    """Batches a weight version."""
    algorithm: str
    """Algorithm that the trainer uses, from the admission policy."""
    reward_weights: Mapping[str, float]
    """From the policy: how rewards become the training reward."""
    input_topic_id: str
    """Id of `claw.candidates`."""
    input_partition: Int32
    """Partition of `claw.candidates` that has the run."""
    input_from: int
    """Lowest candidate offset neither admitted nor refused after this batch."""
    input_to: int
    """One past the last candidate offset folded."""
    content_hash: str
    """sha256 over the canonical content: no clock, no run id, no place."""
    trainable_tokens: int
    """Trainable tokens of all members."""
    created_at_event_time: Millis
    """Log time of the admission, milliseconds: event time, or a later closed_at of a member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A group or member that will not be trained. It asks for a replacement. Key: run."""

    run_id: RunId
    channel: Channel
    group_id: str
    """Group."""
    round: Int32 | None = None
    """Round."""
    trajectory_ids: tuple[str, ...]
    """Who is refused; members that never came are not in it."""
    revisions: tuple[int, ...]
    """Their revisions, same order."""
    whole_group: bool
    """The round is closed by this."""
    reason: str
    """stale, zero_variance, incomplete, reward_missing, assessment_missing, duplicate,
    round_closed, replaced, outcome, too_short, too_long, too_large, untrainable, quality,
    run_ended.
    """
    detail: str | None = None
    """With numbers."""
    n: Int32
    """Trajectories asked for in replacement."""
    input_topic_id: str
    """Id of `claw.candidates`."""
    input_from: int
    """Lowest candidate offset neither admitted nor refused after this refusal."""
    input_to: int
    """One past the last candidate offset folded."""
    event_time: Millis | None = None
    """Log time of the refusal, milliseconds: event time, or a later closed_at of who is refused."""
    traceparents: tuple[str | None, ...] = ()
    """Their trace contexts, same order (Candidate, `traceparent`); empty: none has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A revision that came after its trajectory was admitted or refused. Key: run."""

    run_id: RunId
    channel: Channel
    trajectory_id: str
    """The trajectory: equal to the key, or `<key>~<ulid>` in an anonymous session."""
    revision: int
    """Candidate revision that came after admission."""
    missed_batch_seq: int | None = None
    """Batch that has an older revision; null: it was refused."""
    input_to: int
    """One past the last candidate offset folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyApplied:
    """The policy in force from a candidate offset on. Key: run."""

    run_id: RunId
    channel: Channel
    """Channel."""
    policy: AdmissionPolicy
    """In full."""
    input_topic_id: str
    """Id of `claw.candidates`."""
    from_offset: int
    """Candidate offset from which it holds."""
