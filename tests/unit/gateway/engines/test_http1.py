"""HTTP to an engine over real sockets: lengths of replies, reuse and loss of connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.ports import free_port
from support.wire import OK, SOON_S, Answer, Rig, Wire, as_text, run, saying, wired

from clawstream.gateway.engines.http1 import Address, Connection, Pool, address_of
from clawstream.gateway.errors import UpstreamFailed

pytestmark = pytest.mark.usefixtures("each_event_loop")


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


@pytest.mark.parametrize(
    ("parts", "close", "kept"),
    [
        ([OK], False, True),
        ([bytes([b]) for b in OK], False, True),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", OK], False, True),
        (
            [
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n",
                b"1\r\ni\r\n0\r\n\r\n",
            ],
            False,
            True,
        ),
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
            assert (
                connection.status == 200
                and await connection.read() == b"hi"
                and connection.complete
            )
            connection.release()
            assert pool.take() is (connection if kept else None)

    asyncio.run(body())


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_replies_without_a_body(reply: bytes) -> None:
    async def body() -> None:
        async with pool_to(saying(reply)) as pool:
            for _ in range(2):
                connection = await asked(pool)
                assert (
                    connection.complete
                    and await connection.read() == b"" == await connection.piece()
                )
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
        (b"transfer-encoding: chunked", b"2\r\nhi\r\n0\r\n\r\n")
        if chunked
        else (b"content-length: 2", b"hi")
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
        head = (
            b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (64 * len(piece))
        )
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
            async with rig.call(
                "POST", "/v1/x", None, {}, key="k", run_id="r", model=None
            ) as response:
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
            linger = struct.pack("ii", 1, 0)  # resets the connection instead of closing it
            wire.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
            wire.die()
        else:
            await asyncio.sleep(SOON_S)
        return True

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = pool.take() or await pool.connect()
            connection.send(
                b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", None, 0.2 if how == "time-out" else SOON_S
            )
            with pytest.raises(TimeoutError if how == "time-out" else ConnectionError):
                await connection.begin()
                if how == "closed here":
                    pool.close()
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
def test_what_is_no_reply_is_a_connection_error(
    parts: list[bytes], touched: bool, message: str
) -> None:
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
        await wire.say(
            b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n%7d"
            % len(request.partition(b"\r\n\r\n")[2])
        )
        return None

    async def body() -> None:
        async with pool_to(answer) as pool:
            connection = await pool.connect()
            connection.send(
                b"POST / HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n", b"x" * 3_000_000, SOON_S
            )
            await connection.begin()
            assert await connection.read() == b"3000000"
            connection.release()
        async with pool_to(lambda wire, _: asyncio.sleep(SOON_S)) as pool:
            with pytest.raises(TimeoutError):
                await asked(pool, 0.05)

    asyncio.run(body())


def test_nobody_listens() -> None:
    async def body() -> None:
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await Pool(Address("127.0.0.1", free_port(), False, "")).connect()
        with pytest.raises(OSError):
            await Pool(Address("nowhere.invalid", 80, False, "")).connect()

    asyncio.run(body())
