"""Spans of model calls, by OpenTelemetry's semantic conventions for generative AI. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from clawstream.ops.tracing.spans import (
    Attribute,
    Parent,
    RecordPlace,
    Span,
    SpanId,
    attributes,
    parent_of_call,
    present,
)
from clawstream.schemas.ids import call_span_id, span_id_of
from clawstream.schemas.records import FailedCall, Step

OPERATIONS = {"openai.completions": "text_completion", "claw-r1.generate": "text_completion"}
"""Protocol to `gen_ai.operation.name`, where it is not `chat`."""
MESSAGE_CHARS = 1000


def step_spans(step: Step, at: RecordPlace, own_traces: bool) -> Iterator[Span]:
    """Yield the span of a call, or of a further choice below it, and that of its record on Kafka.

    The first choice stands for the call: it has the usage.
    """
    context = parent_of_call(
        step.traceparent, step.run_id, step.trajectory_key, step.call_id, own_traces
    )
    if context is None:
        return
    call = _call(step, context)
    if step.choice_index:
        choice_id = span_id_of("choice", step.step_id)
        call = replace(
            call,
            id=SpanId(context.trace_id, choice_id),
            parent_id=call_span_id(step.call_id),
            is_remote=False,
            name="choice",
            kind="internal",
        )
    yield call
    yield Span(
        id=SpanId(
            context.trace_id,
            # A record that is sent again lies elsewhere, at another time.
            span_id_of("publish", step.step_id, at.topic_id, str(at.partition), str(at.offset)),
        ),
        parent_id=call.id.span_id,
        part="gateway",
        name=f"send {at.topic}",
        kind="producer",
        start_us=step.finished_at,
        end_us=max(step.finished_at, at.at_us),
        attributes={
            "messaging.system": "kafka",
            "messaging.operation.type": "send",
            "messaging.destination.name": at.topic,
            "messaging.destination.partition.id": str(at.partition),
            "messaging.kafka.offset": at.offset,
        },
    )


def _call(step: Step, context: Parent) -> Span:
    usage, sampling = step.usage, step.sampling
    waited_ms = step.time_to_first_token_ms
    found: dict[str, Attribute | None] = {
        **_request(step.protocol, step.model, step.streamed, step.user_agent),
        "gen_ai.conversation.id": step.trajectory_key,
        "gen_ai.response.finish_reasons": (step.finish_reason,) if step.finish_reason else None,
        "gen_ai.response.time_to_first_chunk": None if waited_ms is None else waited_ms / 1000,
        "error.type": None if step.status == "ok" else step.status,
    }
    if usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
        }
    if sampling is not None:
        found |= {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        }
    last = step.versions[-1].version if step.versions else step.version_first
    return Span(
        id=SpanId(context.trace_id, call_span_id(step.call_id)),
        parent_id=context.parent_id,
        is_remote=context.is_remote,
        part="gateway",
        name=_name(step.protocol, step.model),
        kind="server",
        start_us=step.received_at,
        end_us=max(step.received_at, step.finished_at),
        attributes=present(found)
        | attributes(
            run_id=step.run_id,
            trajectory_key=step.trajectory_key,
            step_id=step.step_id,
            group_id=step.group_id,
            channel=step.channel,
            version=last,
            worker_id=step.worker_id,
            gateway_id=step.gateway_id,
            tags=tuple(tag.name for tag in step.tags),
            tokens_absent_reason=step.tokens_absent_reason,
        ),
        error=None if step.status == "ok" else step.status,
    )


def failed_call_spans(call: FailedCall, own_traces: bool) -> Iterator[Span]:
    """Yield the span of a call that ended with an error."""
    context = parent_of_call(
        call.traceparent, call.run_id, call.trajectory_key, call.event_id, own_traces
    )
    if context is None:
        return
    found: dict[str, Attribute | None] = {
        **_request(call.protocol, call.model, call.streamed, call.user_agent),
        "gen_ai.conversation.id": call.trajectory_key,
        "http.response.status_code": call.status,
        "error.type": call.error_type or str(call.status),
    }
    yield Span(
        id=SpanId(context.trace_id, call_span_id(call.event_id)),
        parent_id=context.parent_id,
        is_remote=context.is_remote,
        part="gateway",
        name=_name(call.protocol, call.model),
        kind="server",
        start_us=call.received_at,
        end_us=call.received_at + max(0, round(call.duration_ms * 1000)),
        attributes=present(found)
        | attributes(
            run_id=call.run_id,
            trajectory_key=call.trajectory_key,
            group_id=call.group_id,
            channel=call.channel,
            gateway_id=call.gateway_id,
            failure_source=call.source,
            engine=call.engine,
        ),
        error=call.message[:MESSAGE_CHARS],
    )


def _request(
    protocol: str, model: str | None, streamed: bool, user_agent: str | None
) -> dict[str, Attribute | None]:
    return {
        "gen_ai.operation.name": OPERATIONS.get(protocol, "chat"),
        "gen_ai.provider.name": "clawstream",
        "gen_ai.request.model": model or None,
        "gen_ai.request.stream": streamed,
        "user_agent.original": user_agent,
        "clawstream.protocol": protocol,
    }


def _name(protocol: str, model: str | None) -> str:
    operation = OPERATIONS.get(protocol, "chat")
    return f"{operation} {model}" if model else operation
