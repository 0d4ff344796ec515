"""The records as frozen dataclasses: one per Avro record of `schemas/avro/`, same field order.

The `doc` in the schema defines meaning, unit and length of each field. Absent values are None.
Token ids and log-probabilities are packed little-endian bytes (`schemas.tokens`). A test compares
these classes with the schemas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Channel = Literal["train", "val"]
Outcome = Literal["completed", "failed", "abandoned", "timed_out", "lost"]
RewardSource = Literal["env", "rule", "model", "judge", "human", "next_state"]
StepStatus = Literal["ok", "aborted", "error"]
SessionKind = Literal["opened", "completed", "failed", "abandoned"]
StepMarkKind = Literal["late", "duplicate", "retried", "orphan"]
Drift = Literal["root", "clean", "realigned", "forked"]
WorkerState = Literal["starting", "loading", "ready", "draining", "failed"]
WeightFormat = Literal["full", "delta"]
SamplingSource = Literal["engine", "request"]
FailureSource = Literal["engine", "gateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Which weight version sampled response tokens [start, end)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Half-open range of token indexes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A label with what it was concluded from."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A field kept outside the record because of its size, content-addressed."""

    field: str
    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record lies: positions always name the topic's id."""

    topic_id: str
    partition: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValue:
    """One reward in one candidate revision: the current value of its (target, source, name)."""

    source: RewardSource
    name: str
    function_version: str
    step_id: str | None = None
    value: float | None = None
    reason: str | None = None
    reward_revision: int


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
class Finding:
    """A score below 1.0, or a rule that failed."""

    rule: str
    step_id: str | None = None
    score: float | None = None
    evidence: str | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """One group of a batch."""

    group_id: str
    round: int
    n: int
    members: tuple[BatchMember, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file of a weight version."""

    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a step were sampled. A number that is None: not known."""

    source: SamplingSource
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    constraints: tuple[str, ...] = ()
    logprobs_mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call as the engine counted them, of all its choices together."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One sampled choice of one LLM call, as the gateway saw it. Key: trajectory key."""

    step_id: str
    run_id: str
    trajectory_key: str
    call_id: str
    choice_index: int
    group_id: str | None = None
    channel: Channel | None = None
    protocol: str
    model: str
    status: StepStatus
    finish_reason: str | None = None
    streamed: bool
    request_json: bytes
    response_json: bytes
    prompt_token_ids: bytes | None = None
    response_token_ids: bytes | None = None
    response_logprobs: bytes | None = None
    tokens_absent_reason: str | None = None
    versions: tuple[VersionSpan, ...] = ()
    version_first: str | None = None
    version_last: str | None = None
    redacted_prompt: tuple[TokenSpan, ...] = ()
    redacted_response: tuple[TokenSpan, ...] = ()
    blobs: tuple[Blob, ...] = ()
    tags: tuple[Tag, ...] = ()
    idempotency_key: str | None = None
    retry_count: int | None = None
    user_agent: str | None = None
    worker_id: str | None = None
    gateway_id: str
    received_at: int
    finished_at: int
    subject_id: str | None = None
    key_id: str | None = None
    sampling: Sampling | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that ended with an error and kept no sampled tokens: neither a step nor trainable.

    Key: trajectory key, or the event id where that is None.
    """

    event_id: str
    run_id: str
    trajectory_key: str | None = None
    group_id: str | None = None
    channel: Channel | None = None
    protocol: str
    model: str | None = None
    streamed: bool
    source: FailureSource
    status: int
    error_type: str | None = None
    message: str
    engine: str | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    user_agent: str | None = None
    gateway_id: str
    received_at: int
    duration_ms: float
    subject_id: str | None = None
    key_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """A trajectory opened or ended. Key: trajectory key."""

    event_id: str
    run_id: str
    trajectory_key: str
    kind: SessionKind
    group_id: str | None = None
    channel: Channel | None = None
    group_size: int | None = None
    round: int | None = None
    step_id: str | None = None
    metadata_json: bytes | None = None
    reason: str | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A clock tick. On `claw.steps` and `claw.rewards` its log timestamp counts.

    On `claw.candidates`, `event_time` of the source partition counts.
    """

    partition: int
    event_time: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward of a step or a trajectory. Key: trajectory key.

    State: the highest reward_revision per (target, source, name); of equal ones the first on the
    log.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str | None = None
    step_id: str | None = None
    source: RewardSource
    name: str
    function_version: str
    value: float | None = None
    reason: str | None = None
    reward_revision: int
    by: str | None = None
    detail_json: bytes | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curation:
    """A mark by a person or rule.

    Key: trajectory key. State: the last value per target and field.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str | None = None
    step_id: str | None = None
    quality: float | None = None
    trainable: bool | None = None
    tags: tuple[str, ...] | None = None
    note: str | None = None
    by: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The result of the quality rules for one closed trajectory. Key: trajectory key.

    State: the highest assessment_revision; of equal ones the first on the log.
    """

    event_id: str
    run_id: str
    trajectory_key: str
    trajectory_id: str
    rules: tuple[str, ...]
    quality: float | None = None
    step_quality: tuple[float, ...]
    findings: tuple[Finding, ...]
    assessment_revision: int
    by: str | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyMarker:
    """A new owner of the partition. Its own offset is the owner's epoch."""

    worker: str
    steps_topic_id: str
    rewards_topic_id: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyDelta:
    """State change and decisions of one micro-batch."""

    epoch: int
    seq: int
    applied_steps: int
    applied_rewards: int
    entries: bytes
    format: int = 0
    hashes: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblySnapshot:
    """A piece of the whole state of the partition."""

    epoch: int
    seq: int
    snapshot_id: str
    index: int
    count: int
    data: bytes
    format: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A published set of weights. Key: version id. A checkpoint without its version is ignored."""

    version_id: str
    run_id: str
    sync_index: int
    attempt: int
    parent_version: str | None = None
    format: WeightFormat
    base_version: str | None = None
    files: tuple[WeightFile, ...]
    checkpoint_url: str | None = None
    channel: Channel
    batches_topic_id: str | None = None
    first_batch_seq: int | None = None
    last_batch_seq: int | None = None
    metrics: Mapping[str, float]
    created_at: int


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
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPublished:
    """An Avro schema, before its first record. Key: fingerprint in hex."""

    fingerprint: str
    name: str
    schema_json: str
    created_at: int
    confluent_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be handled, with everything to repair and replay it.

    Key: original key.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    key: bytes | None = None
    value: bytes | None = None
    timestamp_ms: int
    process: str
    reason: str
    detail: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterResolved:
    """The resolution of a dead letter: replayed, repaired or dismissed. Key: the dead letter's.

    Written in one transaction with the record that was sent.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    action: str
    sent_topic_id: str | None = None
    sent_partition: int | None = None
    sent_offset: int | None = None
    by: str
    note: str | None = None
    created_at: int
