"""Clients that fall silent, or send or read too slowly: each of their connections ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from support.gateway import GatewayFixture, run_gateway
from support.raw_http import ASK, ASK_STREAM, CALL, connected, request
from support.scripted.script import Script, ScriptedChoice
from uvicorn.server import ServerState

from clawstream.gateway.asgi.connection_limit import ConnectionLimit
from clawstream.gateway.asgi.deadlines import Deadlines
from clawstream.gateway.asgi.http_server import MIN_BYTES_PER_S, WINDOW_S, ServerConnection
from clawstream.gateway.errors import TooSlow
from clawstream.schemas.codec.single_object import Codec

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
CODEC = Codec()
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
HEAD = f"POST {CALL} HTTP/1.1\r\nhost: x\r\n".encode()
SIZE = b"%x;ext\r\n%s\r\n"
CHUNKED = (
    HEAD + b"transfer-encoding: chunked\r\n\r\n" + SIZE % (9, ASK[:9])
    + SIZE % (len(ASK) - 9, ASK[9:]) + b"0\r\nx-trailer: y\r\n\r\n"
)  # fmt: skip
EXPECTS = HEAD + b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % len(ASK) + ASK
UPGRADE = (
    HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAE\r\n"
    b"content-length: %d\r\n\r\n" % len(ASK) + ASK
)  # fmt: skip
CONVERSATIONS = {
    "blank lines": b"\r\n\r\n\n\r\n" + HEALTH,
    "after a request": HEALTH + b"\r\n\r\n",
    "a call": request(),
    "a stream": request(body=ASK_STREAM),
    "chunks": CHUNKED,
    "waits to be asked": EXPECTS,
    "upgrade": UPGRADE,
    "version 1.0": request(version="1.0"),
    "pipelined": HEALTH + request() + b"\r\n" + CHUNKED + b"\r\n",
    "not allowed": b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
    "control": request(path="/sessions", body=b"{}"),
}
"""Bytes of a client, by name."""


@pytest.mark.slow
@pytest.mark.parametrize("each_event_loop", [uvloop.EventLoopPolicy], ids=["uvloop"], indirect=True)
@pytest.mark.usefixtures("each_event_loop")
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_silence_after_any_byte_ends_the_connection(tmp_path: Path, name: str) -> None:
    said = CONVERSATIONS[name]
    few = asyncio.Semaphore(150)

    async def silent_after(w: GatewayFixture, length: int) -> None:
        async with few, connected(w.url) as client:
            if length:
                await client.send(said[:length])
            try:
                answer = await client.rest()
            except ConnectionError:  # bytes that the server did not read
                return
            if length == len(said):
                assert b" 200 " in answer or b" 405 " in answer or b" 201 " in answer

    async def scenario(w: GatewayFixture) -> None:
        async with asyncio.TaskGroup() as clients:
            for length in range(len(said) + 1):
                clients.create_task(silent_after(w, length))

    run_gateway(
        tmp_path, CODEC, scenario, Script([HI]), keep_alive_s=0.2, client_timeout_s=0.2
    )  # fmt: skip


# ---------------------------------------------------------------- by a clock of the test


class Clock:
    """The timers of an event loop; time passes only in `advance`."""

    def __init__(self) -> None:
        self.now, self._loop = 0.0, asyncio.get_running_loop()
        self._timers: list[tuple[float, Timer]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], None]) -> Timer:
        self._timers.append((when, timer := Timer(call)))
        return timer

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._loop.create_task(coroutine)

    async def advance(self, seconds: float) -> None:
        """Let the time pass, and with it all timers that are due."""
        await settled()
        until = self.now + seconds
        while due := [t for t in self._timers if t[0] <= until and not t[1].cancelled]:
            first = min(due, key=lambda t: t[0])
            self._timers.remove(first)
            self.now = first[0]
            first[1].call()
            await settled()
        self.now = until
        await settled()


class Timer:
    """A timer of `Clock`."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call, self.cancelled = call, False

    def cancel(self) -> None:
        self.cancelled = True


async def settled() -> None:
    """Let the tasks of the server run."""
    for _ in range(5):
        await asyncio.sleep(0)


class Wire:
    """A client's connection: what it got, and whether it was cut off."""

    def __init__(self) -> None:
        self.got, self.unread, self.cut = b"", 0, False
        self.ended = False

    def write(self, data: bytes) -> None:
        self.got += data

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        return None

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.cut

    def abort(self) -> None:
        self.cut = True

    def close(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    """Read the body; reply with its length, or with 408."""
    size, more, status = 0, True, 200
    while more:
        try:
            message = await receive()
        except TooSlow:
            status = 408
            break
        size, more = size + len(message["body"]), message["more_body"]
    head = [(b"content-length", b"%d" % len(str(size)))]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": str(size).encode()})


def opened(clock: Clock) -> tuple[ServerConnection, Wire]:
    """Return a new connection with client_timeout_s=60."""
    config = uvicorn.Config(reads_all, log_config=None)
    config.loaded_app = reads_all
    connection, wire = (
        ServerConnection(
            config, ServerState(), {}, cast(Any, clock),
            timeout_s=60.0, keep_alive_s=75.0, limit=ConnectionLimit(10),
        ),
        Wire(),
    )  # fmt: skip
    connection.connection_made(cast(Any, wire))
    return connection, wire


def by_clock(scenario: Callable[[Clock, ServerConnection, Wire], Awaitable[None]]) -> None:
    """Run a scenario of one connection."""

    async def body() -> None:
        clock = Clock()
        await scenario(clock, *opened(clock))

    asyncio.run(body())


def test_blank_lines_extend_no_deadline() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        for _ in range(5):
            connection.data_received(b"\r\n")
            await clock.advance(11)
        assert not wire.cut
        await clock.advance(5)
        assert wire.cut

    by_clock(scenario)


def test_blank_lines_after_a_reply_extend_no_deadline() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(HEALTH)
        await clock.advance(40)
        assert b" 200 " in wire.got
        connection.data_received(b"\r\n")
        await clock.advance(34.9)
        assert not wire.cut
        await clock.advance(0.1)
        assert wire.cut

    by_clock(scenario)


LARGE = HEAD + b"content-length: %d\r\n\r\n" % (1 << 22)


def test_a_body_that_keeps_its_rate_may_take_as_long_as_it_needs() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(LARGE)
        for _ in range((1 << 22) // (8 * MIN_BYTES_PER_S)):
            connection.data_received(bytes(8 * MIN_BYTES_PER_S))
            await clock.advance(4)
        assert clock.now == 512 and wire.got.endswith(b"\r\n\r\n%d" % (1 << 22))

    by_clock(scenario)


def test_a_fast_start_allows_no_silence() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(LARGE + bytes(1 << 21))
        await clock.advance(60)
        assert not wire.got
        await clock.advance(WINDOW_S)
        assert b" 408 " in wire.got

    by_clock(scenario)


def test_a_small_body_may_take_the_whole_time() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(HEAD + b"content-length: 3\r\n\r\na")
        await clock.advance(59.9)
        connection.data_received(b"bc")
        await settled()
        assert wire.got.endswith(b"\r\n\r\n3")

    by_clock(scenario)


def test_a_slow_head_is_late_however_many_bytes_it_has() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(HEAD)
        for _ in range(60):
            connection.data_received(b"x-pad: y\r\n")
            await clock.advance(1)
        assert b" 408 " in wire.got and wire.ended

    by_clock(scenario)


def test_a_client_may_read_a_large_reply_slowly_but_not_stop() -> None:
    async def scenario(clock: Clock, connection: ServerConnection, wire: Wire) -> None:
        connection.data_received(HEALTH)
        await settled()
        wire.unread = 1 << 26
        connection.pause_writing()  # by the event loop, when the buffer is full
        for _ in range(100):
            await clock.advance(59)
            wire.unread -= 1000
        assert not wire.cut
        await clock.advance(120)
        assert wire.cut

    by_clock(scenario)


def test_deadlines_fire_once_each_in_any_order() -> None:
    async def scenario() -> list[tuple[str, float]]:
        clock, fired = Clock(), list[tuple[str, float]]()
        names = "abc"
        calls = {name: partial(lambda n: fired.append((n, clock.now)), name) for name in names}
        deadlines = Deadlines(cast(Any, clock), calls)
        deadlines.set("a", 9)
        deadlines.set("b", 5)
        deadlines.set("c", 1)
        deadlines.clear("c")
        deadlines.set("b", 7)  # later than its timer
        await clock.advance(20)
        deadlines.set("c", 1)
        deadlines.stop()
        await clock.advance(20)
        return fired

    assert asyncio.run(scenario()) == [("b", 7), ("a", 9)]
