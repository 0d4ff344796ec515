"""Small pure parts of the gateway: events, a client that leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.asgi.client_disconnect import DisconnectWatcher
from gateway.asgi.sse import ENDS, EventSplitter, data_of
from gateway.errors import ClientGone

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
