"""Faust's consumer and app, adapted to the jobs. Only this module and `shell` import Faust.

Adaptations besides the settings below: the fetch wait is fixed in Faust (`_Thread`); Faust seeks
only to committed offsets (`Consumer`); a fetch that arrives during a revocation must be sought
again (`_give_back`); every rebalance revokes everything, and state is restored in
`on_rebalance_complete`, the only signal that is awaited before records flow; fetches of an older
generation are dropped; Faust's worker command is not used, because it starts a web server and
takes over signals and standard output.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import faust
from faust.transport.drivers import aiokafka as driver
from faust.types import TP

from clawstream.runtime.kafka import CommitMetadata, Denied, Record
from clawstream.runtime.kafka.security import password_of, ssl_context
from clawstream.runtime.logs import logger
from clawstream.schemas.settings import KafkaSecurity, Settings
from clawstream.stream_jobs.errors import ConsumerStopped
from clawstream.stream_jobs.worker.fetch_buffer import Fetched
from clawstream.stream_jobs.worker.member_name import worker_name

FETCH_WAIT_MS = 250
"""aiokafka has one fetch in flight per broker; with Faust's fixed 1500 ms an idle partition would
delay busy ones. Each fetch names all partitions: an idle worker used 3 % of a core at 50 ms, 2 %
at 100 ms.
"""
METADATA_MS = 5000
"""Interval for detecting a missing topic that was created after the assignment. The default is five
minutes.
"""
POLL_INTERVAL_S = 86400.0
"""Nothing is polled while a batch waits for slow reward functions. A slow worker must not lose its
partitions: the next one would take as long. Heartbeats detect a dead one.
"""
_REFUSED = (
    driver.aiokafka.errors.GroupAuthorizationFailedError,
    driver.aiokafka.errors.TopicAuthorizationFailedError,
)

NO_HEADERS: Mapping[str, bytes] = MappingProxyType({})


def record_of(r: Any) -> Record:
    """Convert a record."""
    headers = dict(r.headers) if r.headers else NO_HEADERS
    return Record(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, headers)


def make_app(settings: Settings, group: str) -> Any:
    """Create the embedded Faust app: without web server, signal handlers and redirected output."""
    kafka, jobs = settings.kafka, settings.jobs
    directory = settings.data_dir / "faust" / group  # nothing is kept there: the store is in memory
    directory.mkdir(parents=True, exist_ok=True)
    return faust.App(
        f"{kafka.topic_prefix}-{group}",
        broker=[f"kafka://{server}" for server in settings.bootstrap_servers.split(",")],
        broker_credentials=_credentials(kafka.security),
        store="memory://",
        datadir=str(directory),
        web_enabled=False,
        topic_partitions=kafka.partitions,
        topic_allow_declare=False,
        topic_disable_leader=True,
        table_standby_replicas=1,  # without it the inputs are not assigned together
        # Static membership: no rebalance after a kill.
        consumer_group_instance_id=f"{group}-{worker_name(jobs)}",
        consumer_metadata_max_age_ms=METADATA_MS,
        consumer_max_fetch_size=4 << 20,
        consumer_auto_offset_reset="earliest",  # also after truncation: see `check_truncation`
        broker_commit_interval=1.0,
        broker_session_timeout=jobs.session_timeout_s,
        broker_heartbeat_interval=min(1.0, jobs.session_timeout_s / 4),
        broker_request_timeout=max(
            40.0, jobs.session_timeout_s + 10
        ),  # Kafka wants it above the session's
        broker_max_poll_records=jobs.batch_records,
        broker_max_poll_interval=POLL_INTERVAL_S,
        producer_acks=-1,
    )


def _credentials(security: KafkaSecurity) -> Any:
    """Return Faust's credentials for the settings; None for a plain connection."""
    context = ssl_context(security)
    if security.uses_login:
        return faust.SASLCredentials(
            username=security.user,
            password=password_of(security),
            mechanism=security.mechanism,
            ssl_context=context,
        )
    return faust.SSLCredentials(context) if context is not None else None


def _text_of(metadata: CommitMetadata) -> str:
    """Return metadata for Kafka, with the end that `Cluster.commits` needs."""
    text = str(metadata)
    return f"{text}\0" if text else ""


def explained(error: BaseException) -> BaseException:
    """Return our error for one of the client's; others as they are."""
    if isinstance(error, _REFUSED):
        return Denied(f"{error!r}: grant what `clawstream topics acls` prints")
    if isinstance(error, driver.KafkaError):
        return ConsumerStopped(f"the consumer has stopped: {error!r}")
    return error


class _Thread(driver.AIOKafkaConsumerThread):  # type: ignore[misc]
    """Sets the fetch wait and the isolation level, for which Faust has no settings."""

    def _create_worker_consumer(self, transport: Any) -> Any:
        consumer = super()._create_worker_consumer(transport)
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS
        consumer._isolation_level = "read_committed"
        return consumer

    def check_group(self) -> None:
        """Raise the error for which the client has stopped its work in the consumer group.

        It waits until a fetch has taken the error, and Faust fetches nothing before the rebalance
        ends. So neither would go on.

        Raises:
            Denied: The brokers refuse the group.
            ConsumerStopped: Any other error, such as GroupLoadInProgress in a rebalance.
        """
        coordinator = getattr(self._consumer, "_coordinator", None)
        error = getattr(coordinator, "_pending_exception", None)
        if error is not None:
            raise explained(error) from error

    async def commit_with_metadata(self, commits: Mapping[TP, tuple[int, CommitMetadata]]) -> bool:
        """Commit as Faust does, which has no metadata: return whether Kafka has taken it.

        An error other than a rebalance ends the app, and so the process.
        """
        assigned = self.assignment()
        own = {
            driver.ensure_aiokafka_TP(tp): driver.OffsetAndMetadata(offset, _text_of(metadata))
            for tp, (offset, metadata) in commits.items()
            if tp in assigned
        }
        if not own:
            return False
        try:
            await self._ensure_consumer().commit(own)
        except Exception as e:
            if not (isinstance(e, driver.CommitFailedError) and "already rebalanced" in str(e)):
                self.log.exception("Committing raised %r; assignment: %r", e, assigned)
                await self.crash(e)
            return False
        return True


class Consumer(driver.Consumer):  # type: ignore[misc]
    """Seeks to the job's own positions instead of committed offsets, and passes on whole fetches
    instead of single records.
    """

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

    async def commit_with_metadata(self, commits: Mapping[TP, tuple[int, CommitMetadata]]) -> bool:
        """Commit positions; return False during a rebalance. Another error ends the app."""
        taken: bool = await self._thread.call_thread(self._thread.commit_with_metadata, commits)
        return taken

    def check_group(self) -> None:
        """Raise the error for which the client has stopped, as `_Thread.check_group`."""
        self._thread.check_group()

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
        """Run as long as Faust's fetcher. Any exception ends the process, except those by which
        Faust stops it.
        """
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
        """Seek again, so that records fetched during a revocation or before the seek are fetched
        again.
        """
        try:
            await self.perform_seek()
        # A revocation causes many kinds of errors; the rebalance seeks before records flow.
        except Exception as e:
            if self.flow_active:
                raise
            logger().debug("seek_superseded", error=repr(e))

    def verify_event_path(self, now: float, tp: TP) -> None:
        """Check only whether aiokafka fetches; Faust's check of its streams does not apply."""
        self._thread.verify_recovery_event_path(now, tp)
