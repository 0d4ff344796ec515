"""Endpoint for the model calls of one protocol.

Rejects invalid input and calls over a limit before any engine gets the request.
"""

from __future__ import annotations

from collections.abc import Mapping

from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher, Receive
from clawstream.gateway.asgi.error_replies import outcome_of, reply_of
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.messages import HeldBody, Scope, Send, header_map, send_reply
from clawstream.gateway.attribution.tags import tags_of
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.capture.steps import Call
from clawstream.gateway.errors import BadRequest, BodyTooLarge, ClientGone, GatewayError
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.request_fields import repaired, with_defaults
from clawstream.gateway.proxy.call import ProxiedCall
from clawstream.gateway.proxy.failed_calls import Attempt, failure_of
from clawstream.gateway.proxy.forwarding import credentials_of, traceparent_of
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services, held_body
from clawstream.gateway.proxy.token_limits import PromptLimit
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
        self._prompts = PromptLimit(services.settings.gateway, services.upstream)

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one call."""
        services, adapter = self._services, self._adapter
        attempt = services.failed.attempt(
            adapter.name, header_map(scope), target.trajectory, target.prompt
        )
        try:
            # The body of an unauthenticated request is not read, and it is no call in flight.
            caller = attempt.caller = services.admit(scope, attempt.headers, "agent")
            services.in_flight.begin()
        except GatewayError as error:
            services.metrics.ended["refused"].inc()
            await send_reply(send, reply_of(error, adapter.errors))
            services.failed.record(attempt, failure_of(error))
            return
        reply = services.in_flight.replies.reserve()
        try:
            ending = await self._serve(scope, receive, send, attempt, caller, reply)
        except ClientGone:
            ending = "refused"
        except GatewayError as error:
            ending = outcome_of(error)
            await send_reply(send, reply_of(error, adapter.errors))
            services.failed.record(attempt, failure_of(error))
        finally:
            reply.release()
            services.in_flight.end()
        services.metrics.ended[ending].inc()
        if ending == "answered":
            services.metrics.call.observe(services.clock.monotonic() - attempt.began)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, attempt: Attempt, caller: Principal,
        reply: ReplyReservation,
    ) -> str:  # fmt: skip
        services, headers = self._services, attempt.headers
        with services.limits.call(caller.key) as counted:
            held = held_body(receive, services)
            async with held as body:
                call = attempt.call = self._accept(caller, attempt, body)
                request = call.request
                if request.n > 1:
                    self._reserve_copies(call, held)
                client = DisconnectWatcher(receive)
                try:
                    if self._prompts.applies(request):
                        async with client:
                            await self._prompts.check(
                                request, call.protocol, call.trajectory, credentials_of(headers)
                            )
                    with services.delivery.reserve(
                        request.n * (2 * len(call.body) + STEP_OVERHEAD_BYTES)
                    ):
                        return await ProxiedCall(
                            services, self._adapter, call, attempt, client, send, reply,
                            scope["query_string"], counted,
                        ).run()  # fmt: skip
                finally:
                    client.stop()

    def _reserve_copies(self, call: Call, held: HeldBody) -> None:
        """Count the body once for each further choice, because every step contains it.

        Raises:
            BodyTooLarge, Overloaded: A limit is exceeded.
        """
        n, size = call.request.n, len(call.body)
        limit = self._services.settings.gateway.max_in_flight_bytes
        if n * size > limit:
            raise BodyTooLarge(
                f"n: {n} steps with a body of {size} bytes each exceed "
                f"gateway.max_in_flight_bytes={limit}",
                "n",
            )
        held.reserve((n - 1) * size)

    def _accept(self, caller: Principal, attempt: Attempt, body: bytes) -> Call:
        """Parse and attribute a request. Raises BadRequest or WrongKey."""
        services, adapter, headers = self._services, self._adapter, attempt.headers
        received_at = services.clock.micros()
        try:
            request = adapter.parse_request(body)
        except BadRequest:
            if (whole := repaired(body)) == body:
                raise
            body = whole  # the engine gets the recorded body
            request = adapter.parse_request(body)
        request = with_defaults(request, adapter.name, services.settings.gateway.default_max_tokens)
        asked = request.parts[0] if request.parts else request.payload
        trajectory = services.trajectories.resolve(
            caller, headers, attempt.key, attempt.group, asked
        )
        continues = None
        if services.settings.gateway.exact_continuation is not None and adapter.has_turns:
            continues = services.continuations.look_up(trajectory, request.payload)
        return Call(
            trajectory=trajectory,
            call_id=new_call_id(trajectory.trajectory_key),
            protocol=adapter.name,
            request=request,
            body=body,
            gateway_id=services.settings.gateway.gateway_id,
            received_at=received_at,
            idempotency_key=next((headers[name] for name in IDEMPOTENCY if name in headers), None),
            retry_count=_retry_count(headers),
            user_agent=headers.get("user-agent"),
            traceparent=traceparent_of(headers),
            tags=tags_of(headers, asked),
            continues=continues,
        )


def _retry_count(headers: Mapping[str, str]) -> int | None:
    text = headers.get("x-stainless-retry-count", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
