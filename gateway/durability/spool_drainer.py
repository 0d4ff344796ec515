"""Sends the records of the spool to Kafka as soon as it is reachable, the oldest segment first.

A segment is deleted after the acknowledgement of all its records. After a crash in between, it is
sent again: the ids are the same, and readers drop duplicates. That holds only as long as assemble
knows the trajectories and the lake remembers the ids; an older segment is quarantined for
`clawstream spool drain`, which checks each record against the lake first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.durability.blobs import Blobs
from gateway.durability.log import LogProducer, Message
from gateway.durability.segment import Segment
from gateway.durability.spool import Spool
from gateway.durability.spool_writer import SpoolWriter
from gateway.errors import BlobsUnavailable, KafkaUnavailable, RecordTooLarge
from gateway.metrics import Metrics
from runtime.logs import logger

RETRY_S = 0.25
"""Interval between attempts, and between checks whether Kafka is reachable again."""


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

    async def run(self) -> None:
        """Drain until cancelled."""
        self._count_unreadable()
        if self._spool.quarantined_bytes:
            _report_quarantined(self._spool.quarantined_bytes)
        while True:
            while self._spool.segments:
                try:
                    if self._producer.reachable:
                        await self._drain_first()
                        continue
                except (KafkaUnavailable, BlobsUnavailable) as error:
                    logger().warning("spool_drain_waits", error=str(error))
                except OSError as error:
                    logger().error("spool_unreadable", error=str(error))
                await asyncio.sleep(RETRY_S)
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
            # It waits for the operator. New records of its keys do not wait.
            _report_quarantined(segment.size, str(path))
        else:
            async with self._writer.lock:
                await asyncio.to_thread(self._spool.mark_sent, segment, self._producer.position)
            try:
                await self._publish(messages)
            except RecordTooLarge:
                await self._publish_singly(messages)
            async with self._writer.lock:
                await asyncio.to_thread(self._spool.remove, segment)
            self._count_unreadable()
            logger().info("spool_drained", records=len(messages), left_bytes=self._spool.size_bytes)
        self._writer.forget(segment.keys.elements())

    async def _publish(self, messages: Sequence[Message]) -> None:
        """Send messages; acknowledged on return.

        Raises:
            KafkaUnavailable: Kafka did not acknowledge all of them.
            BlobsUnavailable: The blob store did not accept a large field.
            RecordTooLarge: A message is larger than Kafka accepts.
        """
        if self._blobs is not None:
            # One by one, because the time limit of the store is that of one record.
            messages = [m for message in messages for m in await self._blobs.fit([message])]
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def sent(error: KafkaUnavailable | RecordTooLarge | None) -> None:
            if done.done():
                return  # cancelled
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self._producer.send(messages, sent)
        await done

    async def _publish_singly(self, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                await self._publish([message])
            except RecordTooLarge as error:
                path = await asyncio.to_thread(self._spool.reject, message)
                logger().error(
                    "spool_record_rejected",
                    kept_in=str(path),
                    topic=message.topic,
                    error=str(error),
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
