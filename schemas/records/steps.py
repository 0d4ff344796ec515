"""Records of `claw.steps`: what the gateway and assemble write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import Blob, Channel, Tag, TokenSpan, VersionSpan

StepStatus = Literal["ok", "aborted", "error"]
SessionKind = Literal["opened", "completed", "failed", "abandoned", "replaced"]
SamplingSource = Literal["engine", "request"]
FailureSource = Literal["engine", "gateway"]


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
class Continuation:
    """Whether the prompt continues the tokens of an earlier step (exact continuation)."""

    previous_step_id: str | None = None
    kept_tokens: int | None = None
    reason: str | None = None


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
    tokenizer_fingerprint: str | None = None
    continuation: Continuation | None = None
    traceparent: str | None = None
    time_to_first_token_ms: float | None = None


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
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """A trajectory opened or ended. Key: trajectory key.

    rewards: of an end, by name. Each is a `Reward` on `claw.rewards`, too.
    """

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
    rewards: Mapping[str, float] | None = None
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A clock tick. On `claw.steps` and `claw.rewards` its log timestamp counts.

    On `claw.candidates`, `event_time` of the source partition counts.
    """

    partition: int
    event_time: int | None = None
