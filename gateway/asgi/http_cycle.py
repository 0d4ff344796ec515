"""One HTTP/1.1 request and its reply: the `receive` and `send` of the ASGI application.

The connection is `http_server.ServerConnection`.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

from clawstream.gateway.asgi.messages import is_admitted
from clawstream.gateway.errors import GatewayError

JOINED = 1 << 16
"""Bytes. A body of at most this size is copied behind its head, so that both are one write."""
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
Message = MutableMapping[str, Any]


class Connection(Protocol):
    """The connection of a request.

    app: ASGI application. state: State of the server. writable: Set while the transport accepts
    data, and when the connection has ended.
    """

    app: Any
    state: Any
    transport: asyncio.Transport | None
    writable: asyncio.Event

    @property
    def closing(self) -> bool:
        """Tell whether the current reply is the last one of the connection."""
        ...

    def flow(self) -> None:
        """Resume reading after the application consumed a part of the body."""
        ...

    def finished(self, cycle: Cycle) -> None:
        """Handle the end of a reply."""
        ...

    def abort(self) -> None:
        """Close the connection immediately."""
        ...


class Cycle:
    """One request and its reply."""

    def __init__(
        self, connection: Connection, scope: Message, keep_alive: bool, expects_continue: bool
    ) -> None:
        self._connection, self._scope, self.keep_alive = connection, scope, keep_alive
        self._expects_continue = expects_continue
        self._happened = asyncio.Event()
        self._parts: list[bytes] = []
        self.held = 0
        self._whole = self._delivered = self._gone = False
        self._error: GatewayError | None = None
        self.started = self.complete = False
        self._chunked = False
        self._bare = scope["method"] == "HEAD"
        self._left: int | None = None
        self._head = b""

    # -- by the connection

    async def run(self) -> None:
        """Run the application; close the connection if the reply is incomplete."""
        try:
            await self._connection.app(self._scope, self.receive, self.send)
        except GatewayError:
            return  # logged by `UnhandledErrors`
        finally:
            if not self.complete:
                self._connection.abort()

    def take(self, data: bytes) -> None:
        """Add a part of the body."""
        if not self.complete:
            self._parts.append(data)
            self.held += len(data)
            self._happened.set()

    def end(self) -> None:
        """Mark the body as complete."""
        self._whole = True
        self._happened.set()

    def fail(self, error: GatewayError) -> None:
        """Mark the body as failed."""
        self._error, self.keep_alive = error, False
        self._happened.set()

    def lose(self) -> None:
        """Mark the client as disconnected."""
        self._gone = True
        self._happened.set()

    @property
    def admitted(self) -> bool:
        """Tell whether the request is authorized."""
        return is_admitted(self._scope)

    def probe(self) -> None:
        """Send bytes that a connected client ignores, to provoke a reset from a gone one."""
        transport = self._connection.transport
        if transport is None or self._scope["http_version"] != "1.1":
            return
        if not self.started:
            transport.write(INTERIM)
        elif self._chunked:
            transport.write(b"0")  # a leading zero of the next chunk size

    # -- by the application

    async def receive(self) -> Message:
        """Return the next part of the body, then the disconnect.

        Raises:
            TooSlow, BadRequest: The body does not arrive.
        """
        if self._expects_continue:
            self._expects_continue = False
            if not self.started and self._connection.transport is not None:
                self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            if self._gone or self.complete:
                return {"type": "http.disconnect"}
            if not self._delivered:
                if self._whole or self._parts:
                    break
                if self._error is not None:
                    raise self._error
            self._happened.clear()
            await self._happened.wait()
        parts, self._parts, self.held = self._parts, [], 0
        self._delivered = self._whole
        if not self._whole:
            self._connection.flow()
        return {
            "type": "http.request",
            "body": parts[0] if len(parts) == 1 else b"".join(parts),
            "more_body": not self._whole,
        }

    async def send(self, message: Message) -> None:
        """Write a part of the reply when the transport accepts it.

        Raises:
            RuntimeError: The application sends messages out of order.
        """
        connection = self._connection
        if not connection.writable.is_set():
            await connection.writable.wait()
        if self._gone or connection.transport is None:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif self.complete or not self.started:
            raise RuntimeError(f"{message['type']} out of order")
        else:
            self._body(
                connection.transport, message.get("body", b""), message.get("more_body", False)
            )

    def _begin(self, status: int, reply_headers: Any) -> None:
        if self.started:
            raise RuntimeError("a second reply")
        self.started = True
        headers = [*self._connection.state.default_headers, *reply_headers]
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and value.lower() == b"close":
                self.keep_alive = False
        self._bare = self._bare or status in (204, 304)
        if self._left is None and not self._bare:
            self._chunked = self._scope["http_version"] == "1.1"
            if self._chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self.keep_alive = False
        if not self.keep_alive or self._connection.closing:
            headers = [h for h in headers if h[0] != b"connection"]
            headers.append((b"connection", b"close"))
        assert self._connection.transport is not None
        head = head_of(status, headers)
        if self._left is None:
            self._connection.transport.write(head)
        else:  # The head waits for the body: two writes cost twice as much as one.
            self._head = head

    def _body(self, transport: asyncio.Transport, data: bytes, more: bool) -> None:
        if self._bare:
            self._left = None
            data = b""
        elif self._chunked:
            if data:
                transport.writelines(
                    (b"%x\r\n" % len(data), data, b"\r\n" if more else b"\r\n0\r\n\r\n")
                )
            elif not more:
                transport.write(b"0\r\n\r\n")
            data = b""
        elif data and self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise RuntimeError("the reply is longer than its content-length")
        head, self._head = self._head, b""
        if head and len(data) > JOINED:
            transport.writelines((head, data))
        elif head or data:
            transport.write(head + data if head else data)
        if more:
            return
        if self._left:
            raise RuntimeError("the reply is shorter than its content-length")
        self.complete = True
        self._happened.set()
        self._connection.finished(self)


def head_of(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Format the status line and headers.

    Raises:
        RuntimeError: A name or value contains a line break or a null byte.
    """
    parts = [STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    head = b"".join(parts)
    if (
        head.count(b"\n") != len(headers) + 2
        or head.count(b"\r") != len(headers) + 2
        or b"\0" in head
    ):
        raise RuntimeError("a header contains a line break or a null byte")
    return head
