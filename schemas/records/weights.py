"""Records of `claw.weights`, `claw.trained-tokens` and `claw.workers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import (
    Channel,
    CreatedAt,
    Int32,
    Micros,
    PackedFloats,
    RunId,
    TrajectoryKey,
)

WeightFormat = Literal["full", "delta"]
WorkerState = Literal["starting", "loading", "ready", "draining", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file of a weight version."""

    url: str
    """Where the bytes are: a URL that fsspec opens."""
    sha256: str
    """SHA-256 of the file, hex digits."""
    size_bytes: int
    """Length of the file in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A published set of weights. Key: version id. A checkpoint without its version is ignored."""

    version_id: str
    """`<run>/<sync_index>.<attempt>`, never reused."""
    run_id: RunId
    sync_index: int
    """Updates published so far; 0: initial weights."""
    attempt: int
    """Rises at each resume of the trainer."""
    parent_version: str | None = None
    """Version it was trained from."""
    format: WeightFormat
    """full, or delta: against base_version, or an adapter (LoRA) of base_model."""
    base_version: str | None = None
    """Version that a delta is against, its parent; null: no file is a delta."""
    base_model: str | None = None
    """Model of an adapter: SHA-256 of the concatenated SHA-256 digests (hex) of its safetensors
    files, in the order of their names; null: the version is no adapter.
    """
    files: tuple[WeightFile, ...]
    """safetensors, config and tokenizer files; an adapter's are those of peft. Of a delta, the
    files of the last full version, then the deltas since then in order.
    """
    checkpoint_version: str | None = None
    """Newest version with a complete checkpoint when this one was published: a resume trains the
    batches after it again; null: none.
    """
    channel: Channel
    """Channel whose batches trained it."""
    batches_topic_id: str | None = None
    """Id of the ready-batches topic."""
    first_batch_seq: int | None = None
    """First batch since the parent; null: none."""
    last_batch_seq: int | None = None
    """Last batch since the parent, inclusive."""
    metrics: Mapping[str, float]
    """loss, reward_mean, kl and so on."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The tokens of a step as the trainer saw them in a batch. Key: trajectory key.

    Written in one transaction with the version that was trained on them. A step without a trained
    token has no record.
    """

    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str
    """The trajectory."""
    step_id: str
    """`<call id>.<choice>`."""
    version_id: str
    """Version that was trained on the tokens. Its record names the parent, which is what training
    began from.
    """
    batch_seq: int
    """Batch that has the trajectory."""
    updates: Int32 | None = None
    """Optimizer steps between the parent's weights and the weights that gave `logprobs`; 0: they
    are the parent's. Null: no `logprobs`.
    """
    logprobs: PackedFloats | None = None
    """Log-probability of each response token under the trainer's weights, in its first training
    pass, at the temperature of the recorded one; NaN: not trained; minus infinity: the token has no
    gradient. Null: no pass was needed, because its advantages are 0.
    """
    advantages: PackedFloats
    """Advantage of each response token, as many as the step has; NaN: not trained, so this is the
    loss mask.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraining:
    """What the trainer did with a step."""

    step_id: str
    """`<call id>.<choice>`."""
    untrained_reason: str | None = None
    """Why none of its tokens was trained; null: tokens of it were trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """What the trainer did with each step of a trajectory of a batch. Key: trajectory key.

    Written in one transaction with the version that was trained on the batch.
    """

    run_id: RunId
    trajectory_key: TrajectoryKey
    trajectory_id: str
    """The trajectory."""
    version_id: str
    """Version that was trained on the batch."""
    batch_seq: int
    """Batch that has the trajectory."""
    steps: tuple[StepTraining, ...]
    """Every step of the trajectory, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A rollout worker says how it is. Key: worker id; a tombstone means a clean exit."""

    worker_id: str
    """Worker."""
    base_url: str
    """Where its engine answers, without /v1."""
    models: tuple[str, ...]
    """Names it serves."""
    state: WorkerState
    """Calls go to ready ones only."""
    weight_version: str | None = None
    """Version loaded and labelled."""
    run_id: str | None = None
    """Run whose weights it follows."""
    heartbeat_at: Micros
    """Worker's clock; three missed means absent."""
    heartbeat_interval_ms: Int32
    """Promise of the worker."""
    started_at: Micros
    """When the engine was started."""
    loads: int
    """Versions loaded since then, without restart."""
    last_load_ms: float | None = None
    """Duration of the last load."""
    failed_loads: int = 0
    """Failed attempts to load a version since then."""
    error: str | None = None
    """Last error, e.g. a version refused."""
    loaded_at: int | None = None
    """Worker's clock when it began to serve `weight_version`, microseconds; null: this worker did
    not load it, or nothing is served.
    """
