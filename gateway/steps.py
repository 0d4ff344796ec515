"""From what an engine answered to step records. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.protocol import Answer, Choice, Request
from gateway.sessions import Origin
from schemas.events import Step, StepStatus, VersionSpan
from schemas.ids import step_id
from schemas.tokens import pack_ids, pack_logprobs


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

    @property
    def step_ids(self) -> list[str]:
        return [step_id(self.call_id, i) for i in range(self.request.n)]


@dataclass(frozen=True, slots=True)
class Engine:
    """Who sampled, and what it said of its weights. version_last None: it did not say."""

    worker_id: str | None = None
    version_first: str | None = None
    version_last: str | None = None


def steps_of(call: Call, answer: Answer, engine: Engine, status: StepStatus, finished_at: int) -> list[Step]:
    """One step per choice. finished_at: microseconds. A choice that the engine itself cut short is an error whatever `status` says."""
    prompt, prompt_absent = _packed_prompt(answer.prompt_ids)
    return [
        _step(
            call,
            choice,
            engine,
            "error" if status == "ok" and choice.finish_reason == "abort" else status,
            answer.model or "",
            (prompt, prompt_absent),
            finished_at,
        )
        for choice in answer.choices
    ]


def unseen_steps(call: Call, engine: Engine, finished_at: int) -> list[Step]:
    """The steps of a call whose client left before it had got anything: aborted, without tokens."""
    nothing = tuple(Choice(i, b"null", None, None, None) for i in range(call.request.n))
    absent = (None, "the client left before the engine had answered")
    return [_step(call, choice, engine, "aborted", "", absent, finished_at) for choice in nothing]


def _step(
    call: Call,
    choice: Choice,
    engine: Engine,
    status: StepStatus,
    answered_model: str,
    prompt: tuple[bytes | None, str | None],
    finished_at: int,
) -> Step:
    ids, logprobs, absent = _packed_response(choice)
    reason = prompt[1] or absent
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
        status=status,
        finish_reason=choice.finish_reason,
        streamed=call.request.stream,
        request_json=call.body,
        response_json=choice.message_json,
        prompt_token_ids=prompt[0],
        response_token_ids=ids,
        response_logprobs=logprobs,
        tokens_absent_reason=reason,
        versions=_versions(choice, len(ids) // 4) if ids is not None else (),
        version_first=engine.version_first,
        version_last=engine.version_last,
        idempotency_key=call.idempotency_key,
        retry_count=call.retry_count,
        user_agent=call.user_agent,
        worker_id=engine.worker_id,
        gateway_id=call.gateway_id,
        received_at=call.received_at,
        finished_at=finished_at,
    )


def _packed_prompt(ids: Sequence[int] | None) -> tuple[bytes | None, str | None]:
    if ids is None:
        return None, "the engine gave no prompt token ids"
    try:
        return pack_ids(ids), None
    except (struct.error, TypeError) as error:
        return None, f"the engine's prompt token ids are not 32-bit integers: {error}"


def _packed_response(choice: Choice) -> tuple[bytes | None, bytes | None, str | None]:
    """Token ids, log-probabilities, and why one of them is not there."""
    if choice.token_ids is None:
        return None, None, "the engine gave no response token ids"
    try:
        ids = pack_ids(choice.token_ids)
        if choice.logprobs is None:
            return ids, None, "the engine gave no log-probabilities"
        if len(choice.logprobs) != len(choice.token_ids):
            return ids, None, f"{len(choice.logprobs)} log-probabilities for {len(choice.token_ids)} token ids"
        return ids, pack_logprobs(choice.logprobs), None
    except (struct.error, TypeError, OverflowError) as error:
        return None, None, f"the engine's token ids or log-probabilities are not numbers: {error}"


def _versions(choice: Choice, tokens: int) -> tuple[VersionSpan, ...]:
    """The spans, if they cover all tokens without a hole; none otherwise: a version is certain or it is not said."""
    if not isinstance(choice.spans, list):
        return ()
    spans, at = [], 0
    for span in choice.spans:
        match span:
            case {"version": str(version), "start": int(start), "end": int(end)} if start == at and end >= start:
                spans.append(VersionSpan(version=version, start=start, end=end))
                at = end
            case _:
                return ()
    return tuple(spans) if at == tokens else ()
