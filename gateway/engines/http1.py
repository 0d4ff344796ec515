"""HTTP/1.1 to one engine: keep-alive connections with one request at a time each.

The only module that handles raw HTTP of engines. A general client takes eight times the CPU per
call of this one (docs/routing.md), more than the rest of the gateway. Features that the gateway
does not need are left out: redirects, cookies, compression, proxies, pipelining.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from ipaddress import IPv6Address
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from clawstream.gateway.asgi.messages import combined

CONNECT_S = 5.0
# Less than the 5 s after which uvicorn closes an idle connection, so that a call cannot race with
# the close.
KEEPALIVE_S = 3.0
MAX_HEAD = 1 << 20
"""Maximum bytes of the headers of a reply, and of the trailers of a chunked body."""
READ_AHEAD = 1 << 18
"""Bytes that are buffered for a slow reader before the connection stops reading from the engine."""
MAX_REPLY = 64 << 20
JOINED = 1 << 16
"""Up to this body size in bytes, head and body of a request are written in one call."""


class Address(NamedTuple):
    """Host and port of an engine, and the path prefix of its URL."""

    host: str
    port: int
    tls: bool
    prefix: str

    @property
    def header(self) -> str:
        """The value of the header `host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def address_of(url: str) -> Address:
    """Parse an http or https URL.

    Raises:
        ValueError: Not such a URL, or a host or path that no request can contain.
    """
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.hostname}"
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username is not None
        or parts.port == 0
    ):
        raise ValueError(f"{where}: not http(s)://HOST[:PORT][/PATH]")
    host = parts.hostname
    try:
        host = str(IPv6Address(host)) if ":" in host else host.encode("idna").decode()
    except ValueError as error:
        raise ValueError(f"{where}: no host can have this name: {error}") from error
    if not host.isascii() or not all(sign.isalnum() or sign in "-_.:%" for sign in host):
        raise ValueError(f"{where}: characters that a host cannot have")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise ValueError(f"{where}: characters in its path that a URL cannot have")
    tls = parts.scheme == "https"
    return Address(host, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Connection(asyncio.Protocol):
    """One connection. One task calls `send`, then `begin`, then `read` or `piece`, then `release`.

    Raises ConnectionError, also for data that is not HTTP, or TimeoutError.

    touched: Some of the reply's body has arrived.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: Pool) -> None:
        self._loop, self._pool = loop, pool
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._parts: list[bytes] = []
        self._size = self._head = 0
        self._paused = self._in_head = False
        self._silence_s = self._heard_s = 0.0
        self._ends_s: float | None = None
        self._keep = False
        self._error: ConnectionError | TimeoutError | None = None
        self.busy = self.complete = self.touched = False
        self.idle_since = 0.0
        self.status = 0
        self._fields: list[tuple[bytes, bytes]] = []
        self.headers: dict[bytes, bytes] = {}

    @property
    def max_reply(self) -> int:
        """Maximum bytes of a reply that is read as a whole."""
        return self._pool.max_reply

    # -- by the caller

    def send(
        self, head: bytes, body: bytes | None, silence_s: float, total_s: float | None = None
    ) -> None:
        """Write a request.

        Args:
            head: Request line and headers, including the blank line.
            body: The body; None: no body.
            silence_s: Longest time without a byte of the reply; does not run while the reader is
                behind.
            total_s: Longest time for the whole reply; None: no limit.
        """
        assert self._transport is not None and not self.busy
        self.busy, self.complete, self.touched = True, False, False
        self.status, self.headers, self._head, self._in_head = 0, {}, 0, True
        self._fields = []
        self._silence_s, self._heard_s = silence_s, self._loop.time()
        self._ends_s = self._heard_s + total_s if total_s is not None else None
        self._await_more()
        if body is None or len(body) <= JOINED:
            self._transport.write(head + body if body else head)
        else:
            self._transport.writelines((head, body))

    async def begin(self) -> None:
        """Wait for the head of the reply and the first part of its body, or its end."""
        while not self._parts and not self.complete:
            await self._more()

    async def peek(self, size: int) -> bytes:
        """Return the first bytes of the body, at least `size` unless it ends before."""
        while self._size < size and not self.complete:
            await self._more()
        first = self._parts[0] if self._parts else b""
        return first[:size] if len(first) >= size else b"".join(self._parts)[:size]

    async def read(self, take: Callable[[int], Awaitable[None]] | None = None) -> bytes:
        """Read the rest of the body.

        Args:
            take: Called with the length of each piece before the next one is read.

        Raises:
            ConnectionError: The connection breaks, or the body exceeds the size limit.
            TimeoutError: The engine sends nothing for too long.
        """
        parts, size = [], 0
        while True:
            if not self._parts:
                if self.complete:
                    break
                await self._more()
                continue
            piece = self._taken()
            size += len(piece)
            if size > self._pool.max_reply:
                raise ConnectionError(
                    f"the reply is larger than gateway.max_reply_bytes={self._pool.max_reply}"
                )
            if take is not None:
                await take(len(piece))
            parts.append(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def piece(self) -> bytes:
        """Return the bytes of the body since the last piece; empty at the end of the body."""
        while not self._parts:
            if self.complete:
                return b""
            await self._more()
        return self._taken()

    def release(self) -> None:
        """End this call: reuse the connection if the reply was complete, else close it at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport, self.busy = self._transport, False
        self._parts, self._size = [], 0
        if transport is None:
            return
        if (
            self.complete
            and self._keep
            and not self._paused
            and transport.get_write_buffer_size() == 0
        ):
            self._pool.put(self)
        else:
            transport.abort()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _taken(self) -> bytes:
        parts, self._parts, self._size = self._parts, [], 0
        if self._paused and self._transport is not None:
            self._paused, self._heard_s = False, self._loop.time()
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # -- by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self.complete:
            self.close()  # bytes without a request
            return
        before, self._heard_s = self._size, self._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(ConnectionError("the reply switches protocols"))
        except httptools.HttpParserError as error:
            if not self.complete:  # bytes after a complete reply do not invalidate it
                self._fail(ConnectionError(f"the reply is no HTTP/1.1: {error}"))
            self._keep = False
        if self._size != before:
            self._head = 0
        else:  # headers or trailers
            self._head += len(data)
            if self._head > MAX_HEAD and not self.complete:
                self._fail(ConnectionError(f"the reply's headers are larger than {MAX_HEAD} bytes"))
                return
        if self.complete or self._parts:
            self._wake()
        if (
            self._size > READ_AHEAD
            and not (self.complete or self._paused)
            and self._transport is not None
        ):
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Complete a reply that states no length: the engine has closed its side.

        A connection that is lost without this call was cut.
        """
        has_length = b"content-length" in self.headers or b"transfer-encoding" in self.headers
        if self.busy and not self._in_head and not has_length and self._error is None:
            self.complete, self._keep = True, False
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._parser = None
        self._pool.lost(self)
        if self.busy and not self.complete and self._error is None:
            self._error = ConnectionResetError(
                str(exc) if exc is not None else "it closed the connection"
            )
        self._wake()

    def _await_more(self) -> None:
        until = (self._loop.time() if self._paused else self._heard_s) + self._silence_s
        self._timer = self._loop.call_at(min(until, self._ends_s or until), self._time_out)

    def _time_out(self) -> None:
        now = self._loop.time()
        if self._ends_s is not None and now >= self._ends_s:
            self._fail(TimeoutError("took longer than gateway.upstream_total_timeout_s"))
        elif self._paused or now < self._heard_s + self._silence_s:
            self._await_more()
        else:
            self._fail(TimeoutError("sent nothing for gateway.upstream_timeout_s"))

    def _fail(self, error: ConnectionError | TimeoutError) -> None:
        if not self.complete:
            self._error = error
        self._wake()
        self.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Close the connection at once, also during a call."""
        if self._transport is not None:
            self._transport.abort()

    # -- by the parser, which also parses bytes after a complete reply: those bytes are ignored

    def on_message_begin(self) -> None:
        if self.complete:
            self._keep = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # otherwise a trailer
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self.headers, self._in_head = dict(self._fields), False
            if len(self.headers) < len(self._fields):
                self.headers = combined(self._fields)
        self._fields = []  # those of an interim reply do not count: the final one follows

    def on_body(self, data: bytes) -> None:
        if self.complete:
            return
        self.touched = True
        self._parts.append(data)
        self._size += len(data)

    def on_message_complete(self) -> None:
        if self.status >= 200 and not self.complete:
            self.complete, self._keep = True, self._parser.should_keep_alive()


class Pool:
    """The connections to one address. max_reply: Maximum bytes of a reply read as a whole."""

    def __init__(self, address: Address, max_reply: int = MAX_REPLY) -> None:
        self._address, self.max_reply = address, max_reply
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._tls = ssl.create_default_context() if address.tls else None
        self._loop = asyncio.get_running_loop()
        self._draining = False

    def take(self) -> Connection | None:
        """Return a connection idle for less than KEEPALIVE_S; None: there is none."""
        while self._idle:
            connection = self._idle.pop()
            if self._loop.time() - connection.idle_since < KEEPALIVE_S:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """Open a new connection.

        Raises:
            OSError: Including TimeoutError. Nothing was sent.
        """
        async with asyncio.timeout(CONNECT_S):
            _, connection = await self._loop.create_connection(
                lambda: Connection(self._loop, self),
                self._address.host,
                self._address.port,
                ssl=self._tls,
            )
        return connection

    def put(self, connection: Connection) -> None:
        """Take back an idle connection for reuse."""
        if self._draining:
            connection.close()
            return
        now = connection.idle_since = self._loop.time()
        idle = self._idle
        idle.append(connection)
        while now - idle[0].idle_since >= KEEPALIVE_S:
            idle.popleft().close()

    def opened(self, connection: Connection) -> None:
        """Register a new connection."""
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        if not connection.busy and connection in self._idle:
            self._idle.remove(connection)

    def drain(self) -> None:
        """Close each connection as soon as it is idle."""
        self._draining = True
        while self._idle:
            self._idle.pop().close()

    def close(self) -> None:
        """Close all connections at once."""
        self.drain()
        for connection in tuple(self._open):
            connection.close()
