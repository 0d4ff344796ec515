"""Appends records to the spool. Records that arrive during an fsync share the next fsync."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from clawstream.gateway.durability.log import LogProducer
from clawstream.gateway.durability.pending_write import PendingWrite
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_frames import frame_bytes
from clawstream.gateway.errors import NoRoom, NotRecorded, SpoolFailed, SpoolFull
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.process.lifecycle import die


class SpoolWriter:
    """Writes to an open spool.

    keys: Records per key, from the decision to spool them until they have left the spool.
    lock: Held while a thread works on the files of the spool.
    appended: Set when a record was appended.
    """

    def __init__(self, spool: Spool, producer: LogProducer, metrics: Metrics) -> None:
        self._spool, self._producer, self._metrics = spool, producer, metrics
        self.keys: Counter[bytes] = Counter()
        self.lock = asyncio.Lock()
        self.appended = asyncio.Event()
        self._waiting: list[PendingWrite] = []
        self._task: asyncio.Task[None] | None = None
        self._reserved = 0

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserve space for records that are not made yet.

        Args:
            size: Estimated bytes of the records.

        Raises:
            NoRoom: On entry: the spool has too little space.
        """
        if self._reserved + size > self._spool.free_bytes:
            self._metrics.spool_full.inc()
            raise NoRoom(
                "Kafka is away and the spool has no room: nothing was sampled, try again later"
            )
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    def add(self, pending: PendingWrite) -> None:
        """Append the records of a write, then complete the write; or fail it with NotRecorded."""
        self.keys.update(m.key for m in pending.messages)
        self._waiting.append(pending)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write(), name="spool-write")
            self._task.add_done_callback(die_of_a_bug)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove records that have left the spool from `keys`."""
        for key in keys:
            self.keys[key] -= 1
            if self.keys[key] <= 0:
                del self.keys[key]

    async def _write(self) -> None:
        while self._waiting:
            async with self.lock:
                batch: list[PendingWrite] = []
                room = self._spool.free_bytes
                waiting, self._waiting = self._waiting, []
                for pending in waiting:
                    size = sum(map(frame_bytes, pending.messages))
                    if size <= room:
                        room -= size
                        batch.append(pending)
                    else:
                        self._metrics.spool_full.inc()
                        self._fail(pending, SpoolFull("Kafka is away and the spool is full"))
                if batch:
                    await self._append(batch)
        self.appended.set()

    async def _append(self, batch: Sequence[PendingWrite]) -> None:
        messages = [m for pending in batch for m in pending.messages]
        maybe_sent = any(pending.maybe_sent for pending in batch)
        try:
            await asyncio.to_thread(
                self._spool.append, messages, maybe_sent, self._producer.position
            )
        except (NotRecorded, OSError) as error:
            for pending in batch:
                self._fail(pending, SpoolFailed(f"spool: {error}"))
        else:
            for pending in batch:
                pending.complete("spooled")

    def _fail(self, pending: PendingWrite, error: NotRecorded) -> None:
        self.forget(m.key for m in pending.messages)
        pending.fail(error)


def die_of_a_bug(task: asyncio.Task[None]) -> None:
    """End the process when the writer or the drainer ends with an error.

    Otherwise, records would stay in the spool and callers would wait forever. A restart continues
    the work.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        die(error)
