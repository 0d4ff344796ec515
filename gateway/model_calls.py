"""Which path is a model call: ASGI, before the web framework, for it costs a call a third of its time.

A call's path is a protocol's own, at the root or under /v1, alone or behind /<trajectory>/<prompt>. What is not ours goes on to the app.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from gateway.calls import CallEndpoint, Scope, Send, send_reply
from gateway.disconnect import Receive
from gateway.error_reply import Reply, reply_of
from gateway.errors import NoWebSocket, WrongMethod
from gateway.passing import PassEndpoint

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Place(NamedTuple):
    """A path taken apart. tail: the protocol's own path, e.g. /chat/completions."""

    tail: str
    trajectory: str | None = None
    prompt: str | None = None


def place_of(path: str, tails: Mapping[str, Sequence[str]]) -> Place | None:
    """The call that a path is; None: it is none. tails: by their last segment, longer ones first."""
    for tail in tails.get(path.rsplit("/", 1)[-1], ()):
        if path.endswith(tail):
            before = path[: -len(tail)].removesuffix("/v1")
            if not before:
                return Place(tail)
            match before.split("/"):
                case ["", trajectory, prompt] if trajectory and prompt:
                    return Place(tail, trajectory, prompt)
    return None


class ModelCalls:
    """ASGI middleware: serves the calls, passes everything else on. calls, passed: by tail."""

    def __init__(self, app: App, calls: Mapping[str, CallEndpoint], passed: Mapping[str, PassEndpoint]) -> None:
        self._app, self._calls, self._passed = app, calls, passed
        self._tails: dict[str, list[str]] = {}
        for tail in sorted([*calls, *passed], key=len, reverse=True):
            self._tails.setdefault(tail.rsplit("/", 1)[-1], []).append(tail)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves the body out
            scope = {**scope, "method": "GET"}
        place = place_of(scope["path"], self._tails)
        if place is not None:
            if scope["method"] == "POST" and (call := self._calls.get(place.tail)) is not None:
                await call.serve(scope, receive, send, place.trajectory, place.prompt)
                return
            passed = self._passed.get(place.tail)
            if passed is not None and passed.method == scope["method"]:
                await passed.serve(scope, receive, send, place.trajectory, place.prompt)
                return
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
