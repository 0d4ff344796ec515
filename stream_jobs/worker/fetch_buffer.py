"""What was fetched and is not yet processed, bounded by records and by bytes: a record may have ten megabytes. Knows no Kafka client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

GATHER_S = 0.005
GATHER_ROUNDS = 6
"""A batch is gathered for at most this many rounds, while more comes: each batch costs a delta and its acknowledgement."""
PIECES = 6
BATCH_BYTES = 32 << 20
"""Keys, values and headers. A batch and what waits behind it overshoot by a piece at most, and by its last record."""
PIECE_BYTES = 4 << 20

Fetched = Mapping[Any, Sequence[Any]]
"""aiokafka's records by its topic and partition."""


class FetchBuffer:
    """One puts, one takes. records: how many make a batch. batch_bytes: as many bytes make one, too, and as many may wait."""

    def __init__(
        self, records: int, batch_bytes: int = BATCH_BYTES, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._records, self._bytes, self._piece_bytes = records, batch_bytes, piece_bytes
        self._pieces: asyncio.Queue[tuple[int, Fetched, int, int]] = asyncio.Queue()
        self._waiting_bytes = 0
        self._room = asyncio.Event()

    async def put(self, generation: int, fetched: Fetched) -> None:
        """Cut a fetch into pieces and put them in, in order. Waits while there is enough."""
        for piece, count, size in _pieces(fetched, self._records, self._piece_bytes):
            while self._waiting_bytes >= self._bytes or self._pieces.qsize() >= PIECES:
                self._room.clear()
                await self._room.wait()
            self._waiting_bytes += size
            self._pieces.put_nowait((generation, piece, count, size))

    async def batch(self) -> list[tuple[int, Fetched]]:
        """The next batch, each piece with its generation. Waits for the first piece, and a little for more."""
        first, count, size = self._taken(await self._pieces.get())
        batch = [first]
        for gathered in range(GATHER_ROUNDS):
            before = len(batch)
            while count < self._records and size < self._bytes and not self._pieces.empty():
                more, more_count, more_size = self._taken(self._pieces.get_nowait())
                batch.append(more)
                count, size = count + more_count, size + more_size
            if count >= self._records or size >= self._bytes or (gathered and len(batch) == before):
                break
            await asyncio.sleep(GATHER_S)
        return batch

    def _taken(self, piece: tuple[int, Fetched, int, int]) -> tuple[tuple[int, Fetched], int, int]:
        generation, fetched, count, size = piece
        self._waiting_bytes -= size
        self._room.set()
        return (generation, fetched), count, size


def _pieces(fetched: Fetched, records: int, size: int) -> Iterator[tuple[Fetched, int, int]]:
    """A fetch in pieces that end with the record that makes them full. With each its records and bytes."""
    piece, count, used = dict[Any, list[Any]](), 0, 0
    for place, found in fetched.items():
        for record in found:
            piece.setdefault(place, []).append(record)
            count, used = count + 1, used + _size(record)
            if count >= records or used >= size:
                yield piece, count, used
                piece, count, used = {}, 0, 0
    if piece:
        yield piece, count, used


def _size(record: Any) -> int:
    headers = (
        sum(len(key) + len(value or b"") for key, value in record.headers) if record.headers else 0
    )
    return len(record.value or b"") + len(record.key or b"") + headers
