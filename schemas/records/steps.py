"""Records of `claw.steps`: what the gateway and assemble write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from clawstream.schemas.records.parts import (
    Blob,
    Channel,
    CreatedAt,
    EventId,
    Int32,
    Micros,
    Millis,
    PackedFloats,
    PackedInts,
    RunId,
    Tag,
    TokenSpan,
    TrajectoryKey,
    VersionSpan,
)

StepStatus = Literal["ok", "aborted", "error"]
SessionKind = Literal["opened", "completed", "failed", "abandoned", "replaced"]
SamplingSource = Literal["engine", "request"]
FailureSource = Literal["engine", "gateway"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a step were sampled. A null number: not known."""

    source: SamplingSource
    """engine: the engine told the parameters that it applied, its own defaults included; request:
    the parameters that the request named, the engine's defaults for the others are not known.
    """
    temperature: float | None = None
    """Divisor of the logits; 0: greedy."""
    top_p: float | None = None
    """Probability mass that is kept; 1: all of it."""
    top_k: Int32 | None = None
    """Number of the most probable tokens that are kept; 0: all of them."""
    min_p: float | None = None
    """Probability relative to the most probable token below which a token is dropped; 0: none is.
    """
    presence_penalty: float | None = None
    """Taken from the logit of each token that was sampled before; 0: none."""
    frequency_penalty: float | None = None
    """Taken from the logit for each time that the token was sampled before; 0: none."""
    repetition_penalty: float | None = None
    """Factor on the logit of each token seen before; 1: none."""
    constraints: tuple[str, ...] = ()
    """Whatever else changed or limited the distribution, e.g. `json`, `regex`, `grammar`,
    `structural_tag`, `logit_bias`, `bad_words`, `min_tokens`; empty: nothing that is known.
    """
    logprobs_mode: str | None = None
    """vLLM's word for what the log-probabilities are of: `processed_logprobs` (the distribution
    that was sampled from) or `raw_logprobs` (the model's own, at temperature 1).
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one call as the engine counted them, of all its choices together.

    Null: not known.
    """

    prompt_tokens: Int32 | None = None
    """Tokens of the prompt, cached ones included."""
    cached_tokens: Int32 | None = None
    """Tokens of the prompt that were read from the engine's cache."""
    completion_tokens: Int32 | None = None
    """Sampled tokens, reasoning ones included."""
    reasoning_tokens: Int32 | None = None
    """Sampled tokens that were reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Whether the prompt continues the tokens of an earlier step (exact continuation)."""

    previous_step_id: str | None = None
    """Step whose reply the request continues; null: the gateway knows none."""
    kept_tokens: Int32 | None = None
    """The first prompt tokens: prompt and sampled tokens of the previous step, unchanged; null:
    they were not kept.
    """
    reason: str | None = None
    """Why the engine rendered the whole prompt from the messages, e.g. `first_turn`,
    `history_edited`; null: it did not.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One sampled choice of one LLM call, as the gateway saw it. Key: trajectory key."""

    step_id: str
    """`<call id>.<choice>`: also the event id."""
    run_id: RunId
    trajectory_key: TrajectoryKey
    call_id: str
    """`<trajectory key>~<ulid>`."""
    choice_index: Int32
    """Which of the call's n choices."""
    group_id: str | None = None
    """Group the trajectory belongs to; null: its own id (a group of one)."""
    channel: Channel | None = None
    """As the request said; null: not said. The trajectory's first record decides."""
    protocol: str
    """`openai.chat` and so on."""
    model: str
    """Model the client asked for."""
    status: StepStatus
    """ok; aborted: the client went away; error: the engine failed after sampling."""
    finish_reason: str | None = None
    """Why sampling stopped, in the engine's words."""
    streamed: bool
    """Sent as server-sent events."""
    request_json: bytes
    """The client's request body, JSON."""
    response_json: bytes
    """The reply's message as the client got it, JSON: {role, content, tool_calls...}."""
    prompt_token_ids: PackedInts | None = None
    """Prompt token ids from the engine's reply, never recomputed."""
    response_token_ids: PackedInts | None = None
    """Sampled token ids from the engine's reply."""
    response_logprobs: PackedFloats | None = None
    """Log-probability of each sampled token under the distribution it was drawn from; same length
    as response_token_ids.
    """
    tokens_absent_reason: str | None = None
    """Why ids or log-probabilities are missing; null: they are there."""
    versions: tuple[VersionSpan, ...] = ()
    """Weight version of each sampled token, from the engine's own reply; empty: not known."""
    version_first: str | None = None
    """Engine's label when the call began; used when there are no spans."""
    version_last: str | None = None
    """Engine's label when the call ended."""
    redacted_prompt: tuple[TokenSpan, ...] = ()
    """Prompt tokens replaced before anything was kept."""
    redacted_response: tuple[TokenSpan, ...] = ()
    """Response tokens replaced: mask 0, no log-probability."""
    blobs: tuple[Blob, ...] = ()
    """Fields whose bytes are kept outside of the record, and where; then the images that the
    request holds, in order, as `image`.
    """
    tags: tuple[Tag, ...] = ()
    """Kind of call, with evidence."""
    idempotency_key: str | None = None
    """The client's idempotency key, by which retries are marked."""
    retry_count: Int32 | None = None
    """What the client's SDK said of its own retries."""
    user_agent: str | None = None
    """Client's user agent."""
    worker_id: str | None = None
    """Rollout worker that sampled."""
    gateway_id: str
    """Id of the gateway that recorded it."""
    received_at: Micros
    """Gateway's clock at the request, microseconds."""
    finished_at: Micros
    """Gateway's clock at the last token, microseconds."""
    subject_id: str | None = None
    """Reserved: whose data it is."""
    key_id: str | None = None
    """Reserved: key the payload is encrypted with."""
    sampling: Sampling | None = None
    """How its tokens were sampled; null: not known."""
    usage: Usage | None = None
    """Usage of its call, on the first step of the call only, so that a sum over steps counts each
    call once; null: not known.
    """
    tokenizer_fingerprint: str | None = None
    """Digest of the vocabulary of the engine's tokenizer: which token each id stands for; null: not
    known.
    """
    continuation: Continuation | None = None
    """Exact continuation; null: the run does not ask for it."""
    traceparent: str | None = None
    """Trace context of the client's span (W3C, header `traceparent`); null: none was sent, or no
    valid one.
    """
    time_to_first_token_ms: float | None = None
    """From the request to the first bytes of a stream, as the client gets them, milliseconds; of
    the call, the same for each of its choices; null: not streamed, or nothing came.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCall:
    """A call that ended with an error and kept no sampled tokens: neither a step nor trainable.

    Key: trajectory key, or the event id where that is null.
    """

    event_id: str
    """Unique id of this event."""
    run_id: RunId
    trajectory_key: str | None = None
    """Trajectory that the call was for; null: it was refused before that was known."""
    group_id: str | None = None
    """Group the trajectory belongs to; null: its own id (a group of one)."""
    channel: Channel | None = None
    """As the request said; null: not said. The trajectory's first record decides."""
    protocol: str
    """`openai.chat` and so on."""
    model: str | None = None
    """Model the client asked for; null: it named none, or its request was not read."""
    streamed: bool
    """Whether a stream was asked for; false when the request was not read."""
    source: FailureSource
    """engine: the engine's own error, passed on; gateway: the gateway's own refusal."""
    status: Int32
    """HTTP status of the reply, or the one that an error within it names. 200: the reply was an
    error all the same and names no status. Of a stream that broke off, the status that a plain
    reply would have had.
    """
    error_type: str | None = None
    """Type of the error in the words of the reply; at most 200 characters."""
    message: str
    """What the error said; at most 2,000 characters."""
    engine: str | None = None
    """Name of the engine that was asked last, as in the gateway's metrics; null: none was asked."""
    idempotency_key: str | None = None
    """The client's idempotency key, by which retries are marked."""
    retry_count: Int32 | None = None
    """What the client's SDK said of its own retries."""
    user_agent: str | None = None
    """Client's user agent."""
    gateway_id: str
    """Id of the gateway that recorded it."""
    received_at: Micros
    """Gateway's clock at the request, microseconds."""
    duration_ms: float
    """From the request to the error's reply, milliseconds."""
    subject_id: str | None = None
    """Reserved: whose data it is."""
    key_id: str | None = None
    """Reserved: key the payload is encrypted with."""
    traceparent: str | None = None
    """Trace context of the client's span (W3C, header `traceparent`); null: none was sent, or no
    valid one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEvent:
    """A trajectory opened or ended. Key: trajectory key."""

    event_id: EventId
    run_id: RunId
    trajectory_key: TrajectoryKey
    kind: SessionKind
    """opened, completed, failed (the agent said so), abandoned (nobody will come back), replaced
    (failed; another trajectory takes its place in the group).
    """
    group_id: str | None = None
    """Group, when said at opening."""
    channel: Channel | None = None
    """Channel, when said at opening."""
    group_size: Int32 | None = None
    """Members the group will have, when said at opening."""
    round: Int32 | None = None
    """Round of the group, when said at opening."""
    step_id: str | None = None
    """For an anonymous session: a step of the trajectory that is meant."""
    metadata_json: bytes | None = None
    """What reward functions need to know of the task, JSON object."""
    reason: str | None = None
    """For failed, abandoned and replaced."""
    rewards: Mapping[str, float] | None = None
    """Of an end: rewards of the whole trajectory by name, source env, revision 0; each is a Reward
    on claw.rewards, too. Null: none.
    """
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A clock tick. On `claw.steps` and `claw.rewards` its log timestamp counts.

    On `claw.candidates`, `event_time` of the source partition counts.
    """

    partition: Int32
    """Source partition."""
    event_time: Millis | None = None
    """Event time of the partition in milliseconds; null on the inputs, where the log timestamp is
    it.
    """
