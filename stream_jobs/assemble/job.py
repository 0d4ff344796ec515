"""The assemble job: the partition processors of this worker, and the ticks that it writes into
their inputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from runtime.kafka import Cluster, Record
from runtime.logs import logger
from runtime.topics.records import Decoder, now_micros
from schemas.records import Tick
from schemas.settings import Settings
from stream_jobs.assemble.handlers import Limits
from stream_jobs.assemble.model import REWARDS, STEPS
from stream_jobs.assemble.partition import PartitionContext, PartitionProcessor, TopicSnapshot
from stream_jobs.errors import FencedOut
from stream_jobs.worker.member_name import worker_name

SILENT_TICKS, SILENT_AT_LEAST_S = 10, 10.0
"""A partition that misses this many ticks was silent: no Kafka, or no worker."""
CLOCK_AHEAD_MS = 600_000
"""Far more than synchronised clocks differ."""


def limits_of(settings: Settings) -> Limits:
    """Return the limits of the fold."""
    jobs = settings.jobs
    return Limits(
        trajectory_timeout=round(jobs.trajectory_timeout_s * 1000),
        closed_horizon=round(jobs.closed_horizon_s * 1000),
        orphan_after=round(jobs.orphan_after_s * 1000),
        closed_max=jobs.closed_max,
        anonymous_inactivity=round(jobs.anonymous_inactivity_s * 1000),
        agent_inactivity=round(jobs.agent_inactivity_s * 1000),
        silent_after=round(max(SILENT_TICKS * jobs.tick_interval_s, SILENT_AT_LEAST_S) * 1000),
        train_truncated=jobs.train_truncated,
    )


class Assembler:
    """A job of `stream_jobs.worker.shell`. Every exception out of it must end the process."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        jobs, topics = settings.jobs, settings.kafka.topics
        self.inputs: tuple[str, ...] = (topics.steps, topics.rewards)
        self.tick_interval_s = jobs.tick_interval_s
        self._write_ticks = jobs.write_ticks
        self.decoder = Decoder(cluster, topics.schemas)
        self._shared = PartitionContext(
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
        self._ticking = self._clock_told = False

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """Take over the partitions; return where to read. Raises FencedOut only when no other error
        occurred.
        """
        situations = await asyncio.to_thread(self._topic_snapshots, partitions)
        owners = {p: PartitionProcessor(p, self._shared, s) for p, s in situations.items()}
        taken = await asyncio.gather(
            *(owner.take_over() for owner in owners.values()), return_exceptions=True
        )
        for failed in taken:  # all have ended: none writes on while it is decided what that means
            if isinstance(failed, BaseException) and not isinstance(failed, FencedOut):
                raise failed
        for failed in taken:
            if isinstance(failed, FencedOut):
                raise failed
        self._processors = owners
        return {
            place: offset for owner in owners.values() for place, offset in owner.positions.items()
        }

    def _topic_snapshots(self, partitions: Sequence[int]) -> dict[int, TopicSnapshot]:
        """Read topic ids and end offsets once for all partitions (blocking)."""
        topics, cluster = self._shared.topics, self._shared.cluster
        ids = cluster.topic_ids(
            [topics.steps, topics.rewards, topics.assembly, topics.trajectories]
        )
        ends = {t: cluster.watermarks(t, partitions) for t in self.inputs}
        return {p: TopicSnapshot(ids, {t: e[p] for t, e in ends.items()}) for p in partitions}

    async def revoked(self) -> None:
        """Release all partitions, each after its current batch."""
        owners, self._processors = self._processors, {}
        await asyncio.gather(*(owner.release() for owner in owners.values()))

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Process a batch; return the last finished offset by topic."""
        owner = self._processors.get(partition)
        if owner is None:
            return {}
        async with owner.lock:
            if owner.released:
                return {}
            await owner.process(
                (STEPS if r.topic == self.inputs[0] else REWARDS, r) for r in records
            )
            self._watch_clock(owner)
        return {r.topic: r.offset for r in records}

    def _watch_clock(self, owner: PartitionProcessor) -> None:
        """Warn once when log time is far ahead of the local clock: nothing times out until real
        time catches up.
        """
        ahead = owner.time - now_micros() // 1000
        if ahead > CLOCK_AHEAD_MS and not self._clock_told:
            self._clock_told = True
            logger().warning(
                "clock_ahead",
                partition=owner.partition,
                ahead_s=ahead // 1000,
                log_time_ms=owner.time,
                action="a broker's clock, or this machine's, is wrong: "
                "see Clocks in docs/operating.md",
            )

    async def tick(self) -> None:
        """Write a tick into the inputs of every owned partition. A lost tick is harmless: the next
        one replaces it.
        """
        if self._ticking or not self._write_ticks:
            return  # when Kafka is away: no pile of ticks
        codec, send = self._shared.decoder.codec, self._shared.producer.send_soon
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
        self._shared.producer.close()
