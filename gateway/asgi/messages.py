"""Reads ASGI requests and sends complete replies."""

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
    """Return the request headers, names in lower case; the last of duplicates wins."""
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


async def read_body(receive: Receive, limit: int, in_flight: InFlightLimits) -> bytes:
    """Read the request body and count its bytes in `in_flight`; the caller releases them.

    Raises:
        BodyTooLarge, Overloaded: A limit is exceeded.
        ClientGone, TooSlow, BadRequest: The body is incomplete.
    """
    parts, size, more = [], 0, True
    try:
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client closed its connection before the end of its request")
            part, more = message.get("body", b""), message.get("more_body", False)
            if size + len(part) > limit:
                raise BodyTooLarge(f"body: larger than gateway.max_body_bytes={limit}", "body")
            in_flight.reserve(len(part))
            size += len(part)
            parts.append(part)
    except BaseException:  # refused, cancelled or disconnected: release the bytes read so far
        in_flight.release(size)
        raise
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a complete reply."""
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})
