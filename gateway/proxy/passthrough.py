"""Forwards requests to an engine without recording them."""

from __future__ import annotations

from urllib.parse import quote

from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher, Receive
from clawstream.gateway.asgi.error_replies import ErrorFormat, Reply, reply_of
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.messages import Scope, Send, header_map, send_reply
from clawstream.gateway.auth.authenticator import Principal
from clawstream.gateway.auth.key_limits import tokens_of_reply
from clawstream.gateway.engines.registry import of_run
from clawstream.gateway.errors import BadRequest, ClientGone, GatewayError
from clawstream.gateway.protocols.request_fields import (
    model_of,
    object_of,
    repaired,
)
from clawstream.gateway.proxy.forwarding import (
    content_headers,
    credentials_of,
    forwarded,
    with_query,
)
from clawstream.gateway.proxy.model_list import PATH, model_list, model_reply
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services, held_body


class PassthroughEndpoint:
    """Endpoint that forwards one method and path. errors: Error format of the protocol."""

    def __init__(self, services: Services, method: str, path: str, errors: ErrorFormat) -> None:
        self._services, self.method, self._path, self._errors = services, method, path, errors

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one request."""
        in_flight, headers = self._services.in_flight, header_map(scope)
        try:
            caller = self._services.admit(scope, headers, "agent")
            in_flight.begin()
        except GatewayError as error:
            await send_reply(send, reply_of(error, self._errors))
            return
        held = in_flight.replies.reserve()
        try:
            try:
                reply = await self._handle(scope, receive, caller, headers, held, target)
            except ClientGone:
                return
            except GatewayError as error:
                reply = reply_of(error, self._errors)
            await send_reply(send, reply)
        finally:
            held.release()
            in_flight.end()

    async def _handle(
        self, scope: Scope, receive: Receive, caller: Principal, headers: dict[str, str],
        held: ReplyReservation, target: CallTarget,
    ) -> Reply:  # fmt: skip
        services = self._services
        path = self._path + quote(target.item, safe="/:@!$&'()*+,;=")
        path = with_query(path, scope["query_string"])
        with services.limits.call(caller.key) as counted:
            async with held_body(receive, services) as body:
                client = DisconnectWatcher(receive)
                try:
                    async with client:
                        reply = await self._forward(caller, headers, path, body, held, target)
                finally:
                    client.stop()
            if counted.counts_tokens and reply.status < 400:
                counted.tokens = tokens_of_reply(reply.body)
            return reply

    async def _models(
        self, run_id: str, headers: dict[str, str], path: str, name: str
    ) -> Reply | None:
        """Return the models of all engines; None: one engine's own reply is the answer."""
        services = self._services
        specs = of_run(services.upstream.ready, run_id)
        if len(specs) < 2 and not any(spec.models or spec.model_map for spec in specs):
            return None
        _, _, query = path.partition("?")
        models = await model_list(
            services.upstream, specs, f"{PATH}?{query}" if query else PATH,
            forwarded(headers, False, services.passed), credentials_of(headers),
        )  # fmt: skip
        return None if models is None else model_reply(models, name)

    async def _forward(
        self, caller: Principal, headers: dict[str, str], path: str, body: bytes,
        held: ReplyReservation, target: CallTarget,
    ) -> Reply:  # fmt: skip
        services = self._services
        ref = services.trajectories.resolve(caller, headers, target.trajectory, target.prompt, {})
        if self.method == "GET" and self._path.startswith(PATH):
            found = await self._models(ref.run_id, headers, path, target.item)
            if found is not None:
                return found
        model = model_of({"model": target.item}) if target.tail == "/models/" else None
        if self.method == "POST":
            try:
                payload = object_of(body)
            except BadRequest:
                body = repaired(body)
                payload = object_of(body)
            model = model_of(payload)
        async with services.upstream.call(
            self.method, path, body or None, forwarded(headers, bool(body), services.passed),
            key=ref.trajectory_key, run_id=ref.run_id, model=model,
            credentials=credentials_of(headers),
        ) as response:  # fmt: skip
            content = await response.read(held)
            if response.encoding is None and response.status >= 400:
                content = self._errors.engine_error(response.status, content)
            length = (b"content-length", b"%d" % len(content))
            return Reply(
                response.status, [*content_headers(response, services.passed), length], content
            )
