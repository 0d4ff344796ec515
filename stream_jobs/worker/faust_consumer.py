"""Faust's consumer and app as the jobs need them. The one place, with `shell`, that knows Faust.

What Faust must be told, or kept from, beside its settings below: its fetch wait is fixed (`_Thread`); it seeks to committed offsets only
(`_Consumer`); a fetch that comes in while partitions are taken away must be sought again (`_give_back`); everything is revoked in every
rebalance, and state is rebuilt in `on_rebalance_complete`, the one signal that is awaited before records flow; a fetch of an older
generation is dropped; its worker command is not used, for that starts a web server and takes over signals and standard output.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from runtime.kafka import Record
from runtime.logs import logger
from schemas.settings import Settings
from stream_jobs.worker.fetch_buffer import Fetched
from stream_jobs.worker.member_name import worker_name

FETCH_WAIT_MS = 250
"""aiokafka has one fetch in flight a broker; at Faust's fixed 1500 ms an idle partition would hold up the busy ones that long. Each fetch
names all partitions: at 50 ms an idle worker took 3 % of a core, at 100 ms 2 %."""
METADATA_MS = 5000
"""A group that was assigned while a topic was not there is assigned anew once it is seen; by default nobody looks for five minutes."""

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


def record_of(r: Any) -> Record:
    """Headers are left out: no input of the jobs has any that count."""
    return Record(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, NO_HEADERS)


def make_app(settings: Settings, group: str) -> Any:
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
        consumer_auto_offset_reset="earliest",  # a first start. Where the log was cut ahead of us, too, and silently: the jobs look (`check_truncation`)
        broker_commit_interval=1.0,
        broker_session_timeout=jobs.session_timeout_s,
        broker_heartbeat_interval=min(1.0, jobs.session_timeout_s / 4),
        broker_request_timeout=max(
            40.0, jobs.session_timeout_s + 10
        ),  # Kafka wants it above the session's
        broker_max_poll_records=jobs.batch_records,
        producer_acks=-1,
    )


def _credentials(options: Mapping[str, str]) -> Any:
    """Faust's credentials for librdkafka's options; None for a plain connection."""
    protocol = options.get("security.protocol", "plaintext").lower()
    context = (
        ssl.create_default_context(cafile=options.get("ssl.ca.location"))
        if protocol.endswith("ssl")
        else None
    )
    if context is not None and "ssl.certificate.location" in options:
        context.load_cert_chain(
            options["ssl.certificate.location"],
            options.get("ssl.key.location"),
            options.get("ssl.key.password"),
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


class Consumer(driver.Consumer):  # type: ignore[misc]
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
        own = {
            tp: at
            for tp in self.assignment()
            if (at := self._own_position((tp.topic, tp.partition))) is not None
        }
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
