"""The shell around a stream job: one Faust app around one `Job`.

Faust provides the consumer group, rebalances, fetching and commits. Its tables, stores and error
path (which acknowledges and so loses records) are not used: any exception ends the process, and
the supervisor restarts it. Records bypass its streams and are processed in the batches in which
they were fetched, because per-record overhead exceeds the cost of the fold. Finished work is
committed by offset.

The metadata of the commits tells a slow worker from a stalled one. Every `HEARTBEAT_S`, while a
batch goes on, the positions of all partitions are committed again with a heartbeat. A commit of a
position that has to stay before handled records says how far they reach.

A consumer that stops although Kafka answers ends the process: when the client waits for somebody
to take an error, when no partitions come, or when records wait and none is fetched.

On SIGTERM the current batch is finished and committed, then the process exits 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from faust.types import TP

from clawstream.runtime.kafka import (
    NO_METADATA,
    Cluster,
    CommitMetadata,
    KafkaError,
    Record,
    Silence,
    heartbeat,
)
from clawstream.runtime.logs import LogThrottle, logger
from clawstream.runtime.process.lifecycle import die
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import not_ready, ready
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import (
    ConsumerStopped,
    FencedOut,
    NotCoPartitioned,
    StreamJobError,
)
from clawstream.stream_jobs.worker.faust_consumer import Consumer, explained, make_app, record_of
from clawstream.stream_jobs.worker.fetch_buffer import FetchBuffer, Fetched
from clawstream.stream_jobs.worker.metrics import JobMetrics
from clawstream.stream_jobs.worker.schema_wait import SchemaWait

FETCH_PAUSE_S = 0.02
"""Pause after a fetch smaller than a batch, so that the next one is larger. A fetch costs as much
as many records. A record that arrives in an idle period is not delayed.
"""
COMMIT_S = 1.0
HEARTBEAT_S = 5.0
LOOK_S = 0.5
"""Interval of the check whether Faust has stopped."""
STOP_S = 8.0
UNASSIGNED_S = 180.0
"""Time without partitions after which the consumer has stopped. Kafka waits for the other members
of a group for `broker_rebalance_timeout`, a minute.
"""
POSITION_S = 5.0
"""Time in which the consumer tells its position."""
REPEAT_LOG_S = 10.0


class Job(Protocol):
    """A job that runs on the shell. An exception ends the process.

    inputs: topics with equal partition counts, read together. decoder: looks up schemas of
    records before `process`.
    """

    inputs: tuple[str, ...]
    tick_interval_s: float
    decoder: Decoder

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """Take over partitions. Returns first offsets by (topic, partition); committed offsets
        apply to the others, which get no heartbeats.
        """

    async def revoked(self) -> None:
        """Release all partitions."""

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Process the next records of a partition. Returns the last durably finished offset by
        topic.
        """

    def goes_on(self) -> bool:
        """Return whether the batch in hand has made progress since the last call, or waits for work
        whose own time limit has not passed. Called every `HEARTBEAT_S`.
        """

    async def tick(self) -> None:
        """Called every tick_interval_s."""

    def stop(self) -> None:
        """Prepare to end: abandon long operations, so that `process` returns soon."""

    def close(self) -> None:
        """Release all resources."""


async def serve(
    settings: Settings, stop: asyncio.Event, *, group: str, make: Callable[[Settings, Cluster], Job]
) -> None:
    """Run a worker of a job until `stop` is set."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(
            LogThrottle("aiokafka", REPEAT_LOG_S)
        )  # without Kafka it makes a hundred lines a second
    cluster = cluster_of(settings)
    await asyncio.to_thread(create_topics, cluster, settings)
    await asyncio.to_thread(check_access, cluster, settings, group)
    metrics = JobMetrics()
    with serving_metrics(settings, group, metrics.registry):
        await Shell(settings, group, make(settings, cluster), metrics, cluster).run(stop)


class Shell:
    """One Faust app around one job."""

    def __init__(
        self, settings: Settings, group: str, job: Job, metrics: JobMetrics, cluster: Cluster
    ) -> None:
        self._job, self._metrics, self._cluster = job, metrics, cluster
        self._positions: Mapping[tuple[str, int], int] = {}
        self._batch_records = settings.jobs.batch_records
        self._fetch_buffer = FetchBuffer(self._batch_records)
        self._done: dict[TP, tuple[int, CommitMetadata]] = {}
        self._finished: dict[TP, tuple[int, CommitMetadata]] = {}  # the newest of each partition
        self._heartbeat_at = time.monotonic()
        self._revokes = 0
        self._silence = Silence(time.monotonic())
        self._unassigned_at: float | None = time.monotonic()  # None: it has its partitions
        self._take_overs = 0  # that go on: they fetch nothing, for as long as a changelog is read
        self._busy = asyncio.Lock()
        self._schema_wait = SchemaWait(
            job.decoder, self._busy, self._process_partition, self._pause
        )
        self._stopping = False
        self._app = make_app(settings, group)
        self._app.transport.Consumer = partial(Consumer, positions=self._position, take=self._take)
        inputs = self._app.topic(
            *job.inputs,
            key_type=bytes,
            value_type=bytes,
            key_serializer="raw",
            value_serializer="raw",
        )
        self._app.agent(inputs, name=group)(self._read)
        self._app.on_rebalance_complete.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Any failure ends the process."""
        starting = asyncio.create_task(self._app.start())
        repeated = [
            asyncio.create_task(self._repeat(self._job.tick_interval_s, self._job.tick)),
            asyncio.create_task(self._repeat(COMMIT_S, self._commit)),
            asyncio.create_task(self._repeat(LOOK_S, self._check_consumer)),
        ]
        try:
            while not stop.is_set():
                if starting.done():
                    starting.result()
                if self._app.should_stop:
                    reason = self._app.crash_reason or StreamJobError("Faust stopped by itself")
                    raise explained(reason) from reason
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), LOOK_S)
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)
        for task in repeated:
            task.cancel()
        self._stopping = True
        self._job.stop()
        self._schema_wait.drop()
        async with self._busy:
            logger().info("stopping")
        try:
            async with asyncio.timeout(STOP_S):
                await starting
                await self._job.revoked()
                await self._commit()
                await self._app.stop()
                self._job.close()
        except TimeoutError:
            logger().warning("slow_stop", seconds=STOP_S)
            sys.stderr.flush()
            os._exit(0)  # all that is acknowledged is durable: nothing is left to wait for

    async def _repeat(self, interval_s: float, what: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await what()
            except Exception as e:  # noqa: BLE001 - protocol point 6
                die(e)

    async def _commit(self) -> None:
        """Commit the finished offsets, and a heartbeat if one is due."""
        done, self._done = self._done, {}
        generation = self._app.consumer_generation_id
        due = done | self._heartbeats()
        if (
            due
            and not await self._app.consumer.commit_with_metadata(due)
            and generation == self._app.consumer_generation_id
        ):
            self._done = done | self._done

    def _heartbeats(self) -> dict[TP, tuple[int, CommitMetadata]]:
        """Return what to commit again while a batch goes on: all partitions wait for its end."""
        now = time.monotonic()
        if not self._busy.locked() or now - self._heartbeat_at < HEARTBEAT_S:
            return {}
        if not self._job.goes_on():
            return {}
        self._heartbeat_at = now
        return {
            tp: (offset, heartbeat(metadata)) for tp, (offset, metadata) in self._finished.items()
        }

    async def _check_consumer(self) -> None:
        """Raise ConsumerStopped when the consumer has stopped although Kafka answers."""
        self._app.consumer.check_group()
        now = time.monotonic()
        if self._unassigned_at is not None:
            if now - self._unassigned_at >= UNASSIGNED_S:
                with suppress(KafkaError):  # away: the client has a reason to wait
                    await asyncio.to_thread(self._cluster.ask, POSITION_S)
                    raise ConsumerStopped(f"no partitions were assigned for {UNASSIGNED_S:g} s")
                self._unassigned_at = time.monotonic()
        elif (
            self._take_overs
            or self._busy.locked()
            or self._fetch_buffer.holds_records
            or self._schema_wait.holds_records
        ):
            self._silence.broken(now)
        elif self._silence.asks(now):
            try:
                waiting = await self._waiting()
            except KafkaError:
                waiting = None
            if self._silence.stopped(time.monotonic(), waiting=waiting is not None):
                raise ConsumerStopped(f"nothing is fetched, although records wait in {waiting}")

    async def _waiting(self) -> str | None:
        """Return a partition that has records to fetch. Raises KafkaError."""
        consumer = self._app.consumer
        for tp in sorted(consumer.assignment()):
            ends = await asyncio.to_thread(self._cluster.watermarks, tp.topic, [tp.partition])
            low, end = ends[tp.partition]
            try:
                position = await asyncio.wait_for(consumer.position(tp), POSITION_S)
            except TimeoutError:  # a client that goes on knows it
                position = low
            if end > (position or low):
                return f"{tp.topic}-{tp.partition}"
        return None

    # -- rebalances

    def _position(self, place: tuple[str, int]) -> int | None:
        return self._positions.get(place)

    async def _revoked(self, *_: Any, **__: Any) -> None:
        try:
            self._revokes += 1
            self._unassigned_at = time.monotonic()
            self._metrics.partitions.set(0)
            if not self._stopping:
                not_ready("waits for its partitions")
            self._positions, self._finished = {}, {}
            self._schema_wait.drop()
            await self._job.revoked()
            await self._commit()
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _assigned(self, *_: Any, **__: Any) -> None:
        """Awaited by Faust before it seeks and lets records flow."""
        self._take_overs += 1
        try:
            before = (self._app.consumer_generation_id, self._revokes)
            self._unassigned_at = None
            self._schema_wait.drop()
            await self._job.revoked()
            assignment = self._app.consumer.assignment()
            partitions = sorted({tp.partition for tp in assignment})
            absent = {(t, p) for t in self._job.inputs for p in partitions} - {
                (tp.topic, tp.partition) for tp in assignment
            }
            if absent:
                raise NotCoPartitioned(f"assigned {sorted(assignment)}, but not {sorted(absent)}")
            self._done, self._finished = {}, {}
            try:
                positions = await self._job.assigned(partitions)
            except FencedOut:
                # In a rebalance the new owner is legitimate. Otherwise this worker was presumed
                # dead.
                if before == (self._app.consumer_generation_id, self._revokes):
                    raise
                logger().info("take_over_abandoned", partitions=partitions)
                positions = {}
            if before != (self._app.consumer_generation_id, self._revokes):
                await (
                    self._job.revoked()
                )  # already out of date: Faust comes again with the newer assignment
                return
            self._positions = positions
            self._finished = {
                TP(t, p): (offset, NO_METADATA) for (t, p), offset in positions.items()
            }
            if positions:
                await self._app.consumer.commit_with_metadata(dict(self._finished))
            self._metrics.partitions.set(len(partitions))
            ready(f"{len(partitions)} partitions")
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)
        finally:
            self._take_overs -= 1

    # -- records

    async def _take(self, fetched: Fetched) -> None:
        """Buffer a fetch. Waits while the buffer is full, and briefly after a small fetch."""
        self._silence.broken(time.monotonic())
        await self._fetch_buffer.put(self._app.consumer_generation_id, fetched)
        if sum(map(len, fetched.values())) < self._batch_records:
            await asyncio.sleep(FETCH_PAUSE_S)

    async def _read(self, _: Any) -> None:
        """Read batches as a Faust agent; its stream stays empty."""
        try:
            while not self._stopping:
                batch = await self._fetch_buffer.batch()
                if not self._stopping:
                    async with self._busy:
                        await self._process(batch)
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _process(self, batch: Sequence[tuple[int, Fetched]]) -> None:
        """Process records of the current generation; others are read again."""
        now = self._app.consumer_generation_id
        by_partition: dict[int, list[Record]] = {}
        for generation, fetched in batch:
            if generation == now:
                for tp, records in fetched.items():
                    by_partition.setdefault(tp.partition, []).extend(map(record_of, records))
        known = {
            p: records
            for p, records in by_partition.items()
            if not self._schema_wait.takes(p, records)
        }
        await asyncio.gather(*(self._process_partition(p, records) for p, records in known.items()))

    async def _process_partition(self, partition: int, records: Sequence[Record]) -> None:
        generation = self._app.consumer_generation_id
        with self._metrics.batch.time():
            done = await self._job.process(partition, records)
        self._metrics.records.inc(len(records))
        if generation == self._app.consumer_generation_id:
            handled = {record.topic: record.offset for record in records}
            finished = {
                TP(topic, partition): (offset + 1, _metadata(offset, handled.get(topic, offset)))
                for topic, offset in done.items()
            }
            self._done |= finished
            self._finished |= finished

    def _pause(self, partition: int, pause: bool) -> None:
        """Stop or resume fetching a partition of all inputs."""
        consumer = self._app.consumer
        places = {TP(topic, partition) for topic in self._job.inputs} & consumer.assignment()
        (consumer.pause_partitions if pause else consumer.resume_partitions)(places)


def _metadata(done: int, handled: int) -> CommitMetadata:
    """Return the metadata of the last durably finished offset, where more is handled."""
    return CommitMetadata(handled=handled + 1) if handled > done else NO_METADATA
