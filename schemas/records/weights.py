"""Records of `claw.weights`, `claw.trained-tokens` and `claw.workers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import Channel

WeightFormat = Literal["full", "delta"]
WorkerState = Literal["starting", "loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file of a weight version."""

    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A published set of weights. Key: version id. A checkpoint without its version is ignored.

    `format` is delta for a delta against `base_version` and for an adapter of `base_model`.
    """

    version_id: str
    run_id: str
    sync_index: int
    attempt: int
    parent_version: str | None = None
    format: WeightFormat
    base_version: str | None = None
    base_model: str | None = None
    files: tuple[WeightFile, ...]
    checkpoint_version: str | None = None
    channel: Channel
    batches_topic_id: str | None = None
    first_batch_seq: int | None = None
    last_batch_seq: int | None = None
    metrics: Mapping[str, float]
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The tokens of a step as the trainer saw them in a batch. Key: trajectory key.

    Written in one transaction with the version that was trained on them. A step without a trained
    token has no record.
    """

    run_id: str
    trajectory_key: str
    trajectory_id: str
    step_id: str
    version_id: str
    batch_seq: int
    updates: int | None = None
    logprobs: bytes | None = None
    advantages: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraining:
    """What the trainer did with a step. untrained_reason: None if tokens of it were trained."""

    step_id: str
    untrained_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """What the trainer did with each step of a trajectory of a batch. Key: trajectory key.

    Written in one transaction with the version that was trained on the batch.
    """

    run_id: str
    trajectory_key: str
    trajectory_id: str
    version_id: str
    batch_seq: int
    steps: tuple[StepTraining, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A rollout worker says how it is. Key: worker id; a tombstone means a clean exit."""

    worker_id: str
    base_url: str
    models: tuple[str, ...]
    state: WorkerState
    weight_version: str | None = None
    run_id: str | None = None
    heartbeat_at: int
    heartbeat_interval_ms: int
    started_at: int
    loads: int
    last_load_ms: float | None = None
    failed_loads: int = 0
    error: str | None = None
    loaded_at: int | None = None
