"""Model calls, and what passes through to an engine: ASGI, before the web framework, for it costs a call a third of its time.

A call's path is a protocol's own, at the root or under /v1, alone or behind /<trajectory>/<prompt>. What is not ours goes on to the app.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.asgi.client_disconnect import Receive
from gateway.asgi.error_replies import Reply, reply_of
from gateway.asgi.messages import App, Scope, Send, send_reply
from gateway.asgi.request_encoding import decoded
from gateway.errors import NotFound, NoWebSocket, WrongMethod
from gateway.proxy.call import CallEndpoint
from gateway.proxy.passthrough import PassthroughEndpoint
from gateway.proxy.paths import ITEMS, how_to_call, normalized, parse_target, proxy_prefix


class ModelCalls:
    """ASGI middleware: serves the calls, passes everything else on.

    calls: by tail; passthrough: by method and tail. base_path: what stands before every path, see gateway.base_path.
    """

    def __init__(
        self,
        app: App,
        calls: Mapping[str, CallEndpoint],
        passthrough: Mapping[tuple[str, str], PassthroughEndpoint],
        base_path: str = "",
    ) -> None:
        self._app, self._calls, self._passthrough, self._base_path = (
            app,
            calls,
            passthrough,
            base_path,
        )
        self._tails: dict[str, list[str]] = {}
        for tail in sorted(
            {*calls, *(t for _, t in passthrough if t not in ITEMS)}, key=len, reverse=True
        ):
            self._tails.setdefault(tail.rsplit("/", 1)[-1], []).append(tail)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        if encodings := [value for name, value in scope["headers"] if name == b"content-encoding"]:
            receive = decoded(receive, b", ".join(encodings).decode("latin-1"))
        path = scope["path"]
        if self._base_path and f"{path}/".startswith(f"{self._base_path}/"):
            path = path[len(self._base_path) :] or "/"
            scope = {**scope, "path": path}
        target = parse_target(path, self._tails)
        if target is None and (tidy := normalized(path)) != path:
            path, scope, target = tidy, {**scope, "path": tidy}, parse_target(tidy, self._tails)
        if (prefix := proxy_prefix(path, target)) is not None:
            asked = f"{scope['method']} {path}: {prefix!r} is the prefix of a proxy and names no trajectory"
            await send_reply(send, reply_of(NotFound(f"{asked}. {how_to_call(self._base_path)}")))
            return
        if target is not None:
            if scope["method"] == "POST" and (call := self._calls.get(target.tail)) is not None:
                await call.serve(scope, receive, send, target.trajectory, target.prompt)
                return
            passthrough = self._passthrough.get((scope["method"], target.tail))
            if passthrough is not None:
                await passthrough.serve(scope, receive, send, target)
                return
            if not target.item:
                await send_reply(send, _refusal(scope))
                return
        await self._app(scope, receive, send)


def _refusal(scope: Scope) -> Reply:
    asked = f"{scope['method']} {scope['path']}"
    if (b"upgrade", b"websocket") in ((name, value.lower()) for name, value in scope["headers"]):
        reply = reply_of(NoWebSocket(f"{asked}: no WebSockets here, use HTTP"))
        reply.headers.append((b"upgrade", b"HTTP/1.1"))  # the status must name what to use
        return reply
    return reply_of(WrongMethod(f"{asked}: not with this method"))
