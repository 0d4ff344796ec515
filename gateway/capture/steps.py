"""Builds step records from a parsed reply. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import orjson

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.sampling import requested_sampling
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.continuation.memory import Lookup
from clawstream.gateway.protocols.base import Choice, ParsedReply, Request
from clawstream.gateway.protocols.usage import merged
from clawstream.schemas.ids import TRACEPARENT_CHARS, parse_traceparent, step_id
from clawstream.schemas.records import Step, StepStatus, Tag, Usage

ABORTED = ("abort", "error")
IDEMPOTENCY = (
    "x-clawstream-step",
    "idempotency-key",
    "x-idempotency-key",
    "x-stainless-idempotency-key",
)


class Call:
    """One call of a client. The value grows on its way, from the arrival to the end of the reply.

    Attributes:
        protocol: Name of the protocol, the value of `Step.protocol`.
        headers: Of the request, names in lower case.
        received_at: Time of arrival, microseconds.
        began_s: The same on the monotonic clock.
        path_trajectory, path_group: Trajectory and prompt uid in the path.
        caller: None until the API key is checked.
        call_id: None until the body is accepted. Then `request`, `body` (the client's bytes),
            `trajectory`, `gateway_id` and `tags` have values, too.
        model: Model that the request names.
        idempotency_key, retry_count, user_agent, traceparent: From the headers, if valid.
        continues: None: the run does not ask for exact continuation, or the protocol has no turns.
        engine: Name of the engine that last got the request; None: none that may have sampled.
        worker_id: The worker of that engine; None: the engine is named in the settings.
        version_first, tokenizer: Weight version of the engine when the reply began, and its
            tokenizer; None when not reported.
        captured: The tokens that the engine reported.
        first_token_ms: Time to the first bytes of a stream; None: no stream, or none came.
        tokens: Tokens of prompt and replies, for the limits of the key.
    """

    # Class attributes are defaults that cost a call nothing until they get a value.
    caller: Principal | None = None
    call_id: str | None = None
    request: Request
    body: bytes
    trajectory: TrajectoryRef
    gateway_id: str
    model: str | None = None
    idempotency_key: str | None = None
    retry_count: int | None = None
    traceparent: str | None = None
    tags: tuple[Tag, ...] = ()
    continues: Lookup | None = None
    engine: str | None = None
    worker_id: str | None = None
    version_first: str | None = None
    tokenizer: str | None = None
    captured: CapturedTokens
    first_token_ms: float | None = None
    tokens = 0

    def __init__(
        self,
        protocol: str,
        headers: Mapping[str, str],
        received_at: int,
        began_s: float = 0.0,
        path_trajectory: str | None = None,
        path_group: str | None = None,
    ) -> None:
        self.protocol, self.headers = protocol, headers
        self.received_at, self.began_s = received_at, began_s
        self.path_trajectory, self.path_group = path_trajectory, path_group
        self.user_agent = headers.get("user-agent")
        for name in IDEMPOTENCY:
            if name in headers:
                self.idempotency_key = headers[name]
                break
        if (retries := headers.get("x-stainless-retry-count")) is not None:
            self.retry_count = _retry_count(retries)
        if "traceparent" in headers:
            self.traceparent = traceparent_of(headers)

    @property
    def step_ids(self) -> list[str]:
        """The ids of the steps of all choices."""
        return [step_id(self.call_id or "", i) for i in range(self.request.n)]


def _retry_count(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def traceparent_of(headers: Mapping[str, str]) -> str | None:
    """Return the client's trace context if it is valid, without what a later version adds.

    headers: Names in lower case.
    """
    sent = headers.get("traceparent")
    return sent[:TRACEPARENT_CHARS] if sent and parse_traceparent(sent) is not None else None


def steps_of(
    call: Call,
    parsed: ParsedReply | None,
    status: StepStatus,
    finished_at: int,
    unread: Unread | None = None,
    every: bool = False,
) -> list[Step]:
    """Build one step per choice; none for a reply without choices of which no tokens are known.

    A choice that the engine aborted becomes an error even if `status` is "ok". The first step has
    the usage of the call, so that a sum over steps counts it once.

    Args:
        parsed: None: the reply cannot be assembled; its steps have tokens and no message.
        finished_at: Microseconds.
        unread: Unreadable parts of the reply: noted in every step, stored in the first one.
        every: The client has the ids of all requested choices: one that did not come is an error.
    """
    missing: set[int] = set()
    captured = call.captured
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
                call, choice, failed if choice.index in missing else status, model, finished_at,
                usage,
            )
        )  # fmt: skip
        usage = None
    return _with_unread(steps, unread) if unread else steps


def steps_without_output(call: Call, finished_at: int) -> list[Step]:
    """Build aborted steps without tokens, for a client that left before any output."""
    call.captured = CapturedTokens("the client disconnected before the engine replied")
    return steps_of(call, None, "aborted", finished_at)


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
    call: Call, choice: Choice, status: StepStatus, model: str, finished_at: int,
    usage: Usage | None,
) -> Step:  # fmt: skip
    captured, trajectory, call_id = call.captured, call.trajectory, call.call_id or ""
    tokens = choice.tokens or captured.tokens(choice.index, call.request)
    # Some protocols report an aborted reply as finished; the middleware reports the abort.
    engine_finish = captured.finish(choice.index, call.request)
    finish_reason = engine_finish if engine_finish in ABORTED else choice.finish_reason
    return Step(
        step_id=step_id(call_id, choice.index),
        run_id=trajectory.run_id,
        trajectory_key=trajectory.trajectory_key,
        call_id=call_id,
        choice_index=choice.index,
        group_id=trajectory.group_id,
        channel=trajectory.channel,
        protocol=call.protocol,
        model=call.model or model,
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
        version_first=call.version_first,
        tags=call.tags,
        idempotency_key=call.idempotency_key,
        retry_count=call.retry_count,
        user_agent=call.user_agent,
        worker_id=call.worker_id,
        gateway_id=call.gateway_id,
        received_at=call.received_at,
        finished_at=finished_at,
        sampling=captured.sampling(choice.index, call.request)
        or requested_sampling(call.request.payload),
        usage=usage,
        tokenizer_fingerprint=call.tokenizer,
        traceparent=call.traceparent,
        time_to_first_token_ms=call.first_token_ms,
        continuation=None
        if call.continues is None
        else call.continues.outcome(
            tokens.prompt_ids, captured.rendered(choice.index, call.request)
        ),
    )


def has_text(step: Step) -> bool:
    """Tell whether a step without tokens has any message content."""
    message = orjson.loads(step.response_json) or {}  # null: the reply has no such choice
    return step.response_token_ids is None and any(
        value for name, value in message.items() if name != "role"
    )
