"""Routes model calls and passthrough requests before the web framework.

The framework's routing would take a third of a call's time. The path of a call is the path of
its protocol, with or without /v1, optionally behind /<trajectory>/<prompt>. Other requests go to
the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.error_replies import Reply, reply_of
from clawstream.gateway.asgi.messages import App, Scope, Send, send_reply
from clawstream.gateway.asgi.request_encoding import RequestDecoder
from clawstream.gateway.errors import NotFound, NoWebSocket, WrongMethod
from clawstream.gateway.proxy.paths import (
    ITEMS,
    CallTarget,
    canonical,
    how_to_call,
    normalized,
    parse_target,
    proxy_prefix,
)


class Endpoint(Protocol):
    """Serves the requests of one method and path tail: checks key and limits, then the body."""

    async def serve(self, scope: Scope, receive: Receive, send: Send, target: CallTarget) -> None:
        """Serve one request."""
        ...


class ModelCalls:
    """ASGI middleware that serves model calls and forwards other requests to `app`.

    Args:
        routes: Endpoints by method and path tail.
        decoder: Decodes compressed bodies.
        base_path: Prefix of every path, see gateway.base_path.
    """

    def __init__(
        self,
        app: App,
        routes: Mapping[tuple[str, str], Endpoint],
        decoder: RequestDecoder,
        base_path: str = "",
    ) -> None:
        self._app, self._routes, self._base_path = app, routes, canonical(base_path)
        self._decoder = decoder
        self._tails: dict[str, list[str]] = {}
        for tail in sorted({tail for _, tail in routes}.difference(ITEMS), key=len, reverse=True):
            self._tails.setdefault(tail.rsplit("/", 1)[-1], []).append(tail)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server omits the body
            scope = {**scope, "method": "GET"}
        if encodings := [value for name, value in scope["headers"] if name == b"content-encoding"]:
            receive = self._decoder.decoded(receive, b", ".join(encodings).decode("latin-1"))
        path = scope["path"]
        if b"%" in scope["raw_path"]:
            path = canonical(scope["raw_path"].decode())
            scope = {**scope, "path": path}
        if self._base_path and f"{path}/".startswith(f"{self._base_path}/"):
            path = path[len(self._base_path) :] or "/"
            scope = {**scope, "path": path}
        target = parse_target(path, self._tails)
        if target is None and (tidy := normalized(path)) != path:
            path, scope, target = tidy, {**scope, "path": tidy}, parse_target(tidy, self._tails)
        if (prefix := proxy_prefix(path, target)) is not None:
            problem = f"{prefix!r} is a proxy prefix, not a trajectory"
            message = f"{scope['method']} {path}: {problem}. {how_to_call(self._base_path)}"
            await send_reply(send, reply_of(NotFound(message)))
            return
        if target is not None:
            endpoint = self._routes.get((scope["method"], target.tail))
            if endpoint is not None:
                await endpoint.serve(scope, receive, send, target)
                return
            if not target.item:
                await send_reply(send, _refusal(scope))
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> Reply:
    request = f"{scope['method']} {scope['path']}"
    if (b"upgrade", b"websocket") in ((name, value.lower()) for name, value in scope["headers"]):
        reply = reply_of(NoWebSocket(f"{request}: WebSockets are not supported, use HTTP"))
        reply.headers.append(
            (b"upgrade", b"HTTP/1.1")
        )  # status 426 requires it (RFC 9110, section 15.5.22)
        return reply
    return reply_of(WrongMethod(f"{request}: method not allowed"))
