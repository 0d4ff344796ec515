"""Fetched, unprocessed records, bounded by records and bytes: a record may have ten megabytes.
Independent of the Kafka client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GATHER_S = 0.005
GATHER_ROUNDS = 6
"""Maximum rounds of gathering a batch while more records arrive. Each batch costs a delta and its
acknowledgement.
"""
MAX_QUEUED_CHUNKS = 6
BATCH_BYTES = 32 << 20
"""Keys, values and headers. A batch and the waiting records exceed it by at most one chunk and one
record.
"""
CHUNK_BYTES = 4 << 20

Fetched = Mapping[Any, Sequence[Any]]
"""aiokafka's records by its topic and partition."""


class FetchBuffer:
    """A queue with one producer and one consumer. records, batch_bytes: bounds of a batch;
    batch_bytes also bounds the waiting records.
    """

    def __init__(
        self, records: int, batch_bytes: int = BATCH_BYTES, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._records, self._bytes, self._chunk_bytes = records, batch_bytes, chunk_bytes
        self._chunks: asyncio.Queue[tuple[int, Fetched, int, int]] = asyncio.Queue()
        self._waiting_bytes = 0
        self._room = asyncio.Event()

    @property
    def holds_records(self) -> bool:
        """Whether fetched records wait for a batch."""
        return not self._chunks.empty()

    async def put(self, generation: int, fetched: Fetched) -> None:
        """Split a fetch into chunks and queue them in order. Waits while the buffer is full."""
        for chunk, count, size in _chunks(fetched, self._records, self._chunk_bytes):
            while self._waiting_bytes >= self._bytes or self._chunks.qsize() >= MAX_QUEUED_CHUNKS:
                self._room.clear()
                await self._room.wait()
            self._waiting_bytes += size
            self._chunks.put_nowait((generation, chunk, count, size))

    async def batch(self) -> list[tuple[int, Fetched]]:
        """Return the next batch, each chunk with its generation. Waits for the first chunk, and
        briefly for more.
        """
        first, count, size = self._taken(await self._chunks.get())
        batch = [first]
        for gathered in range(GATHER_ROUNDS):
            before = len(batch)
            while count < self._records and size < self._bytes and not self._chunks.empty():
                more, more_count, more_size = self._taken(self._chunks.get_nowait())
                batch.append(more)
                count, size = count + more_count, size + more_size
            if count >= self._records or size >= self._bytes or (gathered and len(batch) == before):
                break
            await asyncio.sleep(GATHER_S)
        return batch

    def _taken(self, chunk: tuple[int, Fetched, int, int]) -> tuple[tuple[int, Fetched], int, int]:
        generation, fetched, count, size = chunk
        self._waiting_bytes -= size
        self._room.set()
        return (generation, fetched), count, size


def _chunks(fetched: Fetched, records: int, size: int) -> Iterator[tuple[Fetched, int, int]]:
    """Split a fetch into chunks, each with its number of records and bytes. The record that reaches
    a bound ends the chunk.
    """
    chunk, count, used = dict[Any, list[Any]](), 0, 0
    for place, found in fetched.items():
        for record in found:
            chunk.setdefault(place, []).append(record)
            count, used = count + 1, used + _size(record)
            if count >= records or used >= size:
                yield chunk, count, used
                chunk, count, used = {}, 0, 0
    if chunk:
        yield chunk, count, used


def _size(record: Any) -> int:
    headers = (
        sum(len(key) + len(value or b"") for key, value in record.headers) if record.headers else 0
    )
    return len(record.value or b"") + len(record.key or b"") + headers
