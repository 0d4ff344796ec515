"""The owner of durability: a record counts once Kafka's in-sync replicas have it, or once it lies fsynced in the spool.

1. Kafka is well and nothing of the record's key waits in the spool: publish, wait for the acknowledgement.
2. Otherwise, or without an acknowledgement in time: append to the spool. What comes in while an fsync runs shares the next one.
3. A key with records in the spool is only appended there, so the order of one key holds: what was answered first is on the log first.
4. The drain sends the oldest segment, waits for all acknowledgements, removes it, and goes on to the next. A crash in between
   sends it again: the ids are the same, and readers drop what they have.

A record that was published but not acknowledged in time may end up both on the log and in the spool: harmless for the same reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from gateway.bus import Bus, Message
from gateway.errors import BusUnavailable, NoRoom, NotRecorded, RecordTooLarge, SpoolFailed, SpoolFull
from gateway.metrics import Metrics
from gateway.spool import Segment, Spool, frame
from runtime.lifecycle import die
from runtime.telemetry import logger

Receipt = Literal["acknowledged", "spooled", "unconfirmed"]
RETRY_S = 0.25
"""How often the drain looks whether Kafka is back."""


class _Waiting(NamedTuple):
    data: bytes
    keys: list[bytes]
    done: asyncio.Future[None]


class Journal:
    """Records, durably. acks=none answers before: see gateway.acks."""

    def __init__(self, bus: Bus, spool: Spool, metrics: Metrics, acks: Literal["all", "none"] = "all") -> None:
        self._bus, self._spool, self._metrics, self._acks = bus, spool, metrics, acks
        self._in_spool: Counter[bytes] = (
            Counter()
        )  # per key, from the moment it is decided to spool until it is drained
        self._waiting: list[_Waiting] = []
        self._reserved = 0
        self._files = asyncio.Lock()
        self._tasks: set[asyncio.Task[Receipt]] = set()
        self._writer: asyncio.Task[None] | None = None
        self._drainer: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    async def start(self) -> None:
        """Open the spool and begin to drain what an earlier process left. Raises SpoolTaken or SpoolFailed."""
        await asyncio.to_thread(self._spool.open)
        for segment in self._spool.segments:
            self._in_spool.update(segment.keys)
        self._show()
        self._work.set()
        self._drainer = asyncio.create_task(self._drain(), name="spool-drain")
        self._drainer.add_done_callback(_die_of_a_bug)

    async def close(self, drain_timeout_s: float = 10.0) -> None:
        """Finish what is being recorded, drain the spool if Kafka is there, end."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        deadline = time.monotonic() + drain_timeout_s
        while self._spool.segments and self._bus.reachable and time.monotonic() < deadline:
            self._work.set()
            await asyncio.sleep(0.02)
        if self._drainer is not None:
            self._drainer.cancel()
            await asyncio.wait([self._drainer])
        async with self._files:
            self._spool.close()

    @property
    def spooled_bytes(self) -> int:
        """Bytes that wait in the spool."""
        return self._spool.size_bytes

    @property
    def spooled_keys(self) -> int:
        """Keys that have records in the spool."""
        return len(self._in_spool)

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Room for a call that is about to be sampled. Raises NoRoom when Kafka is away and the spool could not take it.

        size: estimated bytes of its records. With Kafka well nothing is reserved.
        """
        if self._bus.reachable:
            yield
            return
        if self._reserved + size > self._spool.free_bytes:
            self._metrics.spool_full.inc()
            raise NoRoom("Kafka is away and the spool is full: nothing was sampled, try again later")
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    async def record(self, messages: Sequence[Message]) -> Receipt:
        """Make them durable. Raises NotRecorded when neither Kafka nor the spool took them. Runs on when the caller is cancelled."""
        task = asyncio.create_task(self._commit(messages))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        if self._acks == "none":
            return "unconfirmed"
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Receipt]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._metrics.not_recorded.inc()
            logger().error("not_recorded", error=str(error))

    async def _commit(self, messages: Sequence[Message]) -> Receipt:
        began = time.perf_counter()
        try:
            if self._bus.reachable and not any(m.key in self._in_spool for m in messages):
                try:
                    await self._bus.publish(messages)
                    return "acknowledged"
                except BusUnavailable as error:
                    logger().warning("spooling", error=str(error))
            await self._append(messages)
            return "spooled"
        finally:
            self._metrics.ack_wait.observe(time.perf_counter() - began)

    # -- spool

    async def _append(self, messages: Sequence[Message]) -> None:
        keys = [m.key for m in messages]
        self._in_spool.update(keys)
        try:
            done = asyncio.get_running_loop().create_future()
            self._waiting.append(_Waiting(b"".join(map(frame, messages)), keys, done))
            if self._writer is None or self._writer.done():
                self._writer = asyncio.create_task(self._write())
            await done
        except NotRecorded:
            self._forget(keys)
            raise

    async def _write(self) -> None:
        while self._waiting:
            async with self._files:
                taken, room = [], self._spool.free_bytes
                for entry in self._waiting:
                    if len(entry.data) <= room:
                        room -= len(entry.data)
                        taken.append(entry)
                    else:
                        self._metrics.spool_full.inc()
                        entry.done.set_exception(SpoolFull("Kafka is away and the spool is full"))
                self._waiting = []
                if taken:
                    await self._write_together(taken)
            self._show()
        self._work.set()

    async def _write_together(self, taken: list[_Waiting]) -> None:
        try:
            await asyncio.to_thread(self._spool.append, [entry.data for entry in taken])
        except (NotRecorded, OSError) as error:
            for entry in taken:
                entry.done.set_exception(SpoolFailed(f"spool: {error}"))
            return
        for entry in taken:
            self._spool.count(entry.keys)
            entry.done.set_result(None)

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._in_spool.subtract(keys)
        for key in keys:
            if self._in_spool[key] <= 0:
                del self._in_spool[key]

    def _show(self) -> None:
        self._metrics.spool_bytes.set(self._spool.size_bytes)

    # -- drain

    async def _drain(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._spool.segments:
                try:
                    went_well = self._bus.reachable and await self._drain_first()
                except OSError as error:
                    logger().error("spool_unreadable", error=str(error))
                    went_well = False
                if not went_well:
                    await asyncio.sleep(RETRY_S)

    async def _drain_first(self) -> bool:
        async with self._files:
            found = await asyncio.to_thread(self._spool.first)
        if found is None:
            return True
        segment, messages = found
        try:
            await self._bus.publish(messages)
        except BusUnavailable as error:
            logger().warning("spool_drain_waits", error=str(error))
            return False
        except RecordTooLarge:
            if not await self._drain_singly(messages):
                return False
        await self._remove(segment)
        logger().info("spool_drained", records=len(messages), left_bytes=self._spool.size_bytes)
        return True

    async def _drain_singly(self, messages: Sequence[Message]) -> bool:
        for message in messages:
            try:
                await self._bus.publish([message])
            except BusUnavailable:
                return False
            except RecordTooLarge as error:
                path = await asyncio.to_thread(self._spool.set_aside, message)
                logger().error("spool_record_refused", kept_in=str(path), topic=message.topic, error=str(error))
        return True

    async def _remove(self, segment: Segment) -> None:
        async with self._files:
            await asyncio.to_thread(self._spool.remove, segment)
        self._forget(list(segment.keys.elements()))
        self._show()


def _die_of_a_bug(drainer: asyncio.Task[None]) -> None:
    """A drain that ends unseen would leave answered records in the spool for ever: better a crash and a restart."""
    if not drainer.cancelled() and (error := drainer.exception()) is not None:
        die(error)
