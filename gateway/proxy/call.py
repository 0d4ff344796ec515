"""One accepted model call, from the request to the engine to the end of the client's reply.

1. Send the request to an engine. Read a plain reply completely; forward a stream event by event up
   to the first finish reason (`StreamedReply`).
2. Make the steps of all choices durable.
3. Then send the plain reply, or the rest of the stream. If the steps are not durable, send 503, or
   an error event instead of the rest.

When the client disconnects, the gateway stops the engine and records the forwarded part as
`aborted`. A call that a shutdown interrupts is recorded in the same way.
"""

from __future__ import annotations

import asyncio

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.messages import Headers, Scope, Send
from clawstream.gateway.attribution.tags import tags_of
from clawstream.gateway.capture.engine_tokens import NO_TOKENS, CapturedTokens
from clawstream.gateway.capture.steps import steps_without_output
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import BadRequest, BodyTooLarge, ClientGone, NotRecorded
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.base import EngineKind
from clawstream.gateway.protocols.request_fields import repaired, with_defaults, with_fields
from clawstream.gateway.proxy.failed_calls import engine_failure, reported_failure
from clawstream.gateway.proxy.forwarding import (
    content_headers,
    engine_traceparent,
    forwarded,
    with_query,
)
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.recorded_call import NOTHING, RecordedCall
from clawstream.gateway.proxy.services import Services
from clawstream.gateway.proxy.streamed_reply import StreamedReply
from clawstream.gateway.proxy.token_limits import PromptLimit
from clawstream.schemas import engine_frames
from clawstream.schemas.ids import new_call_id

IDEMPOTENCY = (
    "x-clawstream-step",
    "idempotency-key",
    "x-idempotency-key",
    "x-stainless-idempotency-key",
)
STEP_OVERHEAD_BYTES = 64 * 1024
"""Estimated bytes of a step in the spool, without its request."""


class CallEndpoint:
    """Endpoint for the model calls of one protocol."""

    def __init__(self, services: Services, adapter: ProtocolAdapter) -> None:
        self._services, self._adapter = services, adapter
        self._prompts = PromptLimit(services.settings.gateway, services.engines)

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one call."""
        services = self._services
        call = ModelCall(services, self._adapter, self._prompts, scope, receive, send, target)
        ending = await call.serve()
        services.metrics.ended[ending].inc()
        if ending == "answered":
            services.metrics.call.observe(services.clock.monotonic() - call.began_s)


class ModelCall(RecordedCall):
    """One model call: its steps are durable before the client has the whole reply."""

    def __init__(
        self, services: Services, adapter: ProtocolAdapter, prompts: PromptLimit, scope: Scope,
        receive: Receive, send: Send, target: CallTarget,
    ) -> None:  # fmt: skip
        super().__init__(services, adapter, scope, receive, send, target)
        self._prompts = prompts

    async def handle(self, body: bytes) -> str:
        """Accept the body, ask an engine, record the steps, and send the reply."""
        self._accept(body)
        request, services = self.request, self.services
        if request.n > 1:
            self._reserve_copies()
        if self._prompts.applies(request):
            async with self.client:
                await self._prompts.check(request, self.protocol, self.trajectory, self.headers)
        size = request.n * (2 * len(self.body) + STEP_OVERHEAD_BYTES)
        with services.delivery.reserve(size):
            return await self._ask_engine()

    # -- the request

    def _accept(self, body: bytes) -> None:
        """Parse and attribute the request. Raises BadRequest or WrongKey."""
        services, adapter, headers = self.services, self.adapter, self.headers
        gateway = services.settings.gateway
        try:
            request = adapter.parse_request(body)
        except BadRequest:
            if (whole := repaired(body)) == body:
                raise
            body = whole  # the engine gets the recorded body
            request = adapter.parse_request(body)
        self.request = request = with_defaults(request, adapter.name, gateway.default_max_tokens)
        self.body, self.model, self.gateway_id = body, request.model, gateway.gateway_id
        asked = request.parts[0] if request.parts else request.payload
        self.trajectory = trajectory = services.trajectories.resolve(
            self.caller, headers, self.path_trajectory, self.path_group, asked
        )
        if gateway.exact_continuation is not None and adapter.has_turns:
            self.continues = services.continuations.look_up(trajectory, request.payload)
        self.tags = tags_of(headers, asked)
        self.call_id = new_call_id(trajectory.trajectory_key)

    def _reserve_copies(self) -> None:
        """Count the body once for each further choice, because every step contains it.

        Raises:
            BodyTooLarge, Overloaded: A limit is exceeded.
        """
        n, size = self.request.n, len(self.body)
        limit = self.services.settings.gateway.max_in_flight_bytes
        if n * size > limit:
            raise BodyTooLarge(
                f"n: {n} steps with a body of {size} bytes each exceed "
                f"gateway.max_in_flight_bytes={limit}",
                "n",
            )
        self.held.reserve((n - 1) * size)

    def _engine_call(self) -> EngineCall:
        services, headers, trajectory = self.services, self.headers, self.trajectory
        sent = forwarded(headers, True, services.passed)
        if self.traceparent is not None or services.gives_own_traces:
            sent["traceparent"] = engine_traceparent(self)
        gateway = services.settings.gateway
        family, prior = gateway.exact_continuation, None
        if family is not None and self.continues is not None:
            prior = self.continues.prior(family, gateway.max_prompt_tokens)
        if prior is not None:
            sent[engine_frames.CONTINUE] = "1"
        path = with_query(self.adapter.path, self.query) if self.query else self.adapter.path
        return EngineCall(
            services.engines, "POST", path,
            lambda spec: self._engine_body(spec, prior), sent,
            key=trajectory.trajectory_key, run_id=trajectory.run_id, model=self.model,
            on_engine=self._on_engine, credentials=headers,
        )  # fmt: skip

    def _engine_body(self, spec: EngineSpec, prior: engine_frames.Prior | None) -> bytes:
        if prior is not None and spec.kind == "captured":
            return with_fields(self.request, engine_frames.prior_fields(prior))
        return self.adapter.engine_body(self.request, spec.kind)

    def _on_engine(self, spec: EngineSpec | None) -> None:
        self.engine = spec.name if spec else None
        self.worker_id = spec.worker_id if spec else None

    # -- the reply

    async def _ask_engine(self) -> str:
        streamed: StreamedReply | None = None
        try:
            async with self.client:
                async with self._engine_call() as reply:
                    kind, status = reply.spec.kind, reply.status
                    if kind != "text":
                        self.version_first = reply.header(engine_frames.VERSION_START)
                        self.tokenizer = reply.header(engine_frames.TOKENIZER)
                    if status >= 400:
                        await self._forward_error(reply)
                        return "upstream_error"
                    self.captured = CapturedTokens(NO_TOKENS[kind])
                    if self.request.stream and await reply.streams():
                        streamed = StreamedReply(self, kind)
                        await streamed.receive(reply)
                    else:
                        body = await reply.read(self.reply_room)
                        if kind == "captured":
                            own = reply.header(engine_frames.OWN_BODY)
                            body = self.captured.split_trailer(body, own)
                        headers = content_headers(reply, self.services.passed, b"application/json")
        except (ClientGone, asyncio.CancelledError) as error:
            if self.engine is None:
                raise
            await self._record_aborted(streamed)
            if isinstance(error, asyncio.CancelledError):
                raise
            return "aborted"
        if streamed is not None:
            return await streamed.finish()
        return await self._answer(kind, status, headers, body)

    async def _forward_error(self, reply: EngineCall) -> None:
        body = error_body = await reply.read(self.reply_room)
        if reply.encoding is None:
            body = self.errors.engine_error(reply.status, error_body)
        await self.start(reply.status, content_headers(reply, self.services.passed), len(body))
        await self.send_body(body)
        self.failed(engine_failure(reply.status, error_body))

    async def _record_aborted(self, streamed: StreamedReply | None) -> None:
        # Of a plain reply nothing is sent before it is recorded.
        steps = streamed.steps_sent() if streamed is not None else []
        if not steps:
            steps = steps_without_output(self, self.services.clock.micros())
        try:
            await self.record(steps)
        except NotRecorded:
            return  # already counted and logged, and the client has left

    async def _answer(self, kind: EngineKind, status: int, headers: Headers, body: bytes) -> str:
        """Record the steps of a plain reply, then send it. Raises NotRecorded."""
        parsed = self.adapter.parse_reply(self.request, kind, body)
        unread = None
        if parsed.unread is not None:
            unread = Unread(len(body))
            unread.add(body, parsed.unread)
        steps = [] if parsed.failure is not None else self.steps(parsed, "ok", unread)
        if steps:
            await self.record(steps)
        else:
            self.count(parsed)
        try:
            async with self.client:
                await self.start(status, headers, len(parsed.body), [s.step_id for s in steps])
                await self.send_body(parsed.body)
        except ClientGone:
            return "aborted"
        finally:
            if not steps:
                self.failed(reported_failure(parsed.failure or NOTHING, status))
        return self.answered(steps) if steps else "upstream_error"
