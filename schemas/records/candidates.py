"""Records of `claw.candidates`: the input of admission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.schemas.records.parts import Channel, Outcome, RewardValue


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateStep:
    """What admission has to know of one step."""

    step_id: str
    index: int
    response_tokens: int
    trainable: bool
    reason: str | None = None
    quality: float | None = None
    tags: tuple[str, ...] = ()
    assessed_quality: float | None = None
    oldest_sync_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A closed trajectory at one revision, as input of admission; at most 4 MiB. Key: run.

    The headers topic_id, partition, first_offset and last_offset locate the payload.
    """

    run_id: str
    channel: Channel
    trajectory_key: str
    trajectory_id: str
    group_id: str
    group_size: int | None = None
    round: int | None = None
    revision: int
    outcome: Outcome
    opened_at: int
    closed_at: int
    rewards: tuple[RewardValue, ...]
    steps: tuple[CandidateStep, ...]
    prompt_tokens: int
    trainable_tokens: int
    oldest_sync_index: int | None = None
    newest_sync_index: int | None = None
    trainable: bool
    reason: str | None = None
    quality: float | None = None
    tags: tuple[str, ...] = ()
    assessed_quality: float | None = None
    assessment_revision: int | None = None
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """How a run's trajectories become batches. Key: run.

    A policy is in force from its own offset on; the first opens the run.
    """

    run_id: str
    policy_version: int
    group_size: int
    min_members: int
    required_rewards: tuple[str, ...]
    reward_weights: Mapping[str, float]
    reward_deadline_ms: int
    group_deadline_ms: int
    max_staleness: int | None = None
    drop_zero_variance: bool
    min_trainable_tokens: int
    max_trajectory_tokens: int | None = None
    train_outcomes: tuple[Outcome, ...]
    batch_groups: int
    batch_tokens: int | None = None
    sync_every: int
    val_groups: int
    val_deadline_ms: int
    algorithm: str
    min_quality: float | None = None
    untrained_tags: tuple[str, ...] = ()
    min_step_quality: float | None = None
    require_assessment: bool = False
    published_by: str | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run takes no more trajectories. Key: run."""

    run_id: str
    reason: str | None = None
    created_at: int
