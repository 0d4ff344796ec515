"""The owner of durability: a record is durable in Kafka's in-sync replicas or fsynced in the spool.

1. A field that makes a record too large goes to the blob store first (`blobs`). When the store is
   unavailable, the whole record waits in the spool.
2. If Kafka is reachable and the spool has no record of the same key, the record is sent to Kafka,
   and the caller waits for the acknowledgement.
3. Otherwise, or without an acknowledgement in time, the record is appended to the spool. Records
   that arrive during an fsync share the next fsync.
4. Records of a key that has records in the spool go only to the spool. This keeps the order of the
   key: records reach Kafka in the order of their replies.
5. The drain sends the oldest segment, waits for all acknowledgements, deletes the segment and
   continues with the next one. After a crash in between, the segment is sent again: the ids are the
   same, and readers drop duplicates. The readable records of a damaged segment are sent, and its
   file is kept beside the spool.

A record that was sent but not acknowledged in time may be both in Kafka and in the spool. This is
harmless for the same reason, as long as the lake remembers its id. Older segments are held
(`_too_old`) for `clawstream spool drain`, which checks each record against the lake first.

A record needs no task and no thread of its own. A write continues when the caller of `record` is
cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from gateway.durability.blobs import Blobs
from gateway.durability.log import LogProducer, Message
from gateway.durability.spool import Segment, Spool
from gateway.errors import (
    BlobsUnavailable,
    KafkaUnavailable,
    NoRoom,
    NotRecorded,
    RecordTooLarge,
    SpoolFailed,
    SpoolFull,
)
from gateway.metrics import Metrics
from runtime.logs import logger
from runtime.process.lifecycle import die
from schemas.topics import MAX_RECORD_BYTES

DeliveryStatus = Literal["acknowledged", "spooled", "unconfirmed"]
NO_RESERVATION = nullcontext()
"""Context manager of all calls while Kafka is reachable: one generator per call would cost more."""
RETRY_S = 0.25
"""Interval at which the drain checks whether Kafka is reachable again."""


class _PendingWrite:
    """One call of `record`. waiter: The future of the caller; None: the caller does not wait."""

    __slots__ = ("began", "delivery", "maybe_sent", "messages", "waiter")

    def __init__(
        self,
        delivery: DeliveryManager,
        messages: Sequence[Message],
        waiter: asyncio.Future[DeliveryStatus] | None,
        began: float,
    ) -> None:
        self.delivery, self.messages, self.waiter, self.began = delivery, messages, waiter, began
        self.maybe_sent = False

    def sent(self, error: KafkaUnavailable | RecordTooLarge | None) -> None:
        """Handle the result of the producer."""
        if error is None:
            self.delivery.ended(self)
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result("acknowledged")
        elif isinstance(error, RecordTooLarge):
            self.failed(error)
        else:
            logger().warning("spooling", error=str(error))
            self.maybe_sent = True
            self.delivery.spool(self)

    def spooled(self) -> None:
        """Complete the write: the records are fsynced in the spool."""
        self.delivery.ended(self)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result("spooled")

    def failed(self, error: NotRecorded) -> None:
        """Complete the write with an error: neither Kafka nor the spool has the records."""
        self.delivery.ended(self)
        self.delivery.lost(error)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_exception(error)


class DeliveryManager:
    """Makes records durable. With acks=none, `record` returns before that; see gateway.acks.

    blobs: None: large records are sent unchanged.
    max_behind: A segment is too old to be sent automatically after this many newer records in the
        steps topic, if some of its records may be in Kafka.
    max_age_s: A segment is too old to be sent automatically after this many seconds of the topic's
        timestamps.
    """

    def __init__(
        self,
        producer: LogProducer,
        spool: Spool,
        metrics: Metrics,
        acks: Literal["all", "none"] = "all",
        blobs: Blobs | None = None,
        max_behind: int = 100_000,
        max_age_s: float = 12 * 3600.0,
    ) -> None:
        self._producer, self._spool, self._metrics, self._acks, self._blobs = (
            producer,
            spool,
            metrics,
            acks,
            blobs,
        )
        self._max_behind, self._max_age_s = max_behind, max_age_s
        # Records per key, from the decision to spool them until they are drained.
        self._in_spool: Counter[bytes] = Counter()
        self._waiting: list[_PendingWrite] = []
        self._reserved = self._unreadable_counted = 0
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._files = asyncio.Lock()
        self._large: set[asyncio.Task[None]] = set()
        self._writer: asyncio.Task[None] | None = None
        self._drainer: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    async def start(self) -> None:
        """Open the spool and start to drain the segments of earlier processes.

        Raises:
            SpoolTaken: Another process uses the spool directory.
            SpoolFailed: The spool directory cannot be read or written.
        """
        await asyncio.to_thread(self._spool.open)
        for segment in self._spool.segments:
            self._in_spool.update(segment.keys)
        self._show()
        if self._spool.held_bytes:
            _say_held(self._spool.held_bytes)
        self._work.set()
        self._drainer = asyncio.create_task(self._drain(), name="spool-drain")
        self._drainer.add_done_callback(_die_of_a_bug)

    async def close(self, drain_timeout_s: float = 10.0) -> None:
        """Finish the open writes, drain the spool if Kafka is reachable, and stop."""
        await self._none_open.wait()
        deadline = time.monotonic() + drain_timeout_s
        while self._spool.segments and self._producer.reachable and time.monotonic() < deadline:
            self._work.set()
            await asyncio.sleep(0.02)
        if self._drainer is not None:
            self._drainer.cancel()
            await asyncio.wait([self._drainer])
        async with self._files:
            self._spool.close()
        if self._blobs is not None:
            self._blobs.close()

    @property
    def spooled_bytes(self) -> int:
        """Bytes that wait in the spool to be sent."""
        return self._spool.size_bytes

    @property
    def spooled_keys(self) -> int:
        """Keys that have records in the spool."""
        return len(self._in_spool)

    def reserve(self, size: int) -> AbstractContextManager[None]:
        """Reserve spool space for the records of a call that is about to be sampled.

        Nothing is reserved while Kafka is reachable.

        Args:
            size: Estimated bytes of the records.

        Raises:
            NoRoom: On entry: Kafka is unreachable and the spool has too little space.
        """
        return NO_RESERVATION if self._producer.reachable else self._reserving(size)

    @contextmanager
    def _reserving(self, size: int) -> Iterator[None]:
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

    async def record(self, messages: Sequence[Message]) -> DeliveryStatus:
        """Make messages durable. The write continues when the caller is cancelled.

        Raises:
            NotRecorded: Neither Kafka nor the spool accepted the messages.
        """
        if not messages:
            return "acknowledged" if self._acks == "all" else "unconfirmed"
        waiter: asyncio.Future[DeliveryStatus] | None = None
        if self._acks == "all":
            waiter = asyncio.get_running_loop().create_future()
        pending = _PendingWrite(self, messages, waiter, time.perf_counter())
        if not self._open:
            self._none_open.clear()
        self._open += 1
        if self._blobs is not None and any(len(m.value) > MAX_RECORD_BYTES for m in messages):
            task = asyncio.create_task(self._fit(pending, self._blobs))
            self._large.add(task)
            task.add_done_callback(self._large.discard)
        else:
            self._send(pending)
        if waiter is None:
            return "unconfirmed"
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # marks it as retrieved: the error is counted and logged already
            raise

    async def _fit(self, pending: _PendingWrite, blobs: Blobs) -> None:
        try:
            pending.messages = await blobs.fit(pending.messages)
        except RecordTooLarge as error:
            pending.failed(error)
        except BlobsUnavailable as error:
            logger().warning("spooling", error=str(error))
            self.spool(pending)
        else:
            self._send(pending)

    def _send(self, pending: _PendingWrite) -> None:
        if self._producer.reachable and not (
            self._in_spool and any(m.key in self._in_spool for m in pending.messages)
        ):
            self._producer.send(pending.messages, pending.sent)
        else:
            self.spool(pending)

    def ended(self, pending: _PendingWrite) -> None:
        """Count a write as completed, whatever its result."""
        self._metrics.ack_wait.observe(time.perf_counter() - pending.began)
        self._open -= 1
        if not self._open:
            self._none_open.set()

    def lost(self, error: NotRecorded) -> None:
        """Count and log a write that neither Kafka nor the spool accepted."""
        self._metrics.not_recorded.inc()
        logger().error("not_recorded", error=str(error))

    # -- spool

    def spool(self, pending: _PendingWrite) -> None:
        """Append the records to the spool. From now on, records of their keys go only there."""
        self._in_spool.update(m.key for m in pending.messages)
        self._waiting.append(pending)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name="spool-write")
            self._writer.add_done_callback(_die_of_a_bug)

    async def _write(self) -> None:
        while self._waiting:
            async with self._files:
                taken, room = [], self._spool.free_bytes
                waiting, self._waiting = self._waiting, []
                for pending in waiting:
                    data = b"".join(map(self._spool.frame, pending.messages))
                    if len(data) <= room:
                        room -= len(data)
                        taken.append((pending, data))
                    else:
                        self._metrics.spool_full.inc()
                        self._give_up(pending, SpoolFull("Kafka is away and the spool is full"))
                if taken:
                    await self._write_together(taken)
            self._show()
        self._work.set()

    async def _write_together(self, taken: Sequence[tuple[_PendingWrite, bytes]]) -> None:
        try:
            maybe_sent = any(pending.maybe_sent for pending, _ in taken)
            await asyncio.to_thread(
                self._spool.append, [data for _, data in taken], maybe_sent, self._producer.position
            )
        except (NotRecorded, OSError) as error:
            for pending, _ in taken:
                self._give_up(pending, SpoolFailed(f"spool: {error}"))
            return
        for pending, _ in taken:
            self._spool.count(m.key for m in pending.messages)
            pending.spooled()

    def _give_up(self, pending: _PendingWrite, error: NotRecorded) -> None:
        self._forget([m.key for m in pending.messages])
        pending.failed(error)

    def _forget(self, keys: Sequence[bytes]) -> None:
        self._in_spool.subtract(keys)
        for key in keys:
            if self._in_spool[key] <= 0:
                del self._in_spool[key]

    def _show(self) -> None:
        self._metrics.spool_bytes.set(self._spool.size_bytes)
        self._metrics.spool_held_bytes.set(self._spool.held_bytes)
        self._metrics.spool_damaged_bytes.set(self._spool.damaged_bytes)
        self._metrics.spool_unreadable_bytes.inc(
            self._spool.unreadable_bytes - self._unreadable_counted
        )
        self._unreadable_counted = self._spool.unreadable_bytes

    # -- drain

    async def _drain(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._spool.segments:
                try:
                    went_well = self._producer.reachable and await self._drain_first()
                except OSError as error:
                    logger().error("spool_unreadable", error=str(error))
                    went_well = False
                if not went_well:
                    await asyncio.sleep(RETRY_S)

    async def _drain_first(self) -> bool:
        if await self._too_old(self._spool.segments[0]):
            await self._hold(self._spool.segments[0])
            return True
        async with self._files:
            found = await asyncio.to_thread(self._spool.first)
            if found is None:
                return True
            segment, messages = found
            await asyncio.to_thread(self._spool.mark_sent, segment, self._producer.position)
        try:
            if messages:  # empty if the disk has lost all records
                await self._publish(messages)
        except (KafkaUnavailable, BlobsUnavailable) as error:
            logger().warning("spool_drain_waits", error=str(error))
            return False
        except RecordTooLarge:
            if not await self._drain_singly(messages):
                return False
        await self._remove(segment)
        logger().info("spool_drained", records=len(messages), left_bytes=self._spool.size_bytes)
        return True

    async def _publish(self, messages: Sequence[Message]) -> None:
        """Send messages; acknowledged on return.

        Raises:
            KafkaUnavailable: Kafka did not acknowledge all of them.
            BlobsUnavailable: The blob store did not accept a large field.
            RecordTooLarge: A message is larger than Kafka accepts.
        """
        if self._blobs is not None:
            messages = await self._blobs.fit(messages)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def sent(error: KafkaUnavailable | RecordTooLarge | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._producer.send(messages, sent)
        await done

    async def _drain_singly(self, messages: Sequence[Message]) -> bool:
        for message in messages:
            try:
                await self._publish([message])
            except (KafkaUnavailable, BlobsUnavailable):
                return False
            except RecordTooLarge as error:
                path = await asyncio.to_thread(self._spool.set_aside, message)
                logger().error(
                    "spool_record_refused", kept_in=str(path), topic=message.topic, error=str(error)
                )
        return True

    async def _remove(self, segment: Segment) -> None:
        async with self._files:
            await asyncio.to_thread(self._spool.remove, segment)
        self._forget(list(segment.keys.elements()))
        self._show()

    async def _too_old(self, segment: Segment) -> bool:
        """Return whether a second copy of the segment's records in Kafka could count twice.

        That is possible once assemble may have dropped their trajectories or the lake their ids.
        The decision depends on the records that the steps topic has received since. The own
        monotonic clock limits the age; a wall clock has no influence.
        """
        if segment.position is None:
            # A segment that was not sent began before Kafka was first reached. One that was sent
            # had a position, and the disk has lost it.
            return segment.maybe_sent
        try:
            passed = await self._producer.passed_since(segment.position)
        except KafkaUnavailable:
            return False  # sending fails as well
        age_s = self._spool.age_s(segment)
        if (passed.seconds if age_s is None else min(age_s, passed.seconds)) > self._max_age_s:
            return True
        return segment.maybe_sent and passed.records > self._max_behind

    async def _hold(self, segment: Segment) -> None:
        async with self._files:
            path = await asyncio.to_thread(self._spool.hold, segment)
        # The segment waits for the operator. New records of its keys do not wait.
        self._forget(list(segment.keys.elements()))
        self._show()
        _say_held(segment.size, str(path))


def _say_held(size: int, path: str | None = None) -> None:
    logger().error(
        "spool_held",
        bytes=size,
        path=path,
        action="too old to be sent by itself: run `clawstream spool drain`, "
        "which asks the lake for each record first",
    )


def _die_of_a_bug(task: asyncio.Task[None]) -> None:
    """Crash the process when the drain or the writer ends with an error.

    Otherwise, records would stay in the spool and callers would wait forever. A restart continues
    the work.
    """
    if not task.cancelled() and (error := task.exception()) is not None:
        die(error)
