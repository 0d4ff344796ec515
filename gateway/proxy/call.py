"""One accepted model call, from the request to the engine to the end of the client's reply.

1. Send the request to an engine. Read a plain reply completely (`PlainReply`); forward a stream
   event by event up to the first finish reason (`StreamedReply`).
2. Make the steps of all choices durable.
3. Then send the plain reply, or the rest of the stream. If the steps are not durable, send 503, or
   an error event instead of the rest.

When the client disconnects, the gateway stops the engine and records the forwarded part as
`aborted`. A call that a shutdown interrupts is recorded in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.messages import Headers, Send
from clawstream.gateway.auth.key_limits import Counted, tokens_of, tokens_of_usage
from clawstream.gateway.capture.engine_tokens import NO_TOKENS, CapturedTokens
from clawstream.gateway.capture.steps import Call, Sampler, has_text, steps_of, steps_without_output
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.engines.client import Response, UpstreamCall
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.errors import (
    ClientGone,
    GatewayError,
    NotRecorded,
    UpstreamFailed,
    UpstreamTimeout,
)
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.base import ParsedReply
from clawstream.gateway.protocols.reply_fields import EngineError
from clawstream.gateway.protocols.request_fields import with_fields
from clawstream.gateway.proxy.failed_calls import (
    Attempt,
    Failure,
    engine_failure,
    failure_of,
    reported_failure,
)
from clawstream.gateway.proxy.forwarding import (
    content_headers,
    credentials_of,
    engine_traceparent,
    forwarded,
    returned,
    with_query,
)
from clawstream.gateway.proxy.services import Services
from clawstream.schemas import engine_frames
from clawstream.schemas.records import Step, StepStatus

MAX_NAMED = 32
"""Maximum number of step ids in a reply header; clients limit header sizes."""
NOTHING = EngineError("the reply has no choice, no output and no error")


class ProxiedCall:
    """One accepted call. `run` serves it and returns its outcome, see Metrics.calls."""

    def __init__(
        self, services: Services, adapter: ProtocolAdapter, call: Call, attempt: Attempt,
        client: DisconnectWatcher, send: Send, held: ReplyReservation, query: bytes,
        counted: Counted,
    ) -> None:  # fmt: skip
        self.services, self.adapter, self.call, self.attempt = services, adapter, call, attempt
        self.client, self.held, self.captured = client, held, CapturedTokens()
        self._send, self._counted = send, counted
        self._path = with_query(adapter.path, query)
        self._engine: EngineSpec | None = None
        self._sampler = Sampler()
        self._reply: PlainReply | StreamedReply | None = None
        self._first_token_ms: float | None = None

    async def run(self) -> str:
        """Serve the call and return its outcome.

        Raises:
            GatewayError: Nothing was sent to the client yet.
            ClientGone: The client left before any engine got the request.
        """
        try:
            async with self.client:
                async with self._request() as response:
                    spec = response.spec
                    self._sampler = Sampler(
                        spec.worker_id,
                        response.header(engine_frames.VERSION_START),
                        response.header(engine_frames.TOKENIZER),
                    )
                    if response.status >= 400:
                        await self._forward_error(response)
                        return "upstream_error"
                    self.captured = CapturedTokens(NO_TOKENS[spec.kind])
                    streams = self.call.request.stream and await response.streams()
                    self._reply = reply = (StreamedReply if streams else PlainReply)(self, spec)
                    await reply.receive(response)
        except (ClientGone, asyncio.CancelledError) as error:
            if self._engine is None:
                raise
            await self._record_aborted()
            if isinstance(error, asyncio.CancelledError):
                raise
            return "aborted"
        return await reply.finish()

    def _request(self) -> UpstreamCall:
        call, headers = self.call, self.attempt.headers
        sent = forwarded(headers, True, self.services.passed)
        own_traces = self.services.settings.traces.gives_own_traces
        if (traceparent := engine_traceparent(call, own_traces)) is not None:
            sent["traceparent"] = traceparent
        gateway = self.services.settings.gateway
        family, prior = gateway.exact_continuation, None
        if family is not None and call.continues is not None:
            prior = call.continues.prior(family, gateway.max_prompt_tokens)
        if prior is not None:
            sent[engine_frames.CONTINUE] = "1"
        return self.services.upstream.call(
            "POST", self._path, lambda spec: self._engine_body(spec, prior), sent,
            key=call.trajectory.trajectory_key, run_id=call.trajectory.run_id,
            model=call.request.model, on_engine=self._on_engine,
            credentials=credentials_of(headers),
        )  # fmt: skip

    def _engine_body(self, spec: EngineSpec, prior: engine_frames.Prior | None) -> bytes:
        request = self.call.request
        if prior is not None and spec.kind == "captured":
            return with_fields(request, engine_frames.prior_fields(prior))
        return self.adapter.engine_body(request, spec.kind)

    def _on_engine(self, spec: EngineSpec | None) -> None:
        self._engine = spec
        self.attempt.engine = spec.name if spec else None
        self._sampler = Sampler(spec.worker_id if spec else None)

    async def _forward_error(self, response: Response) -> None:
        body = error_body = await response.read(self.held)
        if response.encoding is None:
            body = self.adapter.errors.engine_error(response.status, error_body)
        await self.start(
            response.status, content_headers(response, self.services.passed), len(body)
        )
        await self.send(body)
        self.services.failed.record(self.attempt, engine_failure(response.status, error_body))

    async def _record_aborted(self) -> None:
        steps = self._reply.steps_sent() if self._reply is not None else []
        if not steps:
            steps = steps_without_output(self.call, self._sampler, self.services.clock.micros())
        try:
            await self.record(steps)
        except NotRecorded:
            return  # already counted and logged, and the client has left

    # -- for the replies

    async def start(
        self, status: int, headers: Headers, length: int | None = None, steps: Sequence[str] = ()
    ) -> None:
        """Send the head of the reply.

        Args:
            headers: Headers of the engine and of the content. Headers of the gateway are added.
            length: Bytes of the body; None: a stream.
            steps: Ids of the recorded steps.
        """
        headers.append((b"x-clawstream-trajectory", self.call.trajectory.trajectory_key.encode()))
        if steps:
            headers.append((b"x-clawstream-step", ",".join(steps[:MAX_NAMED]).encode()))
        if len(steps) > MAX_NAMED:
            headers.append((b"x-clawstream-step-count", b"%d" % len(steps)))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, more: bool = False) -> None:
        """Send a part of the body; within `async with client`: the client may stop reading."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def began_streaming(self) -> None:
        """Measure the time to the first bytes of a stream."""
        waited_s = self.services.clock.monotonic() - self.attempt.began
        self._first_token_ms = waited_s * 1000
        self.services.metrics.first_token.observe(waited_s)

    def steps(
        self, parsed: ParsedReply | None, status: StepStatus, unread: Unread, every: bool = False
    ) -> list[Step]:
        """Build the steps of the reply, see `steps_of`."""
        now = self.services.clock.micros()
        return steps_of(
            self.call, parsed, self.captured, self._sampler, status, now, unread,
            self._first_token_ms, every,
        )  # fmt: skip

    async def record(self, steps: Sequence[Step]) -> None:
        """Make steps durable. Raises NotRecorded."""
        services = self.services
        self._counted.tokens = tokens_of(steps)
        delivery = await services.record_writer.record(steps)
        for step in steps:
            services.metrics.recorded[step.status].inc()
            if self.call.continues is not None:
                services.continuations.remember(self.call.continues, step)
            if step.continuation is not None:
                services.metrics.continuations.labels(step.continuation.reason or "kept").inc()
        if delivery == "spooled":
            services.metrics.steps_spooled.inc(len(steps))

    def count(self, parsed: ParsedReply | None) -> None:
        """Count the tokens of a reply of which no step is recorded."""
        self._counted.tokens = tokens_of_usage(parsed.usage if parsed is not None else None)

    def answered(self, steps: Sequence[Step]) -> str:
        """Count the steps of a complete reply and return its outcome."""
        self.services.metrics.steps_answered.inc(sum(s.status == "ok" for s in steps))
        return "answered"


class PlainReply:
    """A reply that is read completely, recorded, and then sent."""

    def __init__(self, call: ProxiedCall, spec: EngineSpec) -> None:
        self._call, self._kind = call, spec.kind
        self._body, self._status = b"", 200
        self._headers: Headers = []

    async def receive(self, response: Response) -> None:
        """Read the reply."""
        body = await response.read(self._call.held)
        if self._kind == "captured":
            own = response.header(engine_frames.OWN_BODY)
            body = self._call.captured.split_trailer(body, own)
        self._body, self._status = body, response.status
        self._headers = content_headers(response, self._call.services.passed, "application/json")

    def steps_sent(self) -> list[Step]:
        """Return no steps: nothing is sent before the reply is recorded."""
        return []

    async def finish(self) -> str:
        """Record the steps, then send the reply; return the outcome. Raises NotRecorded."""
        call, body = self._call, self._body
        parsed = call.adapter.parse_reply(call.call.request, self._kind, body)
        unread = Unread(len(body))
        if parsed.unread is not None:
            unread.add(body, parsed.unread)
        steps = [] if parsed.failure is not None else call.steps(parsed, "ok", unread)
        if steps:
            await call.record(steps)
        else:
            call.count(parsed)
        try:
            async with call.client:
                ids = [s.step_id for s in steps]
                await call.start(self._status, self._headers, len(parsed.body), ids)
                await call.send(parsed.body)
        except ClientGone:
            return "aborted"
        finally:
            if not steps:
                failure = reported_failure(parsed.failure or NOTHING, self._status)
                call.services.failed.record(call.attempt, failure)
        return call.answered(steps) if steps else "upstream_error"


class StreamedReply:
    """A stream, forwarded up to the first finish reason; the rest waits for the record."""

    def __init__(self, call: ProxiedCall, spec: EngineSpec) -> None:
        self._call = call
        accumulator = call.adapter.accumulator(call.call.request, spec.kind)
        self._stream = EventStream(accumulator, call.captured, spec.kind == "captured")
        self._status = 200
        self._headers: Headers = []
        self._began = False

    async def receive(self, response: Response) -> None:
        """Forward the events of the stream; `EventStream` holds the rest."""
        call, stream = self._call, self._stream
        self._status = response.status
        self._headers = [
            *returned(response.headers, call.services.passed),
            (b"content-type", response.headers.get(b"content-type", b"text/event-stream")),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # for nginx in front of the gateway
        ]
        try:
            async for piece in response.pieces():
                await call.held.extend(len(piece))
                if out := stream.feed(piece):
                    if not self._began:
                        call.began_streaming()
                        await self._begin(call.call.step_ids)
                    await call.send(out, more=True)
                if stream.ended:
                    await response.settle()
                    break
            stream.close()
        except (UpstreamFailed, UpstreamTimeout) as error:
            stream.fail(error)

    async def _begin(self, steps: Sequence[str]) -> None:
        self._began = True
        await self._call.start(self._status, self._headers, steps=steps)

    def steps_sent(self) -> list[Step]:
        """Return the steps of the forwarded part."""
        stream = self._stream
        return self._call.steps(stream.sent(), "aborted", stream.unread, self._began)

    async def finish(self) -> str:
        """Record the steps, then send the rest of the stream; return the outcome."""
        call, stream, failure, failed = self._call, self._stream, None, None
        parsed = stream.whole()
        status: StepStatus = "ok" if stream.failure is None else "error"
        # The header that the client has names a step of each choice.
        steps = call.steps(parsed, status, stream.unread, every=self._began)
        if stream.failure is not None and parsed is not None and not self._began:
            steps = [s for s in steps if s.response_token_ids or s.finish_reason or has_text(s)]
        try:
            if steps:
                await call.record(steps)
            else:
                call.count(parsed)
                failure = self._failure(stream.failure or NOTHING)
            last = stream.held()
            if stream.failure is not None or all(step.status == "error" for step in steps):
                failed = "error"
        except NotRecorded as error:
            last, failed, failure = stream.error(error), "not_recorded", failure_of(error)
            steps = []
        return await self._end(last, failure, steps) or failed or call.answered(steps)

    def _failure(self, error: EngineError | GatewayError) -> Failure:
        if isinstance(error, GatewayError):
            return failure_of(error)
        return reported_failure(error, self._status)

    async def _end(self, last: bytes, failure: Failure | None, steps: Sequence[Step]) -> str | None:
        """Send the last part; return "aborted" if the client has left."""
        call = self._call
        try:
            async with call.client:
                if not self._began:
                    await self._begin([step.step_id for step in steps])
                await call.send(last)
        except ClientGone:
            return "aborted"
        finally:
            if failure is not None:
                call.services.failed.record(call.attempt, failure)
        return None
