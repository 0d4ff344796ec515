"""From what an engine answered to step records. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson

from gateway.attribution.sessions import Origin
from gateway.capture.engine_tokens import CapturedTokens
from gateway.capture.sampling import asked_for
from gateway.capture.unread import Unread
from gateway.protocols.base import Choice, ParsedReply, Request
from gateway.protocols.usage import merged
from schemas.ids import step_id
from schemas.records import Step, StepStatus, Tag, Usage

BROKEN_OFF = ("abort", "error")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a client. received_at: microseconds. body: the client's own bytes."""

    origin: Origin
    call_id: str
    protocol: str
    request: Request
    body: bytes
    gateway_id: str
    received_at: int
    idempotency_key: str | None = None
    retry_count: int | None = None
    user_agent: str | None = None
    tags: tuple[Tag, ...] = ()

    @property
    def step_ids(self) -> list[str]:
        return [step_id(self.call_id, i) for i in range(self.request.n)]


@dataclass(frozen=True, slots=True)
class Engine:
    """Who sampled, and what it said of its weights. version_last None: it did not say."""

    worker_id: str | None = None
    version_first: str | None = None
    version_last: str | None = None


def steps_of(
    call: Call,
    parsed: ParsedReply,
    captured: CapturedTokens,
    engine: Engine,
    status: StepStatus,
    finished_at: int,
) -> list[Step]:
    """One step per choice. finished_at: microseconds. A choice that the engine itself cut short is an error whatever `status` says."""
    choices = parsed.choices
    if len(choices) > 1 and len({c.index for c in choices}) < len(choices):
        choices = tuple(
            replace(choice, index=at) for at, choice in enumerate(choices)
        )  # some providers number all of them 0
    steps = [
        _step(call, choice, captured, engine, status, parsed.model or "", finished_at)
        for choice in choices
    ]
    return _with_usage(steps, merged(captured.usage(), parsed.usage))


def unreadable_steps(
    call: Call, captured: CapturedTokens, engine: Engine, status: StepStatus, finished_at: int
) -> list[Step]:
    """The steps of a reply that cannot be put together: their tokens, as far as they are known, and no message."""
    choices = tuple(Choice(i, b"null", None) for i in range(call.request.n))
    return _with_usage(
        [_step(call, choice, captured, engine, status, "", finished_at) for choice in choices],
        captured.usage(),
    )


def with_unread(steps: list[Step], unread: Unread) -> list[Step]:
    """The steps of a reply of which something could not be read: all say so, and the first one keeps it."""
    if not unread:
        return steps
    made = []
    for at, step in enumerate(steps):
        absent = "; ".join(
            filter(None, (step.tokens_absent_reason, f"unread reply: {unread.reason}"))
        )
        kept = step.response_json if at else unread.beside(step.response_json)
        made.append(replace(step, tokens_absent_reason=absent, response_json=kept))
    return made


def aborted_before_output_steps(call: Call, engine: Engine, finished_at: int) -> list[Step]:
    """The steps of a call whose client left before it had got anything: aborted, without tokens."""
    nothing = CapturedTokens("the client left before the engine had answered")
    return unreadable_steps(call, nothing, engine, "aborted", finished_at)


def _with_usage(steps: list[Step], usage: Usage | None) -> list[Step]:
    """The usage of a call stands on its first step, so that a sum over steps counts it once."""
    if usage is not None and steps:
        steps[0] = replace(steps[0], usage=usage)
    return steps


def _step(
    call: Call,
    choice: Choice,
    captured: CapturedTokens,
    engine: Engine,
    status: StepStatus,
    answered_model: str,
    finished_at: int,
) -> Step:
    tokens = choice.tokens or captured.tokens(choice.index, call.request)
    # Some protocols tell a reply that the engine broke off as if it had ended well.
    told = captured.finish(choice.index, call.request)
    finish_reason = told if told in BROKEN_OFF else choice.finish_reason
    return Step(
        step_id=step_id(call.call_id, choice.index),
        run_id=call.origin.run_id,
        trajectory_key=call.origin.trajectory_key,
        call_id=call.call_id,
        choice_index=choice.index,
        group_id=call.origin.group_id,
        channel=call.origin.channel,
        protocol=call.protocol,
        model=call.request.model or answered_model,
        status="error" if status == "ok" and finish_reason in BROKEN_OFF else status,
        finish_reason=finish_reason,
        streamed=call.request.stream,
        request_json=call.body,
        response_json=choice.message_json,
        prompt_token_ids=tokens.prompt_ids,
        response_token_ids=tokens.ids,
        response_logprobs=tokens.logprobs,
        tokens_absent_reason=tokens.absent,
        versions=tokens.spans,
        version_first=engine.version_first,
        version_last=engine.version_last,
        tags=call.tags,
        idempotency_key=call.idempotency_key,
        retry_count=call.retry_count,
        user_agent=call.user_agent,
        worker_id=engine.worker_id,
        gateway_id=call.gateway_id,
        received_at=call.received_at,
        finished_at=finished_at,
        sampling=captured.sampling(choice.index, call.request) or asked_for(call.request.payload),
    )


def had_text(step: Step) -> bool:
    """Whether the client got anything of a choice whose tokens are not known."""
    said = orjson.loads(step.response_json)
    return step.response_token_ids is None and any(
        value for name, value in said.items() if name != "role"
    )
