"""The owner of durability: a record is durable in Kafka's in-sync replicas or fsynced in the spool.

1. A field that makes a record too large, and the images of a request, go to the blob store first
   (`blobs`). When the store is unavailable, the whole record waits in the spool.
2. If Kafka is reachable and the spool has no record of the same key, the record is sent to Kafka,
   and the caller waits for the acknowledgement.
3. Otherwise, or without an acknowledgement in time, the record is appended to the spool
   (`spool_writer`).
4. Records of a key that has records in the spool go only to the spool, and a record waits until the
   earlier records of its key have left step 1. This keeps the order of the key: records reach Kafka
   in the order of their replies.
5. `spool_drainer` sends the spool to Kafka.

A record that was sent but not acknowledged in time may be both in Kafka and in the spool. This is
harmless: the ids are the same, and readers drop duplicates.

A record needs no task and no thread of its own. A write continues when the caller of `record` is
cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

from clawstream.gateway.durability.blobs import Blobs, concerned
from clawstream.gateway.durability.log import LogProducer, Message
from clawstream.gateway.durability.pending_write import DeliveryStatus, PendingWrite
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_drainer import SpoolDrainer
from clawstream.gateway.durability.spool_writer import SpoolWriter, die_of_a_bug
from clawstream.gateway.errors import (
    BlobsUnavailable,
    KafkaUnavailable,
    NotRecorded,
    RecordTooLarge,
)
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.logs import logger

COUNT_S = 10.0
"""Interval between counts of the files that the operator may have removed from the spool."""
NO_RESERVATION = nullcontext()
"""Context manager of all calls while Kafka is reachable: one generator per call would cost more."""


class DeliveryManager:
    """Makes records durable. With acks=none, `record` returns before that; see gateway.acks.

    blobs: None: large records are sent unchanged.
    max_behind, max_age_s: See `SpoolDrainer`.
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
        self._producer, self._spool, self._metrics = producer, spool, metrics
        self._acks, self._blobs = acks, blobs
        self._writer = SpoolWriter(spool, producer, metrics)
        self._drainer = SpoolDrainer(
            spool, self._writer, producer, blobs, metrics, max_behind, max_age_s
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._fitting: dict[bytes, asyncio.Task[None]] = {}  # key to its last write in step 1

    async def start(self) -> None:
        """Open the spool and start to drain the segments of earlier processes.

        Raises:
            SpoolTaken: Another process uses the spool directory.
            SpoolFailed: The spool directory cannot be read or written.
        """
        await asyncio.to_thread(self._spool.open)
        for segment in self._spool.segments:
            self._writer.keys.update(segment.keys)
        spool, metrics = self._spool, self._metrics
        metrics.spool_bytes.set_function(lambda: spool.size_bytes)
        metrics.spool_quarantined_bytes.set_function(lambda: spool.quarantined_bytes)
        metrics.spool_damaged_bytes.set_function(lambda: spool.damaged_bytes)
        self._tasks = [
            asyncio.create_task(self._drainer.run(), name="spool-drain"),
            asyncio.create_task(self._count(), name="spool-count"),
        ]
        for task in self._tasks:
            task.add_done_callback(die_of_a_bug)

    async def _count(self) -> None:
        """Count the files aside in a thread: calls only look at the numbers."""
        while True:
            await asyncio.sleep(COUNT_S)
            async with self._writer.lock:
                await asyncio.to_thread(self._spool.count)

    async def close(self, drain_timeout_s: float = 10.0) -> None:
        """Finish the open writes, drain the spool if Kafka is reachable, and stop."""
        await self._none_open.wait()
        deadline = time.monotonic() + drain_timeout_s
        while (  # noqa: ASYNC110 - an outage or the time-out ends it too
            self._spool.segments and self._producer.reachable and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.02)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        async with self._writer.lock:
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
        return len(self._writer.keys)

    def reserve(self, size: int) -> AbstractContextManager[None]:
        """Reserve spool space for the records of a call that is about to be sampled.

        Nothing is reserved while Kafka is reachable.

        Args:
            size: Estimated bytes of the records.

        Raises:
            NoRoom: On entry: Kafka is unreachable and the spool has too little space.
        """
        return NO_RESERVATION if self._producer.reachable else self._writer.reserve(size)

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
        pending = PendingWrite(messages, waiter, self._ended)
        if not self._open:
            self._none_open.clear()
        self._open += 1
        if self._blobs is not None and (
            any(map(concerned, messages))
            or (self._fitting and any(m.key in self._fitting for m in messages))
        ):
            self._start_fitting(pending, self._blobs)
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

    def _start_fitting(self, pending: PendingWrite, blobs: Blobs) -> None:
        keys = {m.key for m in pending.messages}
        before = {self._fitting[key] for key in keys if key in self._fitting}
        task = asyncio.create_task(self._fit(pending, blobs, before))
        task.add_done_callback(die_of_a_bug)
        self._fitting |= dict.fromkeys(keys, task)

        def ended(_: object) -> None:
            for key in keys:
                if self._fitting[key] is task:
                    del self._fitting[key]

        task.add_done_callback(ended)

    async def _fit(
        self, pending: PendingWrite, blobs: Blobs, before: set[asyncio.Task[None]]
    ) -> None:
        """Make a write fit into Kafka; then, after the writes `before`, send or spool it."""
        error: BlobsUnavailable | NotRecorded | None = None
        try:
            pending.messages = await blobs.fit(pending.messages)
        except (BlobsUnavailable, NotRecorded) as failure:
            error = failure
        if before:
            await asyncio.wait(before)
        if error is None:
            self._send(pending)
        elif isinstance(error, NotRecorded):
            pending.fail(error)
        else:
            logger().warning("spooling", error=str(error))
            self._writer.add(pending)

    def _send(self, pending: PendingWrite) -> None:
        spooled = self._writer.keys
        if self._producer.reachable and not (
            spooled and any(m.key in spooled for m in pending.messages)
        ):
            self._producer.send(pending.messages, partial(self._sent, pending))
        else:
            self._writer.add(pending)

    def _sent(self, pending: PendingWrite, error: KafkaUnavailable | RecordTooLarge | None) -> None:
        """Handle the result of the producer."""
        if error is None:
            pending.complete("acknowledged")
        elif isinstance(error, RecordTooLarge):
            pending.fail(error)
        else:
            logger().warning("spooling", error=str(error))
            pending.maybe_sent = True
            self._writer.add(pending)

    def _ended(self, seconds: float, error: NotRecorded | None) -> None:
        """Count a write as completed."""
        self._metrics.ack_wait.observe(seconds)
        self._open -= 1
        if not self._open:
            self._none_open.set()
        if error is not None:
            self._metrics.not_recorded.inc()
            logger().error("not_recorded", error=str(error))
