"""Serves one model call, from the client's request to its reply, for any protocol.

1. Reject invalid input and calls over a limit, before any engine gets the request.
2. Send the request to an engine. Read a plain reply completely; forward a stream event by event up
   to the first finish reason.
3. Make the steps of all choices durable.
4. Then send the plain reply, or the rest of the stream. If the steps are not durable, send 503, or
   an error event instead of the rest.

When the client disconnects, the gateway stops the engine and records the forwarded part as
`aborted`. A call that a shutdown interrupts is recorded in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.asgi.client_disconnect import DisconnectWatcher, Receive
from gateway.asgi.error_replies import outcome_of, reply_of
from gateway.asgi.in_flight_limits import InFlightLimits, ReplyReservation
from gateway.asgi.messages import Headers, Scope, Send, header_map, read_body, send_reply
from gateway.attribution.resolver import TrajectoryResolver
from gateway.attribution.tags import tags_of
from gateway.auth.authenticator import Authenticator, Principal
from gateway.auth.key_limits import Counted, KeyLimits, tokens_of
from gateway.capture.engine_tokens import NOT_REPORTED, CapturedTokens
from gateway.capture.steps import (
    Call,
    Engine,
    aborted_before_output_steps,
    has_text,
    steps_of,
    unreadable_steps,
    with_unread,
)
from gateway.capture.stream import EventStream
from gateway.capture.unread import Unread
from gateway.clock import Clock
from gateway.durability.delivery import DeliveryManager
from gateway.durability.record_writer import RecordWriter
from gateway.engines.client import Response, Upstream
from gateway.engines.registry import EngineSpec
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ClientGone,
    GatewayError,
    NotRecorded,
    Overloaded,
    UpstreamFailed,
    UpstreamTimeout,
)
from gateway.metrics import Metrics
from gateway.protocols.base import EngineKind, ParsedReply, ProtocolAdapter
from gateway.protocols.defaults import with_defaults
from gateway.protocols.request_fields import with_whole_characters
from gateway.proxy.failed_calls import Attempt, FailedCalls, Failure, engine_failure, failure_of
from gateway.proxy.forwarding import FORWARDED, credentials_of, returned, with_query
from gateway.proxy.token_limits import PromptLimit
from schemas import engine_frames
from schemas.ids import new_call_id
from schemas.records import Step, StepStatus
from schemas.settings import Settings

IDEMPOTENCY = (
    "x-clawstream-step",
    "idempotency-key",
    "x-idempotency-key",
    "x-stainless-idempotency-key",
)
MAX_NAMED = 32
"""Maximum number of step ids in a reply header; clients limit header sizes."""
NO_TOKENS: Mapping[EngineKind, str] = {
    "captured": NOT_REPORTED,
    "vllm": "vLLM without our middleware reports no tokens over this protocol",
    "text": "the provider reports no tokens",
}
STEP_OVERHEAD_BYTES = 64 * 1024
"""Estimated bytes of a step in the spool, without its request."""


@dataclass(frozen=True, slots=True)
class Services:
    """Dependencies of the routes."""

    settings: Settings
    authenticator: Authenticator
    trajectories: TrajectoryResolver
    delivery: DeliveryManager
    record_writer: RecordWriter
    upstream: Upstream
    clock: Clock
    metrics: Metrics
    in_flight: InFlightLimits
    failed: FailedCalls
    limits: KeyLimits


@asynccontextmanager
async def held_body(receive: Receive, services: Services) -> AsyncIterator[bytes]:
    """Read the request body and count its bytes as in flight within the block.

    Raises:
        GatewayError: See `read_body`.
    """
    body = await read_body(receive, services.settings.gateway.max_body_bytes, services.in_flight)
    try:
        yield body
    finally:
        services.in_flight.release(len(body))


def _number(text: str | None) -> int | None:
    return (
        int(text)
        if text is not None and text.isascii() and text.isdigit() and len(text) < 10
        else None
    )


def _is_stream(response: Response) -> bool:
    kind = response.header("content-type") or ""
    return kind[:17].lower() == "text/event-stream" and response.readable


def _content_headers(response: Response) -> Headers:
    """Return the content headers for the client."""
    headers = [
        (b"content-type", (response.header("content-type") or "application/json").encode("latin-1"))
    ]
    if response.encoding is not None and not _is_stream(response):
        headers.append((b"content-encoding", response.encoding.encode("latin-1")))
    return headers


class CallEndpoint:
    """Endpoint for the model calls of one protocol."""

    def __init__(self, services: Services, adapter: ProtocolAdapter) -> None:
        self._services, self._adapter = services, adapter
        self._prompts = PromptLimit(services.settings.gateway, services.upstream)

    async def serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        trajectory: str | None = None,
        prompt: str | None = None,
    ) -> None:
        """Serve one call.

        Args:
            trajectory: Trajectory id in the path, if any.
            prompt: Prompt uid in the path, if any.
        """
        in_flight = self._services.in_flight
        try:
            in_flight.begin()
        except Overloaded as error:
            self._services.metrics.ended["refused"].inc()
            await send_reply(send, reply_of(error, self._adapter.errors))
            return
        try:
            await self._serve(scope, receive, send, trajectory, prompt)
        finally:
            in_flight.end()

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, trajectory: str | None, prompt: str | None
    ) -> None:
        services, held = self._services, 0
        headers = header_map(scope)
        attempt = services.failed.attempt(self._adapter.name, headers, trajectory, prompt)
        reply = services.in_flight.replies.reserve()
        try:
            # Before the body: the body of an unauthenticated request is not read.
            caller = services.authenticator.authenticate(headers, "agent")
            attempt.caller = caller
            with services.limits.call(caller.key) as counted:
                body = await read_body(
                    receive, services.settings.gateway.max_body_bytes, services.in_flight
                )
                held = len(body)
                attempt.call = call = self._accept(caller, headers, body, trajectory, prompt)
                if call.request.n > 1:  # every choice has a step with the body
                    held += self._reserve_copies(call)
                client, query = DisconnectWatcher(receive), scope["query_string"]
                try:
                    if self._prompts.applies(call.request):
                        async with client:
                            await self._prompts.check(
                                call.request,
                                call.protocol,
                                call.trajectory,
                                credentials_of(headers),
                            )
                    with services.delivery.reserve(
                        call.request.n * (2 * len(call.body) + STEP_OVERHEAD_BYTES)
                    ):
                        made = ProxiedCall(
                            services,
                            self._adapter,
                            call,
                            attempt,
                            client,
                            send,
                            reply,
                            query,
                            counted,
                        )
                        ending = await made.run()
                finally:
                    client.stop()
        except ClientGone:
            ending = "refused"
        except GatewayError as error:
            ending = outcome_of(error)
            await send_reply(send, reply_of(error, self._adapter.errors))
            services.failed.record(attempt, failure_of(error))
        finally:
            services.in_flight.release(held)
            reply.release()
        services.metrics.ended[ending].inc()

    def _reserve_copies(self, call: Call) -> int:
        """Count the body once for each further choice; return the counted bytes.

        Raises:
            BodyTooLarge, Overloaded: A limit is exceeded.
        """
        size, limit = len(call.body), self._services.settings.gateway.max_in_flight_bytes
        if call.request.n * size > limit:
            raise BodyTooLarge(
                f"n: {call.request.n} steps with a body of {size} bytes each exceed "
                f"gateway.max_in_flight_bytes={limit}",
                "n",
            )
        self._services.in_flight.reserve((call.request.n - 1) * size)
        return (call.request.n - 1) * size

    def _accept(
        self,
        caller: Principal,
        headers: Mapping[str, str],
        body: bytes,
        trajectory: str | None,
        prompt: str | None,
    ) -> Call:
        """Parse and attribute a request. Raises BadRequest or WrongKey."""
        services, adapter = self._services, self._adapter
        received_at = services.clock.micros()
        try:
            request = adapter.parse_request(body)
        except BadRequest:
            if (whole := with_whole_characters(body)) == body:
                raise
            body = whole  # the engine gets the recorded body
            request = adapter.parse_request(body)
        request = with_defaults(request, adapter.name, services.settings.gateway.default_max_tokens)
        ref = services.trajectories.resolve(caller, headers, trajectory, prompt, request.payload)
        return Call(
            trajectory=ref,
            call_id=new_call_id(ref.trajectory_key),
            protocol=adapter.name,
            request=request,
            body=body,
            gateway_id=services.settings.gateway.gateway_id,
            received_at=received_at,
            idempotency_key=next((headers[name] for name in IDEMPOTENCY if name in headers), None),
            retry_count=_number(headers.get("x-stainless-retry-count")),
            user_agent=headers.get("user-agent"),
            tags=tags_of(headers, request.payload),
        )


class ProxiedCall:
    """One accepted call. `run` serves it and returns its outcome, see Metrics.calls."""

    def __init__(
        self,
        services: Services,
        adapter: ProtocolAdapter,
        call: Call,
        attempt: Attempt,
        client: DisconnectWatcher,
        send: Send,
        held: ReplyReservation,
        query: bytes,
        counted: Counted,
    ) -> None:
        self._services, self._adapter, self._call, self._attempt = services, adapter, call, attempt
        self._held, self._counted = held, counted
        self._client, self._send = client, send
        headers = attempt.headers
        self._credentials = credentials_of(headers)
        self._forwarded = {k: v for k, v in headers.items() if k in FORWARDED} | {
            "content-type": "application/json"
        }
        self._path = with_query(adapter.path, query)
        self._returned: list[tuple[bytes, bytes]] = []
        self._asked: EngineSpec | None = None
        self._engine = Engine()
        self._captured = CapturedTokens()
        self._stream: EventStream | None = None

    async def run(self) -> str:
        """Serve the call and return its outcome.

        Raises:
            GatewayError: Nothing was sent to the client yet.
            ClientGone: The client left before any engine got the request.
        """
        try:
            async with self._client:
                async with self._ask() as response:
                    spec, self._returned = response.spec, returned(response.headers)
                    self._engine = Engine(
                        spec.worker_id, response.header(engine_frames.VERSION_START)
                    )
                    if response.status >= 400:
                        await self._forward_error(response)
                        return "upstream_error"
                    self._captured = CapturedTokens(NO_TOKENS[spec.kind])
                    if self._call.request.stream and _is_stream(response):
                        await self._forward_stream(response)
                    else:
                        own = (
                            response.header(engine_frames.OWN_BODY)
                            if spec.kind == "captured"
                            else None
                        )
                        body = self._captured.split_trailer(await response.read(self._held), own)
                        content_headers = _content_headers(response)
        except (ClientGone, asyncio.CancelledError) as error:
            if self._asked is None:
                raise
            await self._record_aborted()
            if isinstance(error, asyncio.CancelledError):
                raise
            return "aborted"
        if self._stream is not None:
            return await self._finish_stream(self._stream)
        return await self._finish_plain(spec, body, content_headers)

    def _ask(self) -> Any:
        call = self._call
        return self._services.upstream.call(
            "POST", self._path, lambda spec: self._adapter.engine_body(call.request, spec.kind),
            self._forwarded,
            key=call.trajectory.trajectory_key, run_id=call.trajectory.run_id,
            model=call.request.model, on_asking=self._on_engine, credentials=self._credentials,
        )  # fmt: skip

    def _on_engine(self, spec: EngineSpec | None) -> None:
        self._asked = spec
        self._attempt.engine = spec.name if spec else None
        self._engine = Engine(worker_id=spec.worker_id if spec else None)

    # -- replies

    def _headers(
        self, content_headers: Headers, length: int | None, steps: Sequence[str]
    ) -> Headers:
        headers = [
            *self._returned,
            *content_headers,
            (b"x-clawstream-trajectory", self._call.trajectory.trajectory_key.encode()),
        ]
        if steps:
            headers.append((b"x-clawstream-step", ",".join(steps[:MAX_NAMED]).encode()))
        if len(steps) > MAX_NAMED:
            headers.append((b"x-clawstream-step-count", b"%d" % len(steps)))
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        return headers

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send_message(
            {"type": "http.response.start", "status": status, "headers": headers}
        )

    async def _send_message(self, message: MutableMapping[str, Any]) -> None:
        """Send to the client; within `async with self._client`, as the client may stop reading."""
        await self._send(message)

    async def _forward_error(self, response: Response) -> None:
        body = error_body = await response.read(self._held)
        headers = list(self._returned)
        if (kind := response.header("content-type")) is not None:
            headers.append((b"content-type", kind.encode("latin-1")))
        if response.encoding is None:
            body = self._adapter.errors.engine_error(response.status, error_body)
        else:
            headers.append((b"content-encoding", response.encoding.encode("latin-1")))
        headers.append((b"content-length", b"%d" % len(body)))
        headers.append((b"x-clawstream-trajectory", self._call.trajectory.trajectory_key.encode()))
        await self._start(response.status, headers)
        await self._send_message({"type": "http.response.body", "body": body})
        self._services.failed.record(self._attempt, engine_failure(response.status, error_body))

    async def _finish_plain(self, spec: EngineSpec, body: bytes, content_headers: Headers) -> str:
        parsed, unread = (
            self._adapter.parse_reply(self._call.request, spec.kind, body),
            Unread(len(body)),
        )
        if parsed.unread is not None:
            unread.add(body, parsed.unread)
        steps = [] if parsed.failure is not None else self._steps(parsed, "ok", unread)
        if steps:
            await self._record(steps)
        try:
            async with self._client:
                await self._start(
                    200,
                    self._headers(content_headers, len(parsed.body), [s.step_id for s in steps]),
                )
                await self._send_message({"type": "http.response.body", "body": parsed.body})
        except ClientGone:
            return "aborted"
        if parsed.failure is None:
            return self._answered(steps)
        self._services.failed.record(self._attempt, engine_failure(200, parsed.body))
        return "upstream_error"

    async def _forward_stream(self, response: Response) -> None:
        """Forward events up to the first finish reason; `EventStream` holds the rest."""
        accumulator = self._adapter.accumulator(self._call.request, response.spec.kind)
        self._stream = stream = EventStream(
            accumulator, self._captured, response.spec.kind == "captured"
        )
        content_headers = [*_content_headers(response), (b"cache-control", b"no-cache")]
        await self._start(200, self._headers(content_headers, None, self._call.step_ids))
        try:
            async for piece in response.pieces():
                await self._held.extend(len(piece))
                if out := stream.feed(piece):
                    await self._send_message(
                        {"type": "http.response.body", "body": out, "more_body": True}
                    )
                if stream.ended:
                    await response.settle()
                    break
            stream.close()
        except (UpstreamFailed, UpstreamTimeout) as error:
            stream.fail(error)

    async def _finish_stream(self, stream: EventStream) -> str:
        parsed = stream.whole()
        steps = self._steps(parsed, "ok" if stream.failure is None else "error", stream.unread)
        if stream.failure is not None and parsed is not None:
            steps = [s for s in steps if s.response_token_ids or s.finish_reason or has_text(s)]
        failure: Failure | None = None
        try:
            if steps:
                await self._record(steps)
            elif stream.failure is not None:
                failure = failure_of(UpstreamFailed(stream.failure))
            last, failed = stream.held(), "error" if stream.failure is not None else None
        except NotRecorded as error:
            last, failed, failure = stream.error(error), "not_recorded", failure_of(error)
        try:
            async with self._client:
                await self._send_message({"type": "http.response.body", "body": last})
        except ClientGone:
            return "aborted"
        finally:
            if failure is not None:
                self._services.failed.record(self._attempt, failure)
        return failed or self._answered(steps)

    def _steps(self, parsed: ParsedReply | None, status: StepStatus, unread: Unread) -> list[Step]:
        now = self._services.clock.micros()
        if parsed is None or (unread and not parsed.choices):
            steps = unreadable_steps(self._call, self._captured, self._engine, status, now)
        else:
            steps = steps_of(self._call, parsed, self._captured, self._engine, status, now)
        return with_unread(steps, unread)

    def _answered(self, steps: Sequence[Step]) -> str:
        self._services.metrics.steps_answered.inc(sum(s.status == "ok" for s in steps))
        return "answered"

    # -- records

    async def _record_aborted(self) -> None:
        stream = self._stream
        steps = self._steps(stream.sent(), "aborted", stream.unread) if stream is not None else []
        if not steps:
            steps = aborted_before_output_steps(
                self._call, self._engine, self._services.clock.micros()
            )
        try:
            await self._record(steps)
        except NotRecorded:
            return  # already counted and logged, and the client has left

    async def _record(self, steps: Sequence[Step]) -> None:
        services = self._services
        self._counted.tokens = tokens_of(steps)
        receipt = await services.record_writer.record(steps)
        for step in steps:
            services.metrics.recorded[step.status].inc()
        if receipt == "spooled":
            services.metrics.steps_spooled.inc(len(steps))
