"""Small parts of the gateway: events, client disconnects, the writes of a reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.asgi.client_disconnect import DisconnectWatcher
from clawstream.gateway.asgi.http_cycle import JOINED, Cycle
from clawstream.gateway.asgi.sse import ENDS, EventSplitter, data_of
from clawstream.gateway.errors import ClientGone

# ---------------------------------------------------------------- server-sent events


@given(
    st.lists(
        st.binary(min_size=1, max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b)
    ),
    st.data(),
)
def test_events_come_out_whole_however_they_come_in(
    lines: list[bytes], data: st.DataObject
) -> None:
    ends = [data.draw(st.sampled_from(ENDS)) for _ in lines]
    stream = b"".join(b"data: " + line + end for line, end in zip(lines, ends, strict=True))
    splitter, out, at = EventSplitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        out += splitter.feed(stream[at : at + size])
        at += size
    assert out == [b"data: " + line + end for line, end in zip(lines, ends, strict=True)]
    assert [data_of(event) for event in out] == lines


def test_data_of_other_events() -> None:
    assert data_of(b": comment\n\n") is None
    assert data_of(b"event: ping\ndata: 1\ndata:2\n\n") == b"1\n2"


# ---------------------------------------------------------------- a client that leaves


def test_leaving_cancels_what_is_awaited_and_only_that() -> None:
    async def body() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        client = DisconnectWatcher(receive)
        async with client:
            await asyncio.sleep(0)
        assert not client.gone
        with pytest.raises(ClientGone):
            async with client:
                left.set()
                await asyncio.sleep(60)
        await asyncio.sleep(0)  # nothing is left over that would cancel us
        with pytest.raises(ClientGone):
            await client.__aenter__()

    asyncio.run(body())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def body() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def work() -> None:
            client = DisconnectWatcher(receive)
            try:
                async with client:
                    await asyncio.sleep(60)
            finally:
                client.stop()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


# ---------------------------------------------------------------- writes of a reply


class Wire:
    """A connection that keeps the bytes of each write."""

    def __init__(self) -> None:
        self.app: Any = None
        self.state = SimpleNamespace(default_headers=[])
        self.timeout_s = 1.0
        self.transport: Any = self
        self.writable = asyncio.Event()
        self.writable.set()
        self.closing = False
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.writes.append(b"".join(parts))

    def flow(self) -> None:
        pass

    def finished(self, cycle: Cycle) -> None:
        pass

    def abort(self) -> None:
        self.writes.append(b"aborted")


def writes_of(bodies: Sequence[bytes], length: int | None, method: str = "GET") -> list[bytes]:
    """Return the writes for a reply of an application."""

    async def app(_: Any, receive: Any, send: Any) -> None:
        told = [] if length is None else [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": told})
        for at, body in enumerate(bodies):
            more = at < len(bodies) - 1
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def serve() -> list[bytes]:
        wire = Wire()
        wire.app = app
        await Cycle(wire, {"method": method, "http_version": "1.1"}, True, False).run()
        return wire.writes

    return asyncio.run(serve())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("size", [0, 9, JOINED, JOINED + 1])
def test_a_reply_of_known_length_is_one_write(size: int) -> None:
    assert writes_of([b"x" * size], size) == [HEAD % size + b"x" * size]


def test_a_head_with_a_length_is_written_with_the_first_part_of_the_body() -> None:
    assert writes_of([b"ab", b"", b"c"], 3) == [HEAD % 3 + b"ab", b"c"]
    assert writes_of([b"", b"abc"], 3) == [HEAD % 3, b"abc"]
    assert writes_of([b"abc"], 3, "HEAD") == [HEAD % 3]


def test_the_head_of_a_stream_is_written_at_once() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert writes_of([], None) == [head, b"aborted"]
    assert writes_of([b"ab", b""], None) == [head, b"2\r\nab\r\n", b"0\r\n\r\n"]
