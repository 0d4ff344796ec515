"""Forwards requests to an engine without recording them."""

from __future__ import annotations

from urllib.parse import quote

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.error_replies import ErrorFormat, Reply
from clawstream.gateway.asgi.messages import Scope, Send, send_reply
from clawstream.gateway.auth.key_limits import tokens_of_reply
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.registry import of_run
from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.request_fields import model_of, object_of, repaired
from clawstream.gateway.proxy.client_call import ClientCall
from clawstream.gateway.proxy.forwarding import content_headers, forwarded, with_query
from clawstream.gateway.proxy.model_list import PATH, model_list, model_reply
from clawstream.gateway.proxy.paths import CallTarget
from clawstream.gateway.proxy.services import Services


class PassthroughEndpoint:
    """Endpoint that forwards one method and path. errors: Error format of the protocol."""

    def __init__(self, services: Services, method: str, path: str, errors: ErrorFormat) -> None:
        self.services, self.method, self.path, self.errors = services, method, path, errors

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one request."""
        await PassthroughCall(self, scope, receive, send, target).serve()


class PassthroughCall(ClientCall):
    """One forwarded request. It makes no step, and its failures are not recorded."""

    def __init__(
        self, endpoint: PassthroughEndpoint, scope: Scope, receive: Receive, send: Send,
        target: CallTarget,
    ) -> None:  # fmt: skip
        services, errors = endpoint.services, endpoint.errors
        super().__init__(services, "passthrough", errors, scope, receive, send, target)
        self._endpoint, self._target = endpoint, target
        path = endpoint.path + quote(target.item, safe="/:@!$&'()*+,;=")
        self._path = with_query(path, self.query)

    async def handle(self, body: bytes) -> str:
        """Forward the request and send the reply of the engine."""
        async with self.client:
            reply = await self._reply(body)
        if self.key_use is not None and reply.status < 400:
            self.tokens = tokens_of_reply(reply.body)
        await send_reply(self.send, reply)
        return "answered"

    async def _models(self, run_id: str) -> Reply | None:
        """Return the models of all engines; None: one engine's own reply is the answer."""
        engines, passed = self.services.engines, self.services.passed
        specs = of_run(engines.ready, run_id)
        if len(specs) < 2 and not any(spec.models or spec.model_map for spec in specs):
            return None
        _, _, query = self._path.partition("?")
        path = f"{PATH}?{query}" if query else PATH
        headers = forwarded(self.headers, False, passed)
        models = await model_list(engines, specs, path, headers, self.headers)
        return None if models is None else model_reply(models, self._target.item)

    async def _reply(self, body: bytes) -> Reply:
        services, headers, target, endpoint = (
            self.services, self.headers, self._target, self._endpoint,
        )  # fmt: skip
        trajectory = services.trajectories.resolve(
            self.caller, headers, target.trajectory, target.prompt, {}
        )
        if endpoint.method == "GET" and endpoint.path.startswith(PATH):
            models = await self._models(trajectory.run_id)
            if models is not None:
                return models
        model = model_of({"model": target.item}) if target.tail == "/models/" else None
        if endpoint.method == "POST":
            try:
                payload = object_of(body)
            except BadRequest:
                body = repaired(body)
                payload = object_of(body)
            model = model_of(payload)
        async with EngineCall(
            services.engines, endpoint.method, self._path, body or None,
            forwarded(headers, bool(body), services.passed),
            key=trajectory.trajectory_key, run_id=trajectory.run_id, model=model,
            credentials=headers,
        ) as reply:  # fmt: skip
            content = await reply.read(self.reply_room)
            if reply.encoding is None and reply.status >= 400:
                content = self.errors.engine_error(reply.status, content)
            length = (b"content-length", b"%d" % len(content))
            return Reply(reply.status, [*content_headers(reply, services.passed), length], content)
