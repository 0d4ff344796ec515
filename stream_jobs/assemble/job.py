"""The assemble job: the partition processors of this worker, and the ticks that it writes into
their inputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import Decoder, now_micros
from clawstream.schemas.records import Tick
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.context import PartitionContext, TopicSnapshot
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.partition import PartitionProcessor
from clawstream.stream_jobs.assemble.recovery import take_over
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS
from clawstream.stream_jobs.errors import FencedOut
from clawstream.stream_jobs.worker.member_name import worker_name

CLOCK_AHEAD_MS = 600_000
"""Far more than synchronised clocks differ."""


class Assembler:
    """A job of `clawstream.stream_jobs.worker.shell`. An exception from it must end the process."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        jobs, topics = settings.jobs, settings.kafka.topics
        self.inputs: tuple[str, ...] = (topics.steps, topics.rewards)
        self.tick_interval_s = jobs.tick_interval_s
        self._write_ticks = jobs.write_ticks
        self.decoder = Decoder(cluster, topics.schemas)
        self._context = PartitionContext(
            cluster=cluster,
            producer=cluster.producer(),
            decoder=self.decoder,
            topics=topics,
            limits=limits_of(settings),
            worker=worker_name(jobs),
            cache_bytes=(jobs.cache_mb << 20) // settings.kafka.partitions,
            snapshot_min_bytes=jobs.snapshot_min_bytes,
        )
        self._processors: dict[int, PartitionProcessor] = {}
        self._ticking = self._clock_warned = False

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """Take over the partitions; return where to read. Raises FencedOut only when no other error
        occurred.
        """
        topics = await asyncio.to_thread(self._topic_snapshots, partitions)
        taken = await asyncio.gather(
            *(take_over(p, self._context, topics[p]) for p in partitions), return_exceptions=True
        )
        # All have ended: none writes on while it is decided what that means.
        failed = [one for one in taken if isinstance(one, BaseException)]
        if failed:
            raise next((e for e in failed if not isinstance(e, FencedOut)), failed[0])
        processors = [one for one in taken if isinstance(one, PartitionProcessor)]
        self._processors = {one.partition: one for one in processors}
        return {place: at for one in processors for place, at in one.positions.items()}

    def _topic_snapshots(self, partitions: Sequence[int]) -> dict[int, TopicSnapshot]:
        """Read topic ids and end offsets once for all partitions (blocking)."""
        topics, cluster = self._context.topics, self._context.cluster
        ids = cluster.topic_ids(
            [topics.steps, topics.rewards, topics.assembly, topics.trajectories]
        )
        ends = {t: cluster.watermarks(t, partitions) for t in self.inputs}
        return {p: TopicSnapshot(ids, {t: e[p] for t, e in ends.items()}) for p in partitions}

    async def revoked(self) -> None:
        """Release all partitions, each after its current batch."""
        processors, self._processors = self._processors, {}
        await asyncio.gather(*(processor.release() for processor in processors.values()))

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Process a batch; return the last finished offset by topic."""
        processor = self._processors.get(partition)
        if processor is None:
            return {}
        async with processor.lock:
            if processor.released:
                return {}
            await processor.process(
                (STEPS if r.topic == self.inputs[0] else REWARDS, r) for r in records
            )
            self._watch_clock(processor)
        return {r.topic: r.offset for r in records}

    def _watch_clock(self, processor: PartitionProcessor) -> None:
        """Warn once when log time is far ahead of the local clock: nothing times out until real
        time catches up.
        """
        ahead = processor.time - now_micros() // 1000
        if ahead > CLOCK_AHEAD_MS and not self._clock_warned:
            self._clock_warned = True
            logger().warning(
                "clock_ahead",
                partition=processor.partition,
                ahead_s=ahead // 1000,
                log_time_ms=processor.time,
                action="a broker's clock, or this machine's, is wrong: "
                "see Clocks in docs/operating.md",
            )

    def goes_on(self) -> bool:
        """Return False: its batches are short."""
        return False

    async def tick(self) -> None:
        """Write a tick into the inputs of every owned partition. A lost tick is harmless: the next
        one replaces it.
        """
        if self._ticking or not self._write_ticks:
            return  # when Kafka is away: no pile of ticks
        codec, send = self._context.decoder.codec, self._context.producer.send_soon
        places = [(topic, p) for p in self._processors for topic in self.inputs]
        self._ticking = True
        results = await asyncio.gather(
            *(
                send(topic, None, codec.encode(Tick(partition=p)), partition=p)
                for topic, p in places
            ),
            return_exceptions=True,
        )
        self._ticking = False
        lost = [r for r in results if isinstance(r, BaseException)]
        if lost:
            logger().warning("ticks_lost", count=len(lost), error=str(lost[0]))

    def stop(self) -> None:
        """Do nothing: no operation takes long."""

    def close(self) -> None:
        """Wait for pending writes."""
        self._context.producer.close()
