"""Builds step records from a parsed reply. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.sampling import requested_sampling
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.continuation.memory import Lookup
from clawstream.gateway.protocols.base import Choice, ParsedReply, Request, Tokens
from clawstream.gateway.protocols.usage import merged
from clawstream.schemas.ids import step_id
from clawstream.schemas.records import Continuation, Step, StepStatus, Tag, Usage

ABORTED = ("abort", "error")


@dataclass(frozen=True, slots=True)
class Call:
    """One accepted call. received_at: microseconds. body: the client's bytes.

    continues: None: the run does not ask for exact continuation, or the protocol has no turns.
    """

    trajectory: TrajectoryRef
    call_id: str
    protocol: str
    request: Request
    body: bytes
    gateway_id: str
    received_at: int
    idempotency_key: str | None = None
    retry_count: int | None = None
    user_agent: str | None = None
    traceparent: str | None = None
    tags: tuple[Tag, ...] = ()
    continues: Lookup | None = None

    @property
    def step_ids(self) -> list[str]:
        return [step_id(self.call_id, i) for i in range(self.request.n)]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The worker that sampled, its weight version at the start, and its tokenizer; None when not
    reported.
    """

    worker_id: str | None = None
    version_first: str | None = None
    tokenizer: str | None = None


def steps_of(
    call: Call,
    parsed: ParsedReply | None,
    captured: CapturedTokens,
    sampler: Sampler,
    status: StepStatus,
    finished_at: int,
    unread: Unread | None = None,
    first_token_ms: float | None = None,
    every: bool = False,
) -> list[Step]:
    """Build one step per choice; none for a reply without choices of which no tokens are known.

    A choice that the engine aborted becomes an error even if `status` is "ok". The first step has
    the usage of the call, so that a sum over steps counts it once.

    Args:
        parsed: None: the reply cannot be assembled; its steps have tokens and no message.
        finished_at: Microseconds.
        unread: Unreadable parts of the reply: noted in every step, stored in the first one.
        first_token_ms: Time to the first bytes of a stream; None: no stream, or none came.
        every: The client has the ids of all requested choices: one that did not come is an error.
    """
    missing: set[int] = set()
    if parsed is not None and not (parsed.choices or unread) and captured.sampled:
        unread = Unread()
        unread.add(b"", "the engine sampled, and its reply has no choice")
    if parsed is None or (unread and not parsed.choices):
        choices = tuple(Choice(i, b"null", None) for i in range(call.request.n))
        model, usage = "", captured.usage()
    else:
        choices, model = parsed.choices, parsed.model or ""
        usage = merged(captured.usage(), parsed.usage)
        if len(choices) != 1 or choices[0].index:
            choices = _numbered(choices, call.request.n)
    if every:
        missing = set(range(call.request.n)).difference(c.index for c in choices)
        choices += tuple(Choice(index, b"null", None) for index in sorted(missing))
    failed: StepStatus = "error" if status == "ok" else status
    steps = []
    for choice in choices:
        steps.append(
            _step(
                call, choice, captured, sampler, failed if choice.index in missing else status,
                model, finished_at, usage, first_token_ms,
            )
        )  # fmt: skip
        usage = None
    return _with_unread(steps, unread) if unread else steps


def steps_without_output(call: Call, sampler: Sampler, finished_at: int) -> list[Step]:
    """Build aborted steps without tokens, for a client that left before any output."""
    nothing = CapturedTokens("the client disconnected before the engine replied")
    return steps_of(call, None, nothing, sampler, "aborted", finished_at)


def _numbered(choices: tuple[Choice, ...], n: int) -> tuple[Choice, ...]:
    """Number choices by their place where some providers give all the index 0, or begin with 1."""
    indexes = {c.index for c in choices}
    if len(indexes) == len(choices) and max(indexes, default=0) < max(n, len(choices)):
        return choices
    return tuple(replace(choice, index=at) for at, choice in enumerate(choices))


def _with_unread(steps: list[Step], unread: Unread) -> list[Step]:
    made = []
    for at, step in enumerate(steps):
        absent = "; ".join(
            filter(None, (step.tokens_absent_reason, f"unread reply: {unread.reason}"))
        )
        kept = step.response_json if at else unread.beside(step.response_json)
        made.append(replace(step, tokens_absent_reason=absent, response_json=kept))
    return made


def _step(
    call: Call, choice: Choice, captured: CapturedTokens, sampler: Sampler, status: StepStatus,
    model: str, finished_at: int, usage: Usage | None, first_token_ms: float | None,
) -> Step:  # fmt: skip
    tokens = choice.tokens or captured.tokens(choice.index, call.request)
    # Some protocols report an aborted reply as finished; the middleware reports the abort.
    engine_finish = captured.finish(choice.index, call.request)
    finish_reason = engine_finish if engine_finish in ABORTED else choice.finish_reason
    return Step(
        step_id=step_id(call.call_id, choice.index),
        run_id=call.trajectory.run_id,
        trajectory_key=call.trajectory.trajectory_key,
        call_id=call.call_id,
        choice_index=choice.index,
        group_id=call.trajectory.group_id,
        channel=call.trajectory.channel,
        protocol=call.protocol,
        model=call.request.model or model,
        status="error" if status == "ok" and finish_reason in ABORTED else status,
        finish_reason=finish_reason,
        streamed=call.request.stream,
        request_json=call.request.body_of(choice.index) if call.request.parts else call.body,
        response_json=choice.message_json,
        prompt_token_ids=tokens.prompt_ids,
        response_token_ids=tokens.ids,
        response_logprobs=tokens.logprobs,
        tokens_absent_reason=tokens.absent,
        versions=tokens.spans,
        version_first=sampler.version_first,
        tags=call.tags,
        idempotency_key=call.idempotency_key,
        retry_count=call.retry_count,
        user_agent=call.user_agent,
        worker_id=sampler.worker_id,
        gateway_id=call.gateway_id,
        received_at=call.received_at,
        finished_at=finished_at,
        sampling=captured.sampling(choice.index, call.request)
        or requested_sampling(call.request.payload),
        usage=usage,
        tokenizer_fingerprint=sampler.tokenizer,
        traceparent=call.traceparent,
        time_to_first_token_ms=first_token_ms,
        continuation=_continuation(call, tokens, captured.rendered(choice.index, call.request)),
    )


def _continuation(call: Call, tokens: Tokens, rendered: str | None) -> Continuation | None:
    return None if call.continues is None else call.continues.outcome(tokens.prompt_ids, rendered)


def has_text(step: Step) -> bool:
    """Tell whether a step without tokens has any message content."""
    message = orjson.loads(step.response_json) or {}  # null: the reply has no such choice
    return step.response_token_ids is None and any(
        value for name, value in message.items() if name != "role"
    )
