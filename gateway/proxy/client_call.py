"""Admission of the calls that go to an engine: key, limits, body, in this order.

The only place that decides it for model calls and passthrough requests. Nothing of the body is read
before the key and the limits are checked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher, Receive
from clawstream.gateway.asgi.error_replies import ErrorFormat, outcome_of, reply_of
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.messages import HeldBody, Scope, Send, header_map, send_reply
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.auth.key_limits import KeyUse
from clawstream.gateway.capture.steps import Call
from clawstream.gateway.errors import ClientGone, GatewayError
from clawstream.gateway.proxy.failed_calls import Failure, failure_of
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services


class ClientCall(Call, ABC):
    """A call with its connection to the client. `serve` admits it and sends the reply.

    Attributes:
        errors: Error format of the protocol.
        query: Query of the request.
        send: Sends an ASGI message.
        key_use: The usage of its API key; None: the key has no limit, and nobody counts tokens.
        held: The request body, counted as in flight until the end.
        reply_room: Counts the bytes of the reply.
        client: Watches whether the client disconnects.
    """

    caller: Principal
    key_use: KeyUse | None = None
    held: HeldBody
    reply_room: ReplyReservation
    client: DisconnectWatcher

    def __init__(
        self, services: Services, protocol: str, errors: ErrorFormat, scope: Scope,
        receive: Receive, send: Send, target: CallTarget,
    ) -> None:  # fmt: skip
        clock = services.clock
        super().__init__(
            protocol, header_map(scope), clock.micros(), clock.monotonic(),
            target.trajectory, target.prompt,
        )  # fmt: skip
        self.services, self.errors, self.query = services, errors, scope["query_string"]
        self.send, self._receive, self._scope = send, receive, scope

    async def serve(self) -> str:
        """Serve the call and return its outcome, see Metrics.calls."""
        services = self.services
        in_flight = services.in_flight
        try:
            # A request without a valid key is no call in flight.
            caller = self.caller = services.admit(self._scope, self.headers, "agent")
            in_flight.begin()
        except GatewayError as error:
            return await self._refuse(error)
        self.reply_room = in_flight.replies.reserve()
        try:
            self.key_use = services.limits.begin(caller.key)
            self.held = HeldBody(self._receive, services.settings.gateway.max_body_bytes, in_flight)
            async with self.held as body:
                self.client = DisconnectWatcher(self._receive)
                try:
                    return await self.handle(body)
                finally:
                    self.client.stop()
        except ClientGone:
            return "refused"
        except GatewayError as error:
            return await self._refuse(error)
        finally:
            services.limits.end(self.key_use, self.tokens)
            self.reply_room.release()
            in_flight.end()

    @abstractmethod
    async def handle(self, body: bytes) -> str:
        """Serve the call after its body was read; return its outcome.

        Raises:
            GatewayError: Nothing was sent to the client yet.
            ClientGone: The client left before any engine got the request.
        """

    def failed(self, failure: Failure) -> None:
        """Record a failure, where failures of this call are recorded."""

    async def _refuse(self, error: GatewayError) -> str:
        await send_reply(self.send, reply_of(error, self.errors))
        self.failed(failure_of(error))
        return outcome_of(error)
