"""HTTP/1.1 server connections: the only module that reads and writes HTTP bytes of clients.

uvicorn runs this protocol class instead of its own, with the same parser. It adds protections for
untrusted networks:

- Limits for headers, trailers, pipelined requests and connections (`connection_limit`).
- Every state of a connection that waits for its client has a deadline (`deadlines`):
    idle      no request has begun. Blank lines begin none
    request   a request has begun. One that does not arrive in time gets status 408 on every route:
              `receive` raises TooSlow, so the route replies in the format of its protocol
    unread    the client reads too little of a reply
    linger    the reply was sent before the request had arrived
    end       the connection is being closed
- For an invalid body `receive` raises BadRequest.
- Upgrade offers are ignored (RFC 9110, section 7.8). Java's client offers HTTP/2 every time.
- A client that closes only its sending side gets its reply. A disconnected client looks the same
  until it gets data, so the server sends it bytes that a client ignores.
- The end of the connection ends a reply of unknown length to HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import socket
import urllib.parse
from collections import deque
from functools import partial
from typing import Any, Protocol, cast

import httptools
import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from clawstream.gateway.asgi.connection_limit import ConnectionLimit
from clawstream.gateway.asgi.deadlines import Deadlines
from clawstream.gateway.asgi.error_replies import reply_of
from clawstream.gateway.asgi.http_cycle import Cycle, head_of
from clawstream.gateway.asgi.messages import App
from clawstream.gateway.errors import (
    BadRequest,
    GatewayError,
    HeadersTooLarge,
    TooSlow,
    WrongTransfer,
    WrongVersion,
)

MAX_HEAD = 1 << 16
"""Maximum bytes of the request line and headers, and of data that is neither, e.g. trailers."""
MAX_WAITING = 100
"""Maximum number of pipelined requests waiting on one connection."""
MAX_UNREAD = 1 << 24
"""Maximum bytes that a refused client may still send."""
READ_AHEAD = 1 << 16
"""Bytes of a body buffered for the application before reading pauses."""
MIN_BYTES_PER_S = 4096
"""A body that keeps this rate in each window may take longer than gateway.client_timeout_s."""
WINDOW_S = 10.0
"""Length of a window; the first one is gateway.client_timeout_s."""
KEEP_ALIVE_S = 75.0
"""Longest time between two requests of a connection."""
LINGER_S = 5.0
"""Time a client may keep sending after its reply; closing at once could reset the reply."""
VERSIONS = ("1.0", "1.1")
FRAMING = frozenset((b"host", b"expect", b"transfer-encoding"))
"""Headers that the server itself reads."""
CONNECTION = (b"connection", b"proxy-connection")
"""The parser treats both headers alike."""
DISCONNECT_CHECK_S = 0.05
"""Interval of disconnect checks for a client that closed its sending side."""


class ServedApp(Protocol):
    """An application, and what its server has to know.

    stack: The ASGI application. client_timeout_s: gateway.client_timeout_s.
    """

    stack: App
    client_timeout_s: float
    max_connections: int


def server_config(
    app: ServedApp, stop_timeout_s: int | None = None, keep_alive_s: float = KEEP_ALIVE_S
) -> uvicorn.Config:
    """Return uvicorn's configuration for a gateway.

    stop_timeout_s: Maximum wait for calls in flight at shutdown.
    """
    connection = partial(
        ServerConnection,
        timeout_s=app.client_timeout_s,
        keep_alive_s=keep_alive_s,
        limit=ConnectionLimit(app.max_connections),
    )
    return uvicorn.Config(
        cast(Any, app.stack),
        http=cast(Any, connection),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # gateway.public_url gives the URLs in replies
        timeout_graceful_shutdown=stop_timeout_s,
    )


class ServerConnection(asyncio.Protocol):
    """A client connection, created by uvicorn.

    timeout_s: gateway.client_timeout_s. keep_alive_s: Longest time between two requests. limit:
    Counts the connections of the server.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        timeout_s: float,
        keep_alive_s: float,
        limit: ConnectionLimit,
    ) -> None:
        self.app, self.state, self._app_state = config.loaded_app, server_state, app_state
        self._keep_alive_s, self._timeout_s = keep_alive_s, timeout_s
        self._linger_s, self._window_s = min(LINGER_S, timeout_s), min(WINDOW_S, timeout_s)
        self._limit = limit
        self._loop = _loop or asyncio.get_running_loop()
        self._deadlines = Deadlines(
            self._loop,
            {
                "idle": self._idle,
                "request": self._late,
                "unread": self._unread,
                "linger": self._close,
                "end": self._end,
                "half closed": self._check_disconnect,
            },
        )
        self._parser: Any = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self._local: Any = None
        self._remote: Any = None
        # The request being read, the one being served, and the pipelined ones.
        self._reading: Cycle | None = None
        self._serving: Cycle | None = None
        self._waiting: deque[Cycle] = deque()
        self._in_head = self._awaited = self._paused = self._upgrades = self._closing = False
        self._window, self._in_window = 0.0, 0  # seconds, and bytes of the body
        self._unsent = 0  # bytes of replies
        self._hosts = 0  # number of Host headers
        self._quiet = 0  # bytes since the last parser event
        self._known = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects_continue = False

    # -- by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.state.connections.add(cast(Any, self))
        self._local, self._remote = get_local_addr(self.transport), get_remote_addr(self.transport)
        self._deadlines.set("idle", self._timeout_s)
        if not self._limit.opened(self):
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(cast(Any, self))
        self._limit.lost(self)
        self._deadlines.stop()
        self.transport = self._parser = None
        for cycle in (self._reading, self._serving, *self._waiting):
            if cycle is not None:
                cycle.lose()
        self._waiting.clear()
        self.writable.set()

    def pause_writing(self) -> None:
        self.writable.clear()
        self._unsent = self._buffered()
        self._deadlines.set("unread", self._timeout_s)

    def resume_writing(self) -> None:
        self.writable.set()
        self._deadlines.clear("unread")

    def data_received(self, data: bytes) -> None:
        rest: bytes | None = data
        while rest is not None:
            rest = self._feed(rest)
        if self._parser is None:
            return
        if self._quiet > MAX_HEAD:
            self._refuse(_too_large())
        elif (self._in_head or self._reading is not None) and not self._awaited:
            self._awaited, self._window = True, self._timeout_s
            self._deadlines.set("request", self._timeout_s)
        if self._waiting or self._reading is not None:
            self.flow()

    def _feed(self, data: bytes) -> bytes | None:
        """Parse data; return data to parse next, if any."""
        self._quiet += len(data)
        if self._parser is None:  # refused
            if self._quiet > MAX_UNREAD:
                self.abort()
            return None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(
                cause
                if isinstance(cause, GatewayError)
                else BadRequest("the request target is not a URL")
            )
        except httptools.HttpParserError as error:
            where = "body" if self._reading is not None else None
            self._refuse(BadRequest(f"{where or 'the request'}: not HTTP/1.1: {error}", where))
        return None

    def eof_received(self) -> bool:
        """Handle the end of the client's data; it may still wait for replies."""
        cycle = self._serving
        if cycle is None or self._reading is not None or self._parser is None:
            self._deadlines.set("end", self._timeout_s)  # all data is written before the close
            return False
        self._closing = True
        self._deadlines.set("half closed", DISCONNECT_CHECK_S)
        cycle.probe()
        return True

    def _check_disconnect(self) -> None:
        """Abort if the client reset the connection after the probe."""
        if self.transport is None:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.abort()
        else:
            self._deadlines.set("half closed", DISCONNECT_CHECK_S)

    # -- by the parser

    def on_message_begin(self) -> None:
        self._deadlines.clear("idle")
        self._in_head, self._expects_continue, self._in_window, self._hosts = True, False, 0, 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # trailer
            return
        name = name.lower()
        if name in FRAMING:
            self._note(name, value.strip().lower())
        self._headers.append((name, value))

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"expect":
            self._expects_continue = value == b"100-continue"
        elif value != b"chunked":
            raise WrongTransfer(f"transfer-encoding: {value[:40].decode('latin-1')!r} is unknown")

    def on_headers_complete(self) -> None:
        parser, headers, self._in_head = self._parser, self._headers, False
        if (
            self._quiet > MAX_HEAD
            and sum(len(n) + len(v) + 4 for n, v in headers) + len(self._url) > MAX_HEAD
        ):
            raise _too_large()
        self._quiet = 0
        version = parser.get_http_version()
        if version not in VERSIONS:
            raise WrongVersion(f"HTTP/{version}: this server speaks HTTP/1.1 and 1.0")
        if self._hosts > 1 or (not self._hosts and version == "1.1"):
            raise BadRequest(f"host: must be sent once, not {self._hosts} times", "host")
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise BadRequest("CONNECT: this server is not a proxy")
            self._upgrades = True  # the parser ends here
            return
        if len(self._waiting) >= MAX_WAITING:
            raise BadRequest(f"more than {MAX_WAITING} requests wait on this connection")
        url = httptools.parse_url(self._url)
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._local,
            "client": self._remote,
            "scheme": "http",
            "root_path": "",
            "method": parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": url.query or b"",
            "headers": headers,
            "state": self._app_state.copy(),
        }
        keep = version != "1.0" and parser.should_keep_alive()
        self._reading = cycle = Cycle(self, scope, keep, self._expects_continue)
        if self._serving is None:
            self._start(cycle)
        else:
            self._waiting.append(cycle)

    def on_body(self, data: bytes) -> None:
        self._quiet = 0
        self._in_window += len(data)
        if self._reading is not None:
            self._reading.take(data)

    def on_message_complete(self) -> None:
        self._quiet = 0
        if self._upgrades:
            return
        if self._awaited:
            self._awaited = False
            self._deadlines.clear("request")
            self._deadlines.clear("linger")
        cycle, self._reading = self._reading, None
        if cycle is not None:
            cycle.end()
            if cycle.complete:  # the reply ended before the body
                self._next()

    def _without_upgrade(self) -> bytes:
        """Return the head without its upgrade offer, and install a new parser for it."""
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        self._parser, self._upgrades = httptools.HttpRequestParser(self), False
        lines = [method + b" " + self._url + b" HTTP/" + version]
        for name, value in self._headers:
            if name in CONNECTION:
                value = b",".join(
                    t
                    for t in value.split(b",")
                    if t.strip().lower() not in (b"upgrade", b"http2-settings")
                )
            if name != b"http2-settings":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    # -- deadlines

    def _idle(self) -> None:
        """Close an idle connection, once its client has read the last reply."""
        if self.writable.is_set():
            self.abort()
        else:
            self._deadlines.set("idle", self._keep_alive_s)

    def _late(self) -> None:
        """Handle the deadline of a request. Time while reading is paused does not count."""
        fast = self._in_window >= MIN_BYTES_PER_S * self._window
        if self._paused or (fast and not self._in_head):
            self._window = self._timeout_s if self._paused else self._window_s
            self._in_window = 0
            self._deadlines.set("request", self._window)
            return
        where = "body" if self._reading is not None else None
        limit = f"gateway.client_timeout_s={self._timeout_s:g}"
        self._refuse(TooSlow(f"{where or 'the request'}: did not arrive within {limit}", where))

    def _unread(self) -> None:
        """Close a connection whose client has read nothing of a reply."""
        before, self._unsent = self._unsent, self._buffered()
        if self._unsent < before:
            self._deadlines.set("unread", self._timeout_s)
        else:
            self.abort()

    def _end(self) -> None:
        """Close at once, unless the client still reads the last reply."""
        if self.writable.is_set():
            self.abort()
        else:
            self._deadlines.set("end", self._timeout_s)

    def _buffered(self) -> int:
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    # -- invalid requests

    def _refuse(self, error: GatewayError) -> None:
        """Stop reading, reply with the error if a request is incomplete, and close."""
        self._parser, self._quiet, self._awaited, self._closing = None, 0, False, True
        for name in ("idle", "request", "linger"):
            self._deadlines.clear(name)
        if self._reading is not None:
            if self._reading.complete:
                self._close()
            else:
                self._reading.fail(error)
        elif self._serving is None:
            if self.transport is not None:
                reply = reply_of(error)
                self.transport.write(
                    head_of(reply.status, [*reply.headers, (b"connection", b"close")]) + reply.body
                )
            self._close()

    # -- sequence of requests

    def _start(self, cycle: Cycle) -> None:
        self._serving = cycle
        task = self._loop.create_task(cycle.run())
        task.add_done_callback(self.state.tasks.discard)
        self.state.tasks.add(task)

    def finished(self, cycle: Cycle) -> None:
        """Handle the end of a reply."""
        self.state.total_requests += 1
        self._serving = None
        if not self._known and cycle.admitted:
            self._known = True
            self._limit.known(self)
        if self.transport is None:
            return
        if not cycle.keep_alive or (self._closing and not self._waiting):
            self._close()
        elif self._reading is cycle:
            self._awaited = True
            self._deadlines.clear("request")
            self._deadlines.set("linger", self._linger_s)
            self.flow()
        else:
            self._next()

    def _next(self) -> None:
        if self._serving is not None:
            return
        if self._waiting:
            self._start(self._waiting.popleft())
            self.flow()
        elif self._closing:
            self._close()
        elif not self._in_head:
            self._deadlines.set("idle", self._keep_alive_s)

    @property
    def admitted(self) -> bool:
        """Tell whether an authorized request is being served."""
        return self._serving is not None and self._serving.admitted

    @property
    def closing(self) -> bool:
        """Tell whether the current reply is the last one of the connection."""
        return self._closing and not self._waiting

    def flow(self) -> None:
        """Pause or resume reading: pause while requests or body data wait."""
        reading = self._reading
        full = bool(self._waiting) or (
            reading is not None and reading.held > READ_AHEAD and not reading.complete
        )
        if full != self._paused and self.transport is not None:
            self._paused = full
            if full:
                self.transport.pause_reading()
            elif not self.transport.is_closing():
                self.transport.resume_reading()

    def _close(self) -> None:
        """Close after all data is written.

        Keep reading for a while if the client may still send: an unread byte could reset the reply.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if (
            self._parser is None or self._reading is not None or self._in_head
        ) and transport.can_write_eof():
            self._parser, self._quiet, self._closing = None, 0, True
            if self._paused:
                self._paused = False
                transport.resume_reading()
            transport.write_eof()
            self._deadlines.set("end", self._linger_s)
        else:
            transport.close()
            self._deadlines.set("end", self._timeout_s)  # in case the client does not read

    def abort(self) -> None:
        """Close the connection immediately."""
        if self.transport is not None:
            self.transport.abort()

    def shutdown(self) -> None:
        """Finish the current requests; called by uvicorn at shutdown."""
        self._closing = True
        if self._serving is None:
            self._close()


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request's headers are larger than {MAX_HEAD} bytes")
