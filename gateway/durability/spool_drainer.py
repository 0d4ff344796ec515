"""Sends the records of the spool to Kafka as soon as it is reachable, the oldest segment first.

A segment is deleted after the acknowledgement of all its records. After a crash in between, it is
sent again: the ids are the same, and readers drop duplicates. Without a crash, only records that
Kafka did not acknowledge are sent again; the pause before doubles while Kafka acknowledges nothing.
A record that Kafka never accepts, or that cannot be read, goes into the file `rejected`.

Readers know a duplicate only as long as assemble knows the trajectories and the lake remembers the
ids; an older segment is quarantined for `clawstream spool drain`, which checks each record against
the lake first.
"""

from __future__ import annotations

import asyncio
from functools import partial

from clawstream.gateway.durability.blobs import Blobs
from clawstream.gateway.durability.log import LogProducer, Message
from clawstream.gateway.durability.segment import Segment
from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.durability.spool_writer import SpoolWriter
from clawstream.gateway.errors import (
    BlobsUnavailable,
    KafkaUnavailable,
    RecordTooLarge,
    RecordUnfit,
)
from clawstream.gateway.metrics import Metrics
from clawstream.runtime.logs import logger

RETRY_S = 0.25
"""Interval between checks whether Kafka is reachable again, and after a first failed attempt."""
RETRY_MAX_S = 10.0
"""Longest pause between attempts: a slow Kafka also appends what it acknowledges too late."""


class SpoolDrainer:
    """Drains an open spool.

    blobs: None: large records are sent unchanged.
    max_behind: A segment is too old after this many newer records in the steps topic, if some of
        its records may be in Kafka.
    max_age_s: A segment is too old after this many seconds of the topic's timestamps.
    """

    def __init__(
        self,
        spool: Spool,
        writer: SpoolWriter,
        producer: LogProducer,
        blobs: Blobs | None,
        metrics: Metrics,
        max_behind: int,
        max_age_s: float,
    ) -> None:
        self._spool, self._writer, self._producer, self._blobs = spool, writer, producer, blobs
        self._metrics, self._max_behind, self._max_age_s = metrics, max_behind, max_age_s
        self._counted_bytes = 0
        self._pause_s = RETRY_S  # before the next attempt
        # Of the oldest segment: position in it to each record that is not acknowledged yet.
        self._left: tuple[Segment, dict[int, Message]] | None = None

    async def run(self) -> None:
        """Drain until cancelled."""
        self._count_unreadable()
        if self._spool.quarantined_bytes:
            _report_quarantined(self._spool.quarantined_bytes)
        while True:
            while self._spool.segments:
                if not self._producer.reachable:
                    await asyncio.sleep(RETRY_S)
                    continue
                try:
                    await self._drain_first()
                    self._pause_s = RETRY_S
                    continue
                except (KafkaUnavailable, BlobsUnavailable) as error:
                    logger().warning("spool_drain_waits", error=str(error), seconds=self._pause_s)
                except OSError as error:
                    logger().error("spool_unreadable", error=str(error))
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)
            await self._writer.appended.wait()
            self._writer.appended.clear()

    async def _drain_first(self) -> None:
        """Send or quarantine the oldest segment.

        Raises:
            KafkaUnavailable, BlobsUnavailable, OSError: The segment stays in the spool.
        """
        async with self._writer.lock:
            found = await asyncio.to_thread(self._spool.first)
        if found is None:
            return
        segment, messages = found
        if await self._too_old(segment):
            async with self._writer.lock:
                path = await asyncio.to_thread(self._spool.quarantine, segment)
            self._left = None
            # It waits for the operator. New records of its keys do not wait.
            _report_quarantined(segment.size, str(path))
        else:
            async with self._writer.lock:
                await asyncio.to_thread(self._spool.mark_sent, segment, self._producer.position)
            if self._left is None or self._left[0] is not segment:
                self._left = segment, dict(enumerate(messages))
            await self._send(self._left[1])
            self._left = None
            async with self._writer.lock:
                await asyncio.to_thread(self._spool.remove, segment)
            self._count_unreadable()
            logger().info("spool_drained", records=len(messages), left_bytes=self._spool.size_bytes)
        self._writer.forget(segment.keys.elements())

    async def _send(self, left: dict[int, Message]) -> None:
        """Send the records of a segment, and remove those that are acknowledged or rejected.

        A record behind one of its key that is not acknowledged stays too: the key keeps its order.

        Raises:
            KafkaUnavailable: Kafka did not acknowledge all of them.
            BlobsUnavailable: The blob store did not accept a large field.
        """
        await self._make_fit(left)
        results: dict[int, KafkaUnavailable | RecordTooLarge | None] = {}
        all_told = asyncio.Event()

        def sent(at: int, error: KafkaUnavailable | RecordTooLarge | None) -> None:
            results[at] = error
            if len(results) == len(left):
                all_told.set()

        for at, message in left.items():
            self._producer.send([message], partial(sent, at))
        if left:
            await all_told.wait()
        open_keys = set[bytes]()
        unavailable: KafkaUnavailable | None = None
        for at, message in list(left.items()):
            error = results[at]
            if isinstance(error, KafkaUnavailable):
                open_keys.add(message.key)
                unavailable = error
                continue
            if error is not None:
                await self._reject(message, error)
            elif message.key in open_keys:
                continue
            del left[at]
            self._pause_s = RETRY_S
        if unavailable is not None:
            raise unavailable

    async def _make_fit(self, left: dict[int, Message]) -> None:
        """Move large fields and images to the blob store; reject what does not fit then."""
        if self._blobs is None:
            return
        for at, message in list(left.items()):
            try:
                # One by one, because the time limit of the store is that of one record.
                (left[at],) = await self._blobs.fit([message])
            except (RecordTooLarge, RecordUnfit) as error:
                await self._reject(message, error)
                del left[at]

    async def _reject(self, message: Message, error: Exception) -> None:
        path = await asyncio.to_thread(self._spool.reject, message)
        logger().error(
            "spool_record_rejected", kept_in=str(path), topic=message.topic, error=str(error)
        )

    async def _too_old(self, segment: Segment) -> bool:
        """Return whether a second copy of the segment's records in Kafka could count twice.

        That is possible once assemble may have dropped their trajectories or the lake their ids.
        The decision depends on the records that the steps topic has received since. The own
        monotonic clock limits the age; a wall clock has no influence.

        Raises:
            KafkaUnavailable: The steps topic cannot be read.
        """
        if segment.position is None:
            # A segment that was not sent began before Kafka was first reached. One that was sent
            # had a position, and the disk has lost it.
            return segment.maybe_sent
        passed = await self._producer.passed_since(segment.position)
        age_s = self._spool.age_s(segment)
        if (passed.seconds if age_s is None else min(age_s, passed.seconds)) > self._max_age_s:
            return True
        return segment.maybe_sent and passed.records > self._max_behind

    def _count_unreadable(self) -> None:
        new_bytes = self._spool.unreadable_bytes - self._counted_bytes
        self._metrics.spool_unreadable_bytes.inc(new_bytes)
        self._counted_bytes += new_bytes


def _report_quarantined(size: int, path: str | None = None) -> None:
    logger().error(
        "spool_quarantined",
        bytes=size,
        path=path,
        action="too old to be sent automatically: run `clawstream spool drain`, "
        "which checks each record against the lake first",
    )
