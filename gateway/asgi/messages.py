"""ASGI messages: reading a request, sending a whole reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from gateway.asgi.client_disconnect import Receive
from gateway.asgi.error_replies import Reply
from gateway.asgi.in_flight_limits import InFlightLimits
from gateway.errors import BodyTooLarge, ClientGone

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header_map(scope: Scope) -> dict[str, str]:
    """The request's headers, names in lower case; of several the last."""
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


async def read_body(receive: Receive, limit: int, in_flight: InFlightLimits) -> bytes:
    """The request's body, taken from `in_flight`: give back its length.

    Raises BodyTooLarge or Overloaded; ClientGone, TooSlow or BadRequest when it does not end.
    """
    parts, size, more = [], 0, True
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client closed its connection within its request")
            part, more = message.get("body", b""), message.get("more_body", False)
            if size + len(part) > limit:
                raise BodyTooLarge(f"body: larger than gateway.max_body_bytes={limit}", "body")
            in_flight.reserve(len(part))
            size += len(part)
            parts.append(part)
    except BaseException:  # refused, cancelled, gone: what was read is counted no more
        in_flight.release(size)
        raise
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_reply(send: Send, reply: Reply) -> None:
    """A whole reply."""
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})
