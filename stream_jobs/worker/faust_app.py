"""The stream jobs `assemble` and `reward` on Faust: the only file that imports it.

Faust is a thin shell here: the consumer group, rebalances, fetching, commits. It has no table and no store, and its error path (which
acknowledges, and so loses) is never entered: any exception ends the process at once and the supervisor restarts it. Records do not go
through its streams, one by one, but in the batches in which they were fetched: Faust's machinery for single records costs more than the
fold. So nothing is acknowledged by the record, either; what is done is committed by its offset.

The protocol of assemble, for each partition (`stream_jobs.assemble.partition`; the fold is `stream_jobs.assemble.fold`, the state log
`stream_jobs.assemble.changelog`). A process may be killed between any two lines; after each point it is said what makes that good:

1. A new owner appends a marker to its partition of `claw.assembly`; the marker's offset is its epoch. It reads that log up to there
   (what has a lower epoch than a record before it is a fenced writer's), checks the positions against today's topics, refills its
   payload cache, sends again what was decided but not done, and seeks Faust to its own `applied` + 1: Kafka's commits are advice.
   Killed: the next owner does the same; a marker more does no harm.
2. A batch is folded in offset order; offsets at or below `applied` fold to nothing. A record that can't be decoded or folded has no
   effect but a dead letter, which is a decision like any other. Killed: nothing was durable, the records come again.
3. One delta record holds the state's change and the decisions. It is awaited, and must land right behind the owner's last record;
   else another worker owns the partition, and this one dies before any output. Killed behind it: the next owner's point 1 sends.
4. The outputs are awaited: payload, marks and dead letters first, then candidates with the payload's place in their headers. Their bytes
   depend on the decision alone, so sending one again gives the same bytes. That they are done rides in the next delta. Killed: the
   next owner sends them again; who reads them knows them by their ids.
5. Once a second Kafka is told how far the batches came. Killed: what comes again is dropped by `applied`. A snapshot when the log has
   grown, then it is trimmed. Killed between its pieces, or before the trim: it counts when it is whole; until then what is before it does.
6. Any other exception: the process ends (`runtime.process.lifecycle.die`), which is being killed.

The reward job keeps no state: its position is what its group has committed, and rewards that are sent again have the same ids.

What Faust must be told, or kept from, beside its settings below: its fetch wait is fixed (`_Thread`); it seeks to committed offsets only
(`_Consumer`); a fetch that comes in while partitions are taken away must be sought again (`_give_back`); everything is revoked in every
rebalance, and state is rebuilt in `on_rebalance_complete`, the one signal that is awaited before records flow; a fetch of an older
generation is dropped; its worker command is not used, for that starts a web server and takes over signals and standard output.

On SIGTERM the batch in hand is finished and committed, then the process exits 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from runtime.kafka import Cluster, Record
from runtime.logs import Seldom, logger
from runtime.process.lifecycle import die, run_async
from runtime.process.readiness import ready
from runtime.topics.records import Decoder, cluster_of, create_topics
from schemas.settings import Settings
from stream_jobs.assemble.job import Assembler, worker_name
from stream_jobs.errors import NotCoPartitioned, Overtaken, StreamJobError
from stream_jobs.reward.evaluate import Answers
from stream_jobs.reward.job import Rewarder
from stream_jobs.worker.fetch_buffer import Fetched, Inbox
from stream_jobs.worker.schema_wait import SchemaWait

FETCH_WAIT_MS = 250
"""aiokafka has one fetch in flight a broker; at Faust's fixed 1500 ms an idle partition would hold up the busy ones that long. Each fetch
names all partitions: at 50 ms an idle worker took 3 % of a core, at 100 ms 2 %."""
FETCH_PAUSE_S = 0.02
"""Behind a fetch that brought less than a batch. A fetch costs as much as many records: it names all partitions, goes through two loops of
asyncio and is answered by the first record that comes. What comes meanwhile is the next one's; a record that comes when all is quiet waits not at all."""
METADATA_MS = 5000
"""A group that was assigned while a topic was not there is assigned anew once it is seen; by default nobody looks for five minutes."""
COMMIT_S = 1.0
LOOK_S = 0.5
"""How often it is asked whether Faust has stopped by itself."""
STOP_S = 8.0
REPEAT_LOG_S = 10.0


NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


class Job(Protocol):
    """What runs on the shell. An exception ends the process.

    inputs: topics with equal partition counts; all are read together. decoder: looks up the schemas of records before `process` gets them.
    """

    inputs: tuple[str, ...]
    tick_interval_s: float
    decoder: Decoder

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """The worker has these partitions now. Returns (topic, partition) to first offset; committed offsets hold for the others."""

    async def revoked(self) -> None:
        """It has none any more."""

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Take the next records of a partition. Returns, by topic, up to which offset everything is done for good."""

    async def tick(self) -> None:
        """Called every tick_interval_s."""

    def stop(self) -> None:
        """The process is to end: what takes long is given up, and `process` returns soon."""

    def close(self) -> None:
        """The end."""


def run_assemble(settings: Settings) -> None:
    """Run a worker of assemble until SIGTERM. Never returns."""
    run_async("assemble", settings, partial(_main, group="assemble", make=Assembler))


def run_reward(settings: Settings) -> None:
    """Run a worker of the reward job until SIGTERM. Never returns; wrong reward functions exit as wrong settings."""
    run_async("reward", settings, _main_of_reward)


async def _main_of_reward(settings: Settings, stop: asyncio.Event) -> None:
    answers = Answers(settings)  # a wrong name ends the process before Kafka is asked for
    await _main(settings, stop, group="reward", make=partial(Rewarder, answers=answers))


async def _main(
    settings: Settings, stop: asyncio.Event, *, group: str, make: Callable[[Settings, Cluster], Job]
) -> None:
    for handler in logging.getLogger().handlers:
        handler.addFilter(Seldom("aiokafka", REPEAT_LOG_S))  # without Kafka it makes a hundred lines a second
    cluster = cluster_of(settings)
    await asyncio.to_thread(create_topics, cluster, settings)
    await Shell(settings, group, make(settings, cluster)).run(stop)


class Shell:
    """One Faust app around one job."""

    def __init__(self, settings: Settings, group: str, job: Job) -> None:
        self._job = job
        self._positions: Mapping[tuple[str, int], int] = {}
        self._batch_records = settings.jobs.batch_records
        self._inbox = Inbox(self._batch_records)
        self._done: dict[TP, int] = {}
        self._revokes = 0
        self._busy = asyncio.Lock()
        self._schema_wait = SchemaWait(job.decoder, self._busy, self._process_partition, self._pause)
        self._stopping = False
        self._app = _make_app(settings, group)
        self._app.transport.Consumer = partial(_Consumer, positions=self._position, take=self._take)
        inputs = self._app.topic(
            *job.inputs, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw"
        )
        self._app.agent(inputs, name=group)(self._read)
        self._app.on_rebalance_complete.connect(self._assigned, weak=False)
        self._app.on_partitions_revoked.connect(self._revoked, weak=False)

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Ends the process on any failure."""
        starting = asyncio.create_task(self._app.start())
        repeated = [
            asyncio.create_task(self._repeat(self._job.tick_interval_s, self._job.tick)),
            asyncio.create_task(self._repeat(COMMIT_S, self._commit)),
        ]
        try:
            while not stop.is_set():
                if starting.done():
                    starting.result()
                if self._app.should_stop:
                    raise self._app.crash_reason or StreamJobError("Faust stopped by itself")
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
        """Tell Kafka how far we are."""
        done, self._done = self._done, {}
        generation = self._app.consumer_generation_id
        if done and not await self._app.consumer._commit(done) and generation == self._app.consumer_generation_id:
            self._done = done | self._done

    # -- rebalances

    def _position(self, place: tuple[str, int]) -> int | None:
        return self._positions.get(place)

    async def _revoked(self, *_: Any, **__: Any) -> None:
        try:
            self._revokes += 1
            self._positions = {}
            self._schema_wait.drop()
            await self._job.revoked()
            await self._commit()
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _assigned(self, *_: Any, **__: Any) -> None:
        """Awaited by Faust before it seeks and lets records flow."""
        try:
            before = (self._app.consumer_generation_id, self._revokes)
            self._schema_wait.drop()
            await self._job.revoked()
            assignment = self._app.consumer.assignment()
            partitions = sorted({tp.partition for tp in assignment})
            absent = {(t, p) for t in self._job.inputs for p in partitions} - {
                (tp.topic, tp.partition) for tp in assignment
            }
            if absent:
                raise NotCoPartitioned(f"assigned {sorted(assignment)}, but not {sorted(absent)}")
            self._done = {}
            try:
                positions = await self._job.assigned(partitions)
            except Overtaken:
                # Who overtakes us in a rebalance has the partition by right. In no rebalance it is another group's worker, or we were dead.
                if before == (self._app.consumer_generation_id, self._revokes):
                    raise
                logger().info("take_over_given_up", partitions=partitions)
                positions = {}
            if before != (self._app.consumer_generation_id, self._revokes):
                await self._job.revoked()  # already out of date: Faust comes again with the newer assignment
                return
            self._positions = positions
            if positions:
                await self._app.consumer._commit({TP(t, p): offset for (t, p), offset in positions.items()})
            ready(f"{len(partitions)} partitions")
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    # -- records

    async def _take(self, fetched: Fetched) -> None:
        """What Faust has fetched while its flow was open. Waits while there is enough, and for more when it was little."""
        await self._inbox.put(self._app.consumer_generation_id, fetched)
        if sum(map(len, fetched.values())) < self._batch_records:
            await asyncio.sleep(FETCH_PAUSE_S)

    async def _read(self, _: Any) -> None:
        """The agent: Faust starts it, ends it and asks for its topics; its stream stays empty."""
        try:
            while not self._stopping:
                batch = await self._inbox.batch()
                if not self._stopping:
                    async with self._busy:
                        await self._process(batch)
        except Exception as e:  # noqa: BLE001 - protocol point 6
            die(e)

    async def _process(self, batch: Sequence[tuple[int, Fetched]]) -> None:
        """Process what is of the present generation: a later one reads the rest again."""
        now = self._app.consumer_generation_id
        by_partition: dict[int, list[Record]] = {}
        for generation, fetched in batch:
            if generation == now:
                for tp, records in fetched.items():
                    by_partition.setdefault(tp.partition, []).extend(map(_record, records))
        known = {p: records for p, records in by_partition.items() if not self._schema_wait.takes(p, records)}
        await asyncio.gather(*(self._process_partition(p, records) for p, records in known.items()))

    async def _process_partition(self, partition: int, records: Sequence[Record]) -> None:
        generation = self._app.consumer_generation_id
        done = await self._job.process(partition, records)
        if generation == self._app.consumer_generation_id:
            self._done |= {TP(topic, partition): offset + 1 for topic, offset in done.items()}

    def _pause(self, partition: int, pause: bool) -> None:
        """Stop or start fetching a partition of all inputs."""
        consumer = self._app.consumer
        places = {TP(topic, partition) for topic in self._job.inputs} & consumer.assignment()
        (consumer.pause_partitions if pause else consumer.resume_partitions)(places)


def _record(r: Any) -> Record:
    """Headers are left out: no input of the jobs has any that count."""
    return Record(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, NO_HEADERS)


def _make_app(settings: Settings, group: str) -> Any:
    """The Faust app, embedded: no worker of Faust's, so no web server, no signal handlers, no redirected output."""
    kafka, jobs = settings.kafka, settings.jobs
    directory = settings.data_dir / "faust" / group  # nothing is kept there: the store is in memory
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
        consumer_group_instance_id=f"{group}-{worker_name(jobs)}",  # a killed worker gets its partitions back at once
        consumer_metadata_max_age_ms=METADATA_MS,
        consumer_max_fetch_size=4 << 20,
        consumer_auto_offset_reset="earliest",  # a first start. Where the log was cut ahead of us, too, and silently: the jobs look (`input_log.refuse_truncated`)
        broker_commit_interval=1.0,
        broker_session_timeout=jobs.session_timeout_s,
        broker_heartbeat_interval=min(1.0, jobs.session_timeout_s / 4),
        broker_request_timeout=max(40.0, jobs.session_timeout_s + 10),  # Kafka wants it above the session's
        broker_max_poll_records=jobs.batch_records,
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
    """Seeks to the job's own positions instead of the committed ones, and gives whole fetches away instead of single records."""

    def __init__(
        self,
        *args: Any,
        positions: Callable[[tuple[str, int]], int | None],
        take: Callable[[Fetched], Awaitable[None]],
        **kwargs: Any,
    ) -> None:
        self._own_position, self._take = positions, take
        super().__init__(*args, **kwargs)

    def _new_consumer_thread(self) -> Any:
        return _Thread(self, loop=self.loop, beacon=self.beacon)

    async def seek_to_committed(self) -> Mapping[TP, int]:
        committed = dict(await super().seek_to_committed())
        own = {tp: at for tp in self.assignment() if (at := self._own_position((tp.topic, tp.partition))) is not None}
        if own:
            await self.seek_wait(own)
        return committed | own

    async def _drain_messages(self, fetcher: Any) -> None:
        """Runs as long as Faust's fetcher. Any exception ends the process, but for those by which Faust stops it."""
        try:
            while not (self.should_stop or fetcher.should_stop):
                fetched, _ = await self._wait_next_records(1.0)
                if fetched and self.flow_active:
                    await self._take(fetched)
                elif fetched:
                    await self._give_back()
        except (*self.consumer_stopped_errors, asyncio.CancelledError):
            if not self.transport.app.should_stop:
                raise

    async def _give_back(self) -> None:
        """What was fetched while partitions were taken away, or before the new ones were sought, must come again."""
        try:
            await self.perform_seek()
        except Exception as e:
            if self.flow_active:
                raise
            # Partitions that are being taken away: many kinds of errors. The rebalance that goes on seeks before anything flows.
            logger().debug("seek_overtaken", error=repr(e))

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Faust looks whether its streams hang; it has none. What remains is whether aiokafka fetches."""
        self._thread.verify_recovery_event_path(now, tp)
