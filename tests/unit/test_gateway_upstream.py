"""Calls to engines over real sockets: HTTP as it may come, retries, circuits, draining, waiting. No failed call where none need be."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from prometheus_client import generate_latest

from gateway.app import create_app
from gateway.bus import MemoryBus
from gateway.connections import Address, Connection, Pool, address_of
from gateway.errors import GatewayError, NoWorker, UpstreamFailed, UpstreamTimeout
from gateway.lane import MUTE, Lane
from gateway.metrics import Metrics
from gateway.scripted import Say, Script
from gateway.scripted_engine import ScriptedEngine
from gateway.trial import Trial, running
from gateway.upstream import Upstream
from gateway.workers import Worker, WorkerTable
from schemas.codec import Codec
from schemas.events import WorkerStatus
from schemas.settings import GatewaySettings, Settings

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
HI = Say([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()
SOON_S = 60.0
Answer = Callable[["Wire", bytes], Awaitable[bool | None]]


@pytest.fixture(
    autouse=True, params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"]
)
def _event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """The gateway serves on uvloop, tests and try-outs on asyncio's own loop: both write, pause and break in their own way."""
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


class Wire:
    """An engine's end of a connection, byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next((int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")), 0)
        return head + await self.reader.readexactly(length)

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.001)

    def die(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def wired(answer: Answer) -> AsyncIterator[str]:
    """An engine that answers each request so; True: it closes the connection then. Gives its URL."""
    tasks: set[asyncio.Task[None]] = set()
    dead = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        wire = Wire(reader, writer)
        if dead.is_set():  # it was accepted with the last breath
            wire.die()
        try:
            while not await answer(wire, await wire.request()):
                pass
            writer.close()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            wire.die()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        dead.set()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saying(*parts: bytes, close: bool = False) -> Answer:
    async def answer(wire: Wire, _: bytes) -> bool:
        await wire.say(*parts)
        return close

    return answer


@asynccontextmanager
async def pool_to(answer: Answer) -> AsyncIterator[Pool]:
    async with wired(answer) as url:
        pool = Pool(address_of(url))
        try:
            yield pool
        finally:
            pool.close()
            await asyncio.sleep(0)


async def asked(pool: Pool, timeout_s: float = SOON_S) -> Connection:
    connection = pool.take() or await pool.connect()
    connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", None, timeout_s)
    await connection.begin()
    return connection


# ---------------------------------------------------------------- HTTP


@pytest.mark.parametrize(
    ("parts", "close", "kept"),
    [
        ([OK], False, True),
        ([bytes([b]) for b in OK], False, True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], False, True),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n", b"1\r\ni\r\n0\r\n\r\n"], False, True),
        ([b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"], True, False),
        ([b"HTTP/1.1 200 OK\r\n\r\nh", b"i"], True, False),
        ([b"HTTP/1.0 200 OK\r\n\r\n", b"hi"], True, False),
        ([OK + b"more"], False, False),
    ],
)
def test_replies_of_every_length(parts: list[bytes], close: bool, kept: bool) -> None:
    async def body() -> None:
        async with pool_to(saying(*parts, close=close)) as pool:
            connection = await asked(pool)
            assert connection.status == 200 and await connection.read() == b"hi" and connection.complete
            connection.release()
            assert pool.take() is (connection if kept else None)

    asyncio.run(body())


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_replies_without_a_body(reply: bytes) -> None:
    async def body() -> None:
        async with pool_to(saying(reply)) as pool:
            for _ in range(2):
                connection = await asked(pool)
                assert connection.complete and await connection.read() == b"" == await connection.piece()
                assert connection.status >= 200 and b"link" not in connection.headers
                connection.release()
            assert pool.take() is connection

    asyncio.run(body())


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "more",
    [
        b"HTTP/1.1 500 No\r\ncontent-length: 5\r\nx-a: second\r\n\r\nEVIL!",
        b"HTTP/1.1 500 No\r\nx-a: second\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"H",
    ],
)
def test_a_second_reply_in_one_packet_is_nobodys(more: bytes, chunked: bool) -> None:
    length, text = (
        (b"transfer-encoding: chunked", b"2\r\nhi\r\n0\r\n\r\n") if chunked else (b"content-length: 2", b"hi")
    )
    reply = b"HTTP/1.1 200 OK\r\n" + length + b"\r\nx-a: first\r\n\r\n" + text

    async def body() -> None:
        async with pool_to(saying(reply + more)) as pool:
            connection = await asked(pool)
            assert (connection.status, connection.headers[b"x-a"]) == (200, b"first")
            assert await connection.read() == b"hi" and connection.complete
            connection.release()
            assert pool.take() is None

    asyncio.run(body())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_reply_that_is_read_whole_has_a_bound(chunked: bool) -> None:
    piece = b"x" * 65536

    async def answer(wire: Wire, _: bytes) -> bool:
        head = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (64 * len(piece))
        await wire.say(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        for _turn in range(64):
            await wire.say(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
        await wire.say(b"0\r\n\r\n" if chunked else b"")
        return True

    async def test(url: str) -> None:
        async with Rig(as_text(url), max_reply_bytes=1 << 20) as rig:
            with pytest.raises(UpstreamFailed, match="max_reply_bytes=1048576"):
                await rig.ask()
            assert len(rig.asked) == 1
            async with rig.upstream.ask("POST", "/v1/x", None, {}, key="k", run_id="r", model=None) as response:
                assert sum([len(piece) async for piece in response.pieces()]) == 64 * len(piece)

    run(answer, test=test)


def test_what_follows_a_body_is_no_header_and_has_a_bound() -> None:
    chunk = b"HTTP/1.1 200 OK\r\nx-a: first\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"

    async def body() -> None:
        async with pool_to(saying(chunk + b"x-a: second\r\n\r\n")) as pool:
            connection = await asked(pool)
            assert await connection.read() == b"hi" and connection.headers[b"x-a"] == b"first"
        async with pool_to(saying(chunk, *[b"x: " + b"y" * 65536 + b"\r\n"] * 20)) as pool:
            connection = await asked(pool)
            with pytest.raises(ConnectionError, match="larger than"):
                await connection.read()

    asyncio.run(body())


@pytest.mark.parametrize("how", ["reset", "closed here", "time-out"])
def test_a_body_that_ends_with_the_connection_is_whole_only_at_its_end(how: str) -> None:
    async def answer(wire: Wire, _: bytes) -> bool:
        await wire.say(b"HTTP/1.1 200 OK\r\n\r\nhi")
        if how == "reset":
            linger = struct.pack("ii", 1, 0)  # the connection is reset, not ended
            wire.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            wire.die()
        else:
            await asyncio.sleep(SOON_S)
        return True

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = await asked(pool, 0.2 if how == "time-out" else SOON_S)
            if how == "closed here":
                pool.close()
            with pytest.raises(TimeoutError if how == "time-out" else ConnectionError):
                await connection.read()
            assert not connection.complete
            connection.release()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("parts", "touched", "message"),
    [
        ([b"SSH-2.0-x\r\n"], False, "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi"], True, "closed"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhi"], True, "closed"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"], False, "no HTTP"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"], False, "closed"),
        ([b"HTTP/1.1 101 x\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n"], False, "protocols"),
        ([b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 65536 + b"\r\n"] * 20], False, "larger than"),
        ([b""], False, "closed"),
    ],
)
def test_what_is_no_reply_is_a_connection_error(parts: list[bytes], touched: bool, message: str) -> None:
    async def body() -> None:
        async with pool_to(saying(*parts, close=True)) as pool:
            connection = pool.take() or await pool.connect()
            connection.send(b"GET / HTTP/1.1\r\n\r\n", None, SOON_S)
            with pytest.raises(ConnectionError, match=message):
                await connection.begin()
                await connection.read()
            assert connection.touched == touched and not connection.complete
            connection.release()
            assert pool.take() is None

    asyncio.run(body())


def test_a_connection_serves_many_requests_and_an_old_one_none() -> None:
    async def body() -> None:
        async with pool_to(saying(OK)) as pool:
            first = await asked(pool)
            for _ in range(3):
                await first.read()
                first.release()
                assert await asked(pool) is first
            second = await asked(pool)
            assert second is not first
            for connection in (first, second):
                await connection.read()
                connection.release()
            first.idle_since -= 10
            assert pool.take() is second and pool.take() is None
            second.release()
            pool.drain()
            assert pool.take() is None

    asyncio.run(body())


def test_an_unread_reply_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def answer(wire: Wire, _: bytes) -> bool:
        await wire.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n")
        assert await wire.reader.read() == b""
        gone.set()
        return True

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = await asked(pool)
            assert await connection.piece() == b"h"
            connection.release()
            async with asyncio.timeout(SOON_S):
                await gone.wait()

    asyncio.run(body())


def test_a_slow_reader_makes_the_engine_wait() -> None:
    piece = b"x" * 65536
    sent = 0

    async def answer(wire: Wire, _: bytes) -> bool:
        nonlocal sent
        wire.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1000 * len(piece)))
        for _turn in range(1000):
            wire.writer.write(piece)
            await wire.writer.drain()
            sent += 1
        return False

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = await asked(pool)
            before = -1
            while before < sent:  # until the engine can send no more
                before = sent
                await asyncio.sleep(0.2)
            assert sent < 900
            size = 0
            while got := await connection.piece():
                size += len(got)
            assert size == 1000 * len(piece) and connection.complete
            connection.release()
            assert pool.take() is connection

    asyncio.run(body())


def test_long_requests_and_slow_replies() -> None:
    async def answer(wire: Wire, request: bytes) -> bool | None:
        await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n%7d" % len(request.partition(b"\r\n\r\n")[2]))
        return None

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = await pool.connect()
            connection.send(b"POST / HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n", b"x" * 3_000_000, SOON_S)
            await connection.begin()
            assert await connection.read() == b"3000000"
            connection.release()
        async with pool_to(lambda wire, _: asyncio.sleep(SOON_S)) as pool:
            with pytest.raises(TimeoutError):
                await asked(pool, 0.05)

    asyncio.run(body())


def test_nobody_listens() -> None:
    async def body() -> None:
        async with wired(saying(OK)) as url:
            address = address_of(url)
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await Pool(address).connect()
        with pytest.raises(OSError):
            await Pool(Address("nowhere.invalid", 80, False, "")).connect()

    asyncio.run(body())


# ---------------------------------------------------------------- asking

GIVEN: dict[str, Any] = {"worker_wait_s": SOON_S, "probe_interval_s": 0.05}


class Rig:
    """An upstream over some engines, and what it counts."""

    def __init__(self, upstreams: list[Any], **settings: Any) -> None:
        self.settings = GatewaySettings.model_validate(GIVEN | {"upstreams": upstreams} | settings)
        self.table, self.metrics = WorkerTable(self.settings.upstreams), Metrics()
        self.upstream = Upstream(self.settings, self.table, lambda: 0.0, metrics=self.metrics)
        self.asked: list[Worker | None] = []

    async def __aenter__(self) -> Rig:
        await self.upstream.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.upstream.close()

    async def ask(self, key: str = "k", **more: Any) -> tuple[int, bytes]:
        given: dict[str, Any] = {"key": key, "run_id": "r", "model": None, "on_asking": self.asked.append}
        async with self.upstream.ask("POST", "/v1/x", b"{}", {}, **given | more) as response:
            return response.status, await response.read()

    def count(self, name: str) -> float:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("clawstream_gateway_" + name))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110 - the conditions are of the outside
                await asyncio.sleep(0.005)


def as_text(*urls: str) -> list[dict[str, str]]:
    return [{"url": url, "kind": "text"} for url in urls]


def run(*answers: Answer, test: Callable[..., Awaitable[None]]) -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            await test(*[await stack.enter_async_context(wired(a)) for a in answers])

    asyncio.run(body())


def key_of(first: str, rig: Rig) -> str:
    """A trajectory that belongs to this engine."""
    lanes = rig.upstream.lanes
    for i in range(1000):
        lane = lanes.pick(f"k{i}", ("r", None), ())
        if lane is not None and lane.worker.base_url == first:
            return f"k{i}"
    raise AssertionError("no trajectory belongs to it")


def test_kinds_are_found_and_only_ours_are_asked_to_capture() -> None:
    async def body() -> None:
        for kind in ("captured", "vllm", "text"):
            engine = ScriptedEngine(lambda _: Script([HI]), kind)
            async with engine.serve() as url, Rig([url]) as rig:
                assert [w.kind for w in rig.upstream.ready] == [kind]
                bodies = lambda worker: json.dumps(ASK | {"kind": worker.kind}).encode()  # noqa: E731
                async with rig.upstream.ask(
                    "POST", "/v1/chat/completions", bodies, {"content-type": "application/json"},
                    key="k", run_id="r", model="policy",
                ) as response:  # fmt: skip
                    assert response.status == 200 and response.worker.kind == kind
                    assert (response.header("content-type") or "").startswith("application/json")
                    await response.read()
                assert engine.requests[0]["kind"] == kind
                sent = {k.lower(): v for k, v in engine.headers[0].items()}
                assert ("x-clawstream-capture" in sent) == (kind == "captured")

    asyncio.run(body())


def test_an_engine_that_is_away_is_passed_over_at_once_and_comes_back() -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            here = await stack.enter_async_context(wired(saying(OK)))
            engine = ScriptedEngine(lambda _: Script([HI]))
            async with engine.serve() as there:
                port = int(there.rsplit(":", 1)[1])
                rig = await stack.enter_async_context(Rig([{"url": here, "kind": "text"}, there]))
                key = key_of(there, rig)
            assert await rig.ask(key) == (200, b"hi")
            await rig.until(lambda: rig.upstream.lanes.states()[there] == "out")
            assert [w.base_url for w in rig.upstream.ready] == [here]
            assert rig.count("engine_outages_total") == 1 and rig.count("engines{") == 2
            async with engine.serve(port):
                await rig.until(lambda: len(rig.upstream.ready) == 2)
                assert (await rig.ask(key, model="x"))[0] == 404  # served by that one again

    asyncio.run(body())


@pytest.mark.parametrize("how", ["before", "head"])
def test_a_connection_that_breaks_before_a_byte_is_asked_once_elsewhere(how: str) -> None:
    async def breaks(wire: Wire, _: bytes) -> bool:
        if how == "head":
            await wire.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        wire.die()
        return True

    async def test(broken: str, whole: str) -> None:
        async with Rig(as_text(broken, whole)) as rig:
            assert await rig.ask(key_of(broken, rig)) == (200, b"hi")
            assert [w and w.base_url for w in rig.asked] == [broken, whole]  # never None: it may have sampled
            assert rig.count('upstream_retries_total{reason="broken"}') == 1
        async with Rig(as_text(broken)) as rig:
            with pytest.raises(UpstreamFailed, match="went away"):
                await rig.ask()
            assert len(rig.asked) == 2

    run(breaks, saying(OK), test=test)


def test_what_breaks_after_a_byte_is_the_calls_error() -> None:
    async def breaks(wire: Wire, _: bytes) -> bool:
        await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
        wire.die()
        return True

    async def test(broken: str, whole: str) -> None:
        async with Rig(as_text(broken, whole)) as rig:
            key = key_of(broken, rig)
            with pytest.raises(UpstreamFailed):
                await rig.ask(key)
            assert len(rig.asked) == 1
            async with rig.upstream.ask("POST", "/v1/x", None, {}, key=key, run_id="r", model=None) as response:
                pieces = response.pieces()
                assert await anext(pieces) == b"hi"
                with pytest.raises(UpstreamFailed):
                    await anext(pieces)

    run(breaks, saying(OK), test=test)


BUSY = b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n"
LIMITED = b"HTTP/1.1 429 x\r\nretry-after: 9\r\ncontent-length: 4\r\n\r\nslow"


@pytest.mark.parametrize(("reply", "reason"), [(BUSY, "busy"), (LIMITED, "limited")])
def test_an_engine_that_has_enough_gives_way_to_another(reply: bytes, reason: str) -> None:
    async def test(full: str, free: str) -> None:
        async with Rig(as_text(full, free)) as rig:
            key = key_of(full, rig)
            assert await rig.ask(key) == (200, b"hi")
            assert [w and w.base_url for w in rig.asked] == [full, None, free]
            assert rig.count(f'upstream_retries_total{{reason="{reason}"}}') == 1
            if reason == "limited":  # the next call does not even try
                rig.asked.clear()
                assert await rig.ask(key) == (200, b"hi") and len(rig.asked) == 1

    run(saying(reply), saying(OK), test=test)


def test_a_providers_own_refusal_passes_when_nobody_else_is_free() -> None:
    async def test(full: str) -> None:
        async with Rig(as_text(full)) as rig:
            async with rig.upstream.ask("POST", "/v1/x", None, {}, key="k", run_id="r", model=None) as response:
                assert (response.status, response.header("retry-after")) == (429, "9")
                assert await response.read() == b"slow"
            assert rig.upstream.ready != []

    run(saying(LIMITED), test=test)
    run(saying(BUSY), test=lambda url: _status_is(url, 503))


async def _status_is(url: str, status: int) -> None:
    async with Rig(as_text(url)) as rig:
        assert (await rig.ask())[0] == status


def test_our_own_engine_that_is_busy_is_asked_again_until_the_wait_is_over() -> None:
    async def test(url: str) -> None:
        async with Rig([{"url": url, "kind": "vllm"}], worker_wait_s=0.2) as rig:
            with pytest.raises(NoWorker, match="503"):
                await rig.ask()
            assert len(rig.asked) > 2

    async def answer(wire: Wire, request: bytes) -> bool | None:
        await wire.say(OK if b"/health" in request else BUSY)
        return None

    run(answer, test=test)


def test_a_provider_that_failed_is_tried_by_one_call() -> None:
    failing, requests = [True], []

    async def answer(wire: Wire, request: bytes) -> bool | None:
        requests.append(request)
        if failing[0]:
            wire.die()
            return True
        await asyncio.sleep(0.05)
        await wire.say(OK)
        return None

    async def test(url: str) -> None:
        async with Rig(as_text(url)) as rig:
            for _ in range(2):
                with pytest.raises(UpstreamFailed):
                    await rig.ask()
            await rig.until(lambda: rig.upstream.lanes.states()[url] == "out")
            failing[0], before = False, len(requests)
            calls = [asyncio.create_task(rig.ask(f"k{i}")) for i in range(10)]
            await rig.until(lambda: rig.upstream.lanes.states()[url] == "trying")
            await rig.until(lambda: len(requests) > before)
            assert len(requests) == before + 1 and rig.count("waiting") == 9
            assert {await call for call in calls} == {(200, b"hi")}
            assert rig.upstream.lanes.states()[url] == "ready" and rig.count("waiting") == 0

    run(answer, test=test)


def test_an_engine_that_hangs_is_noticed_by_probes() -> None:
    hangs = [False]

    async def answer(wire: Wire, _: bytes) -> bool | None:
        if hangs[0]:
            await asyncio.sleep(SOON_S)
        await wire.say(OK)
        return None

    async def test(url: str) -> None:
        async with Rig([{"url": url, "kind": "vllm"}]) as rig:
            assert await rig.ask() == (200, b"hi")
            hangs[0] = True
            await rig.until(lambda: not rig.upstream.ready)
            hangs[0] = False
            assert await rig.ask() == (200, b"hi")

    run(answer, test=test)


def test_an_engine_that_is_too_slow_is_a_timeout_and_asked_only_once() -> None:
    async def test(url: str) -> None:
        async with Rig(as_text(url), upstream_timeout_s=0.1) as rig:
            with pytest.raises(UpstreamTimeout):
                await rig.ask()
            assert len(rig.asked) == 1

    run(lambda wire, _: asyncio.sleep(SOON_S), test=test)


def heard(url: str, state: Any) -> WorkerStatus:
    return WorkerStatus(
        worker_id="w", base_url=url, models=(), state=state, heartbeat_at=0, heartbeat_interval_ms=1000, started_at=0,
        loads=0,
    )  # fmt: skip


def test_calls_wait_while_weights_load_and_go_on_at_once() -> None:
    async def body() -> None:
        engine = ScriptedEngine(lambda _: Script([HI]))
        async with engine.serve() as url, Rig([]) as rig:
            rig.table.hear("w", heard(url, "loading"), 0.0)
            calls = [asyncio.create_task(rig.ask(f"k{i}")) for i in range(20)]
            await rig.until(lambda: rig.count("waiting") == 20)
            assert rig.upstream.lanes.states() == {"w": "loading"} and rig.count("engines{") == 1
            rig.table.hear("w", heard(url, "ready"), 0.0)
            assert {status for status, _ in await asyncio.gather(*calls)} == {404}
            assert {w and w.worker_id for w in rig.asked} == {"w"}
            assert rig.count("waiting") == 0

    asyncio.run(body())


@pytest.mark.parametrize("says", [b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n", LIMITED, b""])
def test_what_never_says_its_kind_is_a_provider_until_it_does(says: bytes) -> None:
    well = asyncio.Event()

    async def answer(wire: Wire, request: bytes) -> bool | None:
        if request.startswith(b"POST"):
            await wire.say(OK)
        elif well.is_set():
            await wire.say(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"version":"1"}')
        else:
            await wire.say(says)
        return None

    async def test(url: str) -> None:
        async with Rig([url]) as rig:
            assert await rig.ask() == (200, b"hi")
            assert [w.kind for w in rig.upstream.ready] == ["text"]
            well.set()
            await rig.until(lambda: [w.kind for w in rig.upstream.ready] == ["vllm"])

    run(answer, test=test)


@pytest.mark.parametrize("reports", [False, True])
def test_what_is_not_up_yet_is_no_provider(reports: bool) -> None:
    """Behind a proxy an engine that loads is a 503; a worker of ours is never a provider."""
    probes = 0

    async def answer(wire: Wire, request: bytes) -> bool | None:
        nonlocal probes
        probes += b"/version" in request
        await wire.say(LIMITED if reports else BUSY)
        return None

    async def test(url: str) -> None:
        async with Rig([] if reports else [url]) as rig:
            if reports:
                rig.table.hear("w", heard(url, "ready"), 0.0)
            _ = rig.upstream.ready
            await rig.until(lambda: probes > 2 * MUTE)
            assert rig.upstream.ready == []

    run(answer, test=test)


def test_a_host_that_cannot_be_looked_up_is_an_engine_that_is_away() -> None:
    async def body() -> None:
        async with Rig(as_text("http://h"), worker_wait_s=0.1) as rig:
            lane = rig.upstream.lanes.pick("k", ("r", None), ())
            assert lane is not None
            lane.pool = Pool(Address("a..b", 80, False, ""))
            with pytest.raises(NoWorker, match="cannot be reached"):
                await rig.ask()

    asyncio.run(body())


def test_a_probe_that_breaks_is_told_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(url: str) -> None:
        judged, again = 0, asyncio.Event()

        def judge(_: Lane) -> None:
            nonlocal judged
            judged += 1
            if judged == 1:
                raise RuntimeError("a bug")
            again.set()

        lane = Lane(Worker("w", url), asyncio.get_running_loop().time, 0.05, judge)
        lane.watch()
        async with asyncio.timeout(SOON_S):
            await lane.first_probe.wait()
            while "a bug" not in "".join(capsys.readouterr()):  # noqa: ASYNC110 - the log is a file
                await asyncio.sleep(0.005)
            lane.failed("probe", surely=True)
            await again.wait()
            while lane.state != "ready":  # it is probed again  # noqa: ASYNC110 - the state is the prober's
                await asyncio.sleep(0.005)
        await lane.close()

    run(saying(OK), test=test)


def test_waiting_ends_and_says_why() -> None:
    async def body() -> None:
        async with Rig([], worker_wait_s=0.05) as rig:
            with pytest.raises(NoWorker, match="none is known"):
                await rig.ask()
            rig.table.hear("w", heard("http://127.0.0.1:1", "loading"), 0.0)
            with pytest.raises(NoWorker, match="1 loading"):
                await rig.ask()
            call = asyncio.create_task(rig.ask())
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert rig.count("waiting") == 0 and rig.asked == []

    asyncio.run(body())


@pytest.mark.parametrize("how", ["draining", "tombstone", "removed"])
def test_a_draining_engine_ends_its_calls_and_gets_no_new_ones(how: str) -> None:
    gate, arrived = asyncio.Event(), asyncio.Event()

    async def answer(wire: Wire, request: bytes) -> bool | None:
        if request.startswith(b"POST"):
            arrived.set()
            await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nh")
            await gate.wait()
            await wire.say(b"i")
        else:
            await wire.say(OK)
        return None

    async def test(old: str, new: str) -> None:
        async with Rig([] if how != "removed" else as_text(old)) as rig:
            if how != "removed":
                rig.table.hear("w", heard(old, "ready"), 0.0)
            call = asyncio.create_task(rig.ask())
            await arrived.wait()
            if how == "removed":
                rig.table.configure(as_text(new))  # type: ignore[arg-type]
            else:
                rig.table.hear("w", heard(old, "draining") if how == "draining" else None, 0.0)
                rig.table.configure(as_text(new))  # type: ignore[arg-type]
            assert await rig.ask() == (200, b"hi")
            assert rig.asked[-1] is not None and rig.asked[-1].base_url == new and not call.done()
            gate.set()
            assert await call == (200, b"hi")

    run(answer, saying(OK), test=test)


def test_a_client_that_leaves_gives_everything_back() -> None:
    gone = asyncio.Event()

    async def answer(wire: Wire, _: bytes) -> bool:
        assert await wire.reader.read() == b""
        gone.set()
        return True

    async def test(url: str) -> None:
        async with Rig(as_text(url)) as rig:
            call = asyncio.create_task(rig.ask())
            await rig.until(lambda: rig.asked)
            await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(SOON_S):
                await gone.wait()
            lane = rig.upstream.lanes.pick("k", ("r", None), ())
            assert lane is not None and lane.in_flight == 0 and rig.upstream.lanes.states()[url] == "ready"

    run(answer, test=test)


def test_keys_and_prompts_are_in_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(url: str) -> None:
        upstreams = [
            {"url": url, "kind": "vllm", "api_key": "hunter2"},
            {"url": "http://127.0.0.1:1", "api_key": "hunter2"},
        ]
        async with Rig(upstreams, worker_wait_s=0.3) as rig:
            with pytest.raises(GatewayError) as error:
                async with rig.upstream.ask("POST", "/v1/x", b"prompt1", {}, key="k", run_id="r", model=None):
                    pass
            assert "hunter2" not in str(error.value) and "prompt1" not in str(error.value)
            await rig.until(lambda: not rig.upstream.ready)
        said = "".join(capsys.readouterr())
        assert "engine_out" in said and "hunter2" not in said and "prompt1" not in said

    run(saying(BUSY), test=test)


# ---------------------------------------------------------------- a whole gateway


@pytest.mark.parametrize("stream", [False, True])
def test_one_dead_upstream_of_two_costs_no_failed_call(tmp_path: Path, stream: bool) -> None:
    calls, agents, held = 6, 32, []

    async def holds(wire: Wire, request: bytes) -> bool | None:
        """An engine under load: it has shown nothing yet of its calls when it dies."""
        if request.startswith(b"POST"):
            held.append(request)
            await asyncio.sleep(SOON_S)
        told = b"x-clawstream-capture: 1\r\n" if b"/version" in request else b""
        await wire.say(b"HTTP/1.1 200 OK\r\n" + told + b"content-length: 2\r\n\r\n{}")
        return None

    async def agent(w: Trial, number: int) -> None:
        for _ in range(calls):
            url = f"{w.url}/t{number}/g/v1/chat/completions"
            async with w.http.post(url, json=ASK | {"stream": stream}) as response:
                text = await response.text()
                assert response.status == 200
                assert text.endswith("data: [DONE]\n\n") and "error" not in text if stream else "Hello" in text

    async def body() -> None:
        engine = ScriptedEngine(lambda _: Script([HI]))
        async with AsyncExitStack() as stack:
            dies = await stack.enter_async_context(AsyncExitStack())
            urls = [await stack.enter_async_context(engine.serve()), await dies.enter_async_context(wired(holds))]
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": {"upstreams": urls}})
            bus = MemoryBus()
            app = create_app(settings, bus, WorkerTable(settings.gateway.upstreams), CODEC)
            url = await stack.enter_async_context(running(app))
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
            w = Trial(url, engine, urls[0], bus, http, settings, CODEC)
            async with asyncio.TaskGroup() as work:
                for i in range(agents):
                    work.create_task(agent(w, i))
                await w.until(lambda: len(held) > 5 and len(engine.requests) > 5, SOON_S)
                await dies.aclose()
            steps = w.steps()
            assert Counter(s.trajectory_key for s in steps) == {f"t{i}": calls for i in range(agents)}
            assert len({s.step_id for s in steps}) == calls * agents and {s.status for s in steps} == {"ok"}
            assert await w.metric('clawstream_gateway_upstream_retries_total{reason="broken"}') >= len(held)
            assert await w.metric("clawstream_gateway_engine_outages_total") == 1
            assert await w.metric('clawstream_gateway_calls_total{status="answered"}') == calls * agents

    asyncio.run(body())
