"""Reads ASGI requests and sends complete replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.error_replies import Reply
from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.errors import BodyTooLarge, ClientGone, Overloaded

VALUE_BYTES = 64
"""Memory of a value of JSON beside its text. Its number is estimated by commas and brackets."""
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


SINGLE = frozenset({
    b"authorization", b"x-api-key", b"api-key", b"content-type", b"content-length", b"host",
    b"location", b"origin", b"retry-after", b"traceparent",
})  # fmt: skip
OWN = b"x-clawstream-"
"""Headers that are no list, and the prefix of this gateway's own; the last of several counts."""


def admit(scope: Scope) -> None:
    """Mark a request as authorized: its connection is kept when there are too many."""
    scope.setdefault("state", {})["admitted"] = True


def is_admitted(scope: Scope) -> bool:
    """Tell whether the request is authorized."""
    return "admitted" in scope.get("state", ())


def header_map(scope: Scope) -> dict[str, str]:
    """Return the request headers, names in lower case; see `combined`."""
    fields = scope["headers"]
    found = {k.decode("latin-1"): v.decode("latin-1") for k, v in fields}
    if len(found) == len(fields):
        return found
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in combined(fields).items()}


def combined(fields: Collection[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name, those of one name joined by commas (RFC 9110, section 5.3)."""
    found = dict(fields)
    values: dict[bytes, dict[bytes, None]] = {}
    for name, value in fields:
        values.setdefault(name, {})[value] = None
    return found | {
        name: b", ".join(several)
        for name, several in values.items()
        if name not in SINGLE and not name.startswith(OWN)
    }


class HeldBody:
    """Reads a request body and counts it as in flight: `async with HeldBody(...) as body`.

    A body counts with its bytes, and with those of the values that parsing it makes.

    Args:
        limit: Maximum bytes.
        setting: Name of the limit's setting.

    Raises:
        BodyTooLarge, Overloaded: On entry: a limit is exceeded.
        ClientGone, TooSlow, BadRequest: On entry: the body is incomplete.
    """

    __slots__ = ("_in_flight", "_limit", "_receive", "_setting", "_size")

    def __init__(
        self,
        receive: Receive,
        limit: int,
        in_flight: InFlightLimits,
        setting: str = "gateway.max_body_bytes",
    ) -> None:
        self._receive, self._limit, self._in_flight, self._size = receive, limit, in_flight, 0
        self._setting = setting

    async def __aenter__(self) -> bytes:
        try:
            return await self._read()
        except BaseException:  # refused, cancelled or disconnected: release the bytes read so far
            self._in_flight.release(self._size)
            raise

    async def __aexit__(self, *_: object) -> None:
        self._in_flight.release(self._size)

    def reserve(self, size: int) -> None:
        """Count `size` more bytes until the block ends. Raises Overloaded."""
        self._in_flight.reserve(size)
        self._size += size

    async def _read(self) -> bytes:
        parts, more = [], True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone("the client closed its connection before the end of its request")
            part, more = message.get("body", b""), message.get("more_body", False)
            if self._size + len(part) > self._limit:
                hint = f", see {self._setting}" if self._setting else ""
                raise BodyTooLarge(f"body: larger than {self._limit} bytes{hint}", "body")
            parts.append(part)
            if more:
                self._hold(len(part))
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        values = VALUE_BYTES * (body.count(b",") + body.count(b"[") + body.count(b"{"))
        self._hold(len(part), values)
        return body

    def _hold(self, size: int, values: int = 0) -> None:
        """Reserve a part of the body, and the memory of its values."""
        whole = self._size + size
        try:
            self.reserve(size + values)
        except Overloaded:
            if whole + values <= self._in_flight.limit:
                raise
            raise BodyTooLarge(  # it can never be accepted
                f"body: {whole} bytes whose values need {values} bytes of memory exceed "
                f"gateway.max_in_flight_bytes={self._in_flight.limit}",
                "body",
            ) from None


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a complete reply."""
    await send({"type": "http.response.start", "status": reply.status, "headers": reply.headers})
    await send({"type": "http.response.body", "body": reply.body})
