"""Records of `claw.ready-batches.*`: admission's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.candidates import AdmissionPolicy
from clawstream.schemas.records.parts import Channel, Place, RewardValue


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """One trajectory of a batch, at exactly one revision."""

    trajectory_id: str
    trajectory_key: str
    revision: int
    place: Place
    rewards: tuple[RewardValue, ...]
    untrainable_steps: tuple[str, ...]
    trainable_tokens: int
    oldest_sync_index: int | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a batch."""

    group_id: str
    round: int
    n: int
    members: tuple[BatchMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyBatch:
    """A batch to train. batch_seq is contiguous from 0. Key: run."""

    run_id: str
    channel: Channel
    batch_seq: int
    groups: tuple[BatchGroup, ...]
    policy_version: int
    sync_every: int
    algorithm: str
    reward_weights: Mapping[str, float]
    input_topic_id: str
    input_partition: int
    input_from: int
    input_to: int
    content_hash: str
    trainable_tokens: int
    created_at_event_time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A group or member that will not be trained. It asks for a replacement. Key: run."""

    run_id: str
    channel: Channel
    group_id: str
    round: int | None = None
    trajectory_ids: tuple[str, ...]
    revisions: tuple[int, ...]
    whole_group: bool
    reason: str
    detail: str | None = None
    n: int
    input_topic_id: str
    input_from: int
    input_to: int
    event_time: int | None = None
    traceparents: tuple[str | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A revision that came after its trajectory was admitted or refused. Key: run."""

    run_id: str
    channel: Channel
    trajectory_id: str
    revision: int
    missed_batch_seq: int | None = None
    input_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyApplied:
    """The policy in force from a candidate offset on. Key: run."""

    run_id: str
    channel: Channel
    policy: AdmissionPolicy
    input_topic_id: str
    from_offset: int
