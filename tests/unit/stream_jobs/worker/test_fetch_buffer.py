"""The fetch buffer bounds waiting records by bytes and by count, and keeps their order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clawstream.stream_jobs.worker.fetch_buffer import FetchBuffer


def record(offset: int, size: int) -> Any:
    return SimpleNamespace(offset=offset, key=None, value=bytes(size), headers=[])


@given(st.lists(st.lists(st.integers(0, 60), max_size=8), max_size=8))
def test_batches_are_bounded_and_nothing_is_lost_or_out_of_order(fetches: list[list[int]]) -> None:
    """Limits: batches of 5 records or 100 bytes, chunks of 25 bytes; records of up to 60 bytes."""

    async def main() -> None:
        buffer = FetchBuffer(5, 100, 25)
        offset = 0
        fetched = list[dict[str, list[Any]]]()
        for sizes in fetches:
            fetched.append({"p": [record(offset + i, size) for i, size in enumerate(sizes)]})
            offset += len(sizes)

        async def put() -> None:
            for fetch in fetched:
                await buffer.put(1, fetch)

        putting = asyncio.create_task(put())
        came: list[int] = []
        while len(came) < offset:
            batch = [r for _, chunk in await buffer.batch() for r in chunk["p"]]
            assert len(batch) < 5 + 5 and sum(len(r.value) for r in batch) < 100 + 25 + 60
            came += [r.offset for r in batch]
        await putting
        assert came == list(range(offset))

    asyncio.run(main())


def test_who_puts_waits_while_there_is_enough() -> None:
    async def main() -> None:
        buffer = FetchBuffer(500, 100, 25)
        putting = asyncio.create_task(buffer.put(1, {"p": [record(i, 50) for i in range(10)]}))
        await asyncio.sleep(0)
        assert not putting.done() and buffer._waiting_bytes == 100
        sizes = list[int]()
        while sum(sizes) < 10:
            sizes.append(sum(len(chunk["p"]) for _, chunk in await buffer.batch()))
        await putting
        assert max(sizes) == 2

    asyncio.run(main())
