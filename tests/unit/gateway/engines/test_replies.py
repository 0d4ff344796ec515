"""Limits of replies: the silence of an engine, and the bytes of replies held in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice
from support.wire import ASK

from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.engines.http1 import Connection, Pool
from clawstream.gateway.errors import Overloaded
from clawstream.schemas.codec.single_object import Codec

CODEC = Codec()
RunScenario = Callable[..., None]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"2\r\nhi\r\n"


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Provide `run_scenario(scenario, script, **gateway settings)`.

    It runs an async scenario against a new gateway.
    """
    return partial(run_gateway, tmp_path, CODEC)


# ---------------------------------------------------------------- time


class HandClock:
    """The event loop of a connection, with a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> Any:
        self.timers.append((when, callback))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def until(self, now: float) -> None:
        """Advance the time and run the timers that are due."""
        while due := sorted((t for t in self.timers if t[0] <= now), key=lambda t: t[0]):
            self.timers.remove(due[0])
            self.now = due[0][0]
            due[0][1]()
        self.now = now


class Transport:
    """A transport that ignores all calls."""

    def write(self, data: bytes) -> None:
        return

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return

    def abort(self) -> None:
        return


class Quiet:
    """A connection pool that ignores all calls."""

    max_reply = 1 << 20

    def opened(self, connection: Connection) -> None:
        return


def asked(clock: HandClock, silence_s: float, total_s: float | None = None) -> Connection:
    connection = Connection(cast(asyncio.AbstractEventLoop, clock), cast(Pool, Quiet()))
    connection.connection_made(cast(asyncio.BaseTransport, Transport()))
    connection.send(b"GET / HTTP/1.1\r\n\r\n", None, silence_s, total_s)
    return connection


def test_a_stream_lives_as_long_as_it_says_something() -> None:
    async def body() -> None:
        clock = HandClock()
        connection = asked(clock, 600.0)
        connection.data_received(HEAD)
        for turn in range(1, 41):
            clock.until(turn * 500.0)
            connection.data_received(CHUNK)
            assert await connection.piece() == b"hi"
        clock.until(20_000.0 + 599.0)
        connection.data_received(CHUNK)
        assert await connection.piece() == b"hi"
        clock.until(20_599.0 + 601.0)
        with pytest.raises(TimeoutError, match="sent nothing for"):
            await connection.piece()

    asyncio.run(body())


def test_an_engine_that_waits_for_a_slow_reader_is_not_silent() -> None:
    async def body() -> None:
        clock = HandClock()
        connection = asked(clock, 600.0)
        connection.data_received(HEAD + b"%x\r\n" % (1 << 19) + b"x" * (1 << 19) + b"\r\n")
        clock.until(5_000.0)
        assert len(await connection.piece()) == 1 << 19
        clock.until(5_599.0)
        connection.data_received(CHUNK)
        assert await connection.piece() == b"hi"

    asyncio.run(body())


def test_a_total_bound_holds_where_it_is_set() -> None:
    async def body() -> None:
        clock = HandClock()
        connection = asked(clock, 600.0, 1000.0)
        connection.data_received(HEAD + CHUNK)
        assert await connection.piece() == b"hi"
        clock.until(500.0)
        connection.data_received(CHUNK)
        assert await connection.piece() == b"hi"
        clock.until(1000.0)
        with pytest.raises(TimeoutError, match="upstream_total_timeout_s"):
            await connection.piece()

    asyncio.run(body())


# ---------------------------------------------------------------- bytes


def test_beyond_the_limit_one_reply_goes_on_and_the_others_wait_for_its_end() -> None:
    async def body() -> None:
        limits = InFlightLimits(1000, 10, 100)
        replies = limits.replies
        first, second, third = replies.reserve(), replies.reserve(), replies.reserve()
        await first.extend(60)
        await second.extend(60)  # the first reply that exceeds the limit
        with pytest.raises(Overloaded, match="max_in_flight_reply_bytes=100"):
            limits.begin()
        waiting = [asyncio.create_task(held.extend(50)) for held in (first, third)]
        await second.extend(1000)
        left = asyncio.create_task(replies.reserve().extend(10))
        await asyncio.sleep(0)
        left.cancel()  # its client disconnects
        assert not any(task.done() for task in waiting) and replies.held == 1120
        second.release()
        await waiting[0]
        assert replies.held == 110
        first.release()
        await waiting[1]
        third.release()
        assert replies.held == 0
        limits.begin()

    asyncio.run(body())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models"])
def test_calls_are_refused_before_sampling_while_replies_fill_the_memory(
    run_scenario: RunScenario, path: str
) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(
            w.url + "/t/g/chat/completions", json=ASK | {"stream": True}
        ) as stream:
            await stream.content.readany()
            method = "GET" if path.endswith("models") else "POST"
            async with w.http.request(
                method, w.url + path, json=ASK if method == "POST" else None
            ) as refused:
                assert refused.status == 503 and refused.headers["retry-after"]
                assert (await refused.json())["error"]["code"] == "overloaded"
            assert len(w.engine.requests) == 1
            for _ in range(8):
                gate.release()
            assert b"[DONE]" in await stream.read()
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as again:
            assert again.status == 200
        assert [step.status for step in w.steps()] == ["ok", "ok"]

    says = ScriptedChoice([7, 8, 9], ["x" * 5000, "lo", ""], [-0.5, -0.25, -0.125])
    run_scenario(scenario, Script([says], gate=gate), max_in_flight_reply_bytes=100)
