"""The stream jobs `assemble` and `reward` on Faust: the only file that imports it.

Faust is a thin shell here: the consumer group, rebalances, fetching, commits. It has no table and no store, and its error path (which
acknowledges, and so loses) is never entered: any exception ends the process at once and the supervisor restarts it.

The protocol of assemble, for each partition (`stream_jobs.owner`; the fold is `stream_jobs.assemble`, the state log
`stream_jobs.state_log`). A process may be killed between any two lines:

1. A new owner appends a marker to its partition of `claw.assembly`; the marker's offset is its epoch. It reads that log up to there
   (what has a lower epoch than a record before it is a fenced writer's), checks the positions against today's topics, refills its
   payload cache, sends again what was decided but not done, and seeks Faust to its own `applied` + 1: Kafka's commits are advice.
2. A batch is folded in offset order; offsets at or below `applied` fold to nothing. A record that can't be decoded or folded has no
   effect but a dead letter, which is a decision like any other.
3. One delta record holds the state's change and the decisions. It is awaited, and must land right behind the owner's last record;
   else another worker owns the partition, and this one dies before any output.
4. The outputs are awaited: payload, marks and dead letters first, then candidates with the payload's place in their headers. Their bytes
   depend on the decision alone, so sending one again gives the same bytes. That they are done rides in the next delta.
5. The batch is acknowledged strictly in order, without holes; Faust commits. A snapshot when the log has grown, then it is trimmed.
6. Any other exception: the process ends (`runtime.lifecycle.die`).

On SIGTERM the batch in hand is finished and committed, then the process exits 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from runtime.kafka import Cluster, Record
from runtime.lifecycle import die, run_async
from runtime.records import cluster_of, create_topics
from runtime.telemetry import logger
from schemas.settings import Settings
from stream_jobs.assembler import Assembler
from stream_jobs.errors import NotCoPartitioned, StreamJobError
from stream_jobs.rewarder import Rewarder

FETCH_WAIT_MS = 50
"""aiokafka has one fetch in flight a broker; at Faust's fixed 1500 ms an idle partition would hold up the busy ones that long."""
METADATA_MS = 5000
"""A group that was assigned while a topic was not there is assigned anew once it is seen; by default nobody looks for five minutes."""
GATHER_S = 0.005
GATHER_ROUNDS = 6
"""A batch is gathered for at most this many rounds, while more comes: each batch costs a delta and its acknowledgement."""
STOP_S = 8.0
REPEAT_LOG_S = 10.0


class Job(Protocol):
    """What runs on the shell. inputs: topics with equal partition counts; all are read together. An exception ends the process."""

    inputs: tuple[str, ...]
    tick_interval_s: float

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """The worker has these partitions now. Returns (topic, partition) to first offset; committed offsets hold for the others."""

    async def revoked(self) -> None:
        """It has none any more."""

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Take the next records of a partition. Returns, by topic, up to which offset everything is done for good."""

    async def tick(self) -> None:
        """Called every tick_interval_s."""

    def close(self) -> None:
        """The end."""


def run_assemble(settings: Settings) -> None:
    """Run a worker of assemble until SIGTERM. Never returns."""
    run_async("assemble", settings, partial(_main, group="assemble", make=Assembler))


def run_reward(settings: Settings) -> None:
    """Run a worker of the reward job until SIGTERM. Never returns; wrong reward functions exit as wrong settings."""
    run_async("reward", settings, partial(_main, group="reward", make=Rewarder))


async def _main(
    settings: Settings, stop: asyncio.Event, *, group: str, make: Callable[[Settings, Cluster], Job]
) -> None:
    for handler in logging.getLogger().handlers:
        handler.addFilter(_Seldom())
    cluster = cluster_of(settings)
    await asyncio.to_thread(create_topics, cluster, settings)
    await Shell(settings, group, make(settings, cluster)).run(stop)


class Shell:
    """One Faust app around one job."""

    def __init__(self, settings: Settings, group: str, job: Job) -> None:
        self._job = job
        self._batch_records = settings.jobs.batch_records
        self._positions: Mapping[tuple[str, int], int] = {}
        self._unacked: dict[TP, deque[Any]] = {}
        self._busy = asyncio.Lock()
        self._stopping = False
        self._app = _make_app(settings, group)
        self._app.transport.Consumer = partial(_Consumer, positions=self._position)
        inputs = self._app.topic(
            *job.inputs, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )
        self._app.agent(inputs, name=group)(self._read)
        self._app.on_rebalance_complete.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Ends the process on any failure."""
        ticking, starting = asyncio.create_task(self._tick()), asyncio.create_task(self._app.start())
        try:
            while not stop.is_set():
                if starting.done():
                    starting.result()
                if self._app.should_stop:
                    raise self._app.crash_reason or StreamJobError("Faust stopped by itself")
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 0.2)
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)
        ticking.cancel()
        self._stopping = True
        async with self._busy:
            logger().info("stopping")
        try:
            async with asyncio.timeout(STOP_S):
                await starting
                await self._job.revoked()
                await self._app.consumer.commit()
                await self._app.stop()
                self._job.close()
        except TimeoutError:
            logger().warning("slow_stop", seconds=STOP_S)
            sys.stderr.flush()
            os._exit(0)  # all that is acknowledged is durable: nothing is left to wait for

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._job.tick_interval_s)
            try:
                await self._job.tick()
            except Exception as e:  # noqa: BLE001 - protocol point 6
                die(e)

    # -- rebalances

    def _position(self, place: tuple[str, int]) -> int | None:
        return self._positions.get(place)

    async def _revoked(self, *_: Any, **__: Any) -> None:
        try:
            self._positions = {}
            await self._job.revoked()
            self._unacked.clear()
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _assigned(self, *_: Any, **__: Any) -> None:
        """Awaited by Faust before it seeks and lets records flow."""
        try:
            generation = self._app.consumer_generation_id
            assignment = self._app.consumer.assignment()
            partitions = sorted({tp.partition for tp in assignment})
            absent = {(t, p) for t in self._job.inputs for p in partitions} - {
                (tp.topic, tp.partition) for tp in assignment
            }
            if absent:
                raise NotCoPartitioned(f"assigned {sorted(assignment)}, but not {sorted(absent)}")
            self._unacked.clear()
            positions = await self._job.assigned(partitions)
            if generation != self._app.consumer_generation_id:
                await self._job.revoked()  # already out of date: Faust comes again with the newer assignment
                return
            self._positions = positions
            if positions:
                await self._app.consumer._commit({TP(t, p): offset for (t, p), offset in positions.items()})
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    # -- records

    async def _read(self, stream: Any) -> None:
        """The agent. Takes whole batches from the channel: Faust's machinery for single events costs more than the fold."""
        queue, get = stream.channel.queue, stream.channel.get
        try:
            while not self._stopping:
                events = [await get()]
                for gathered in range(GATHER_ROUNDS):
                    before = len(events)
                    while len(events) < self._batch_records and not queue.empty():
                        events.append(queue.get_nowait())
                    if len(events) >= self._batch_records or (gathered and len(events) == before):
                        break
                    await asyncio.sleep(GATHER_S)
                if not self._stopping:
                    async with self._busy:
                        await self._process(events)
        except StopAsyncIteration:
            pass  # Faust ends the stream when the app stops
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _process(self, events: Iterable[Any]) -> None:
        generation = self._app.consumer_generation_id
        batches: dict[int, list[Record]] = {}
        for event in events:
            message = event.message
            if message.generation_id == generation:
                self._unacked.setdefault(message.tp, deque()).append(message)
                batches.setdefault(message.partition, []).append(_record(message))
        await asyncio.gather(*(self._process_partition(p, records) for p, records in batches.items()))

    async def _process_partition(self, partition: int, records: Sequence[Record]) -> None:
        generation = self._app.consumer_generation_id
        done = await self._job.process(partition, records)
        if generation != self._app.consumer_generation_id:
            return
        for topic, offset in done.items():
            waiting = self._unacked.get(TP(topic, partition), deque())
            while waiting and waiting[0].offset <= offset:
                waiting.popleft().ack(self._app.consumer)


class _Seldom(logging.Filter):
    """Lets aiokafka say the same thing once in a while: without Kafka it makes a hundred lines a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("aiokafka"):
            return True
        now, what = time.monotonic(), record.getMessage()[:40]
        if now - self._said.get(what, -REPEAT_LOG_S) < REPEAT_LOG_S:
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[what] = now
        return True


def _record(message: Any) -> Record:
    return Record(
        message.topic,
        message.partition,
        message.offset,
        round(message.timestamp * 1000),
        message.key,
        message.value,
        {},
    )


def _make_app(settings: Settings, group: str) -> Any:
    """The Faust app, embedded: no worker of Faust's, so no web server, no signal handlers, no redirected output."""
    kafka, jobs = settings.kafka, settings.jobs
    directory = settings.data_dir / "faust" / f"{group}-{jobs.worker_id}"
    directory.mkdir(parents=True, exist_ok=True)
    return faust.App(
        f"{kafka.topic_prefix}-{group}",
        broker=[f"kafka://{server}" for server in settings.bootstrap_servers.split(",")],
        broker_credentials=_credentials(kafka.client_options),
        store="memory://",
        datadir=str(directory),
        web_enabled=False,
        topic_partitions=kafka.partitions,
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=1,  # without it the inputs are not assigned together
        consumer_group_instance_id=f"{group}-{jobs.worker_id}",  # a killed worker gets its partitions back at once
        consumer_metadata_max_age_ms=METADATA_MS,
        consumer_max_fetch_size=4 << 20,
        consumer_auto_offset_reset="earliest",  # a first start; a job that keeps positions of its own refuses holes
        stream_buffer_maxsize=4096,
        broker_commit_interval=1.0,
        broker_session_timeout=jobs.session_timeout_s,
        broker_heartbeat_interval=min(1.0, jobs.session_timeout_s / 4),
        broker_request_timeout=max(40.0, jobs.session_timeout_s + 10),  # Kafka wants it above the session's
        broker_max_poll_records=2000,
        producer_acks=-1,
    )


def _credentials(options: Mapping[str, str]) -> Any:
    """Faust's credentials for librdkafka's options; None for a plain connection."""
    protocol = options.get("security.protocol", "plaintext").lower()
    context = ssl.create_default_context(cafile=options.get("ssl.ca.location")) if protocol.endswith("ssl") else None
    if context is not None and "ssl.certificate.location" in options:
        context.load_cert_chain(
            options["ssl.certificate.location"], options.get("ssl.key.location"), options.get("ssl.key.password")
        )
    if protocol.startswith("sasl"):
        return faust.SASLCredentials(
            username=options.get("sasl.username"),
            password=options.get("sasl.password"),
            mechanism=options.get("sasl.mechanism", options.get("sasl.mechanisms", "PLAIN")),
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


class _Thread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Faust hard-codes the fetch wait, and reads what transactions have not committed: there are no settings."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS
        consumer._isolation_level = "read_committed"
        return consumer


class _Consumer(driver.Consumer):  # type: ignore[misc]
    """Seeks to the job's own positions instead of the committed ones."""

    def __init__(self, *args: Any, positions: Callable[[tuple[str, int]], int | None], **kwargs: Any) -> None:
        self._own_position = positions
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> Any:
        return _Thread(self, loop=self.loop, beacon=self.beacon)

    async def seek_to_committed(self) -> Mapping[TP, int]:
        committed = dict(await super().seek_to_committed())
        own = {tp: at for tp in self.assignment() if (at := self._own_position((tp.topic, tp.partition))) is not None}
        if own:
            await self.seek_wait(own)
        return committed | own
