"""Reads `claw.workers` from its start and keeps the engine registry up to date.

Runs in a thread because the Kafka client blocks. Creates the topics first, so that processes can
start in any order. Retries while Kafka is unreachable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from clawstream.gateway.durability.log import Message
from clawstream.gateway.engines.http1 import address_of
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.runtime.kafka import Cluster, Denied, KafkaError, Reader, Record, SourceTruncated
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die, on_loop
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, create_topics, dead_letter, reason_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError, Undecodable, UnknownSchema
from clawstream.schemas.records import WorkerStatus
from clawstream.schemas.settings import Settings

RETRY_S = 0.5


class EngineDiscovery:
    """Follows the topic of worker statuses.

    uptime_s: The clock of the registry, seconds.
    on_dead_letter: Receives dead letters; called on the event loop.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        registry: EngineRegistry,
        codec: Codec,
        uptime_s: Callable[[], float],
        on_dead_letter: Callable[[Message], None],
    ) -> None:
        self._cluster, self._settings, self._registry = cluster, settings, registry
        self._uptime_s, self._on_dead_letter, self._codec = uptime_s, on_dead_letter, codec
        self._topics = settings.kafka.topics
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon thread: while Kafka is unreachable, a client call may outlast a shutdown.
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it on the serving event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread; wait for its end for at most a second."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            self._keep_following()
        except BaseException as error:  # noqa: BLE001 - a silent end leaves no engines
            die(error)

    def _keep_following(self) -> None:
        served = False
        while not self._stop.is_set():
            try:
                create_topics(self._cluster, self._settings)
                check_access(self._cluster, self._settings, "gateway")
                served = True
                self._follow()
            except (SettingsError, Denied) as error:
                if not served:
                    raise
                # A change of topics or permissions while the gateway serves does not end its calls.
                logger().error("topics_unfit", error=str(error))
            except SourceTruncated as error:
                logger().warning("workers_topic_recreated", error=str(error))
                self._on_loop(self._registry.clear)
            except KafkaError as error:
                logger().warning("workers_unreadable", error=str(error))
            self._stop.wait(RETRY_S)

    def _follow(self) -> None:
        topic = self._topics.workers
        topic_id = self._cluster.topic_id(topic)
        # The thread has its own codec because the event loop uses the other one.
        decoder = Decoder(self._cluster, self._topics.schemas)
        first, _ = self._cluster.watermarks(topic, [0])[0]
        reader: Reader = self._cluster.reader(f"{self._topics.prefix}-gateway", {(topic, 0): first})
        try:
            while not self._stop.is_set():
                for record in reader.poll():
                    self._take(decoder, record, topic_id)
        finally:
            reader.close()

    def _take(self, decoder: Decoder, record: Record, topic_id: str) -> None:
        if record.value is None:
            name = (record.key or b"").decode(errors="replace")
            self._on_loop(lambda: self._registry.update(name, None, self._uptime_s()))
            return
        try:
            status = decoder.decode(record.value)
        except (Undecodable, UnknownSchema) as error:
            self._dead_letter(record, topic_id, reason_of(error), str(error))
            return
        if not isinstance(status, WorkerStatus):
            self._dead_letter(
                record,
                topic_id,
                "invalid",
                f"a {type(status).__name__} does not belong on {record.topic}",
            )
            return
        try:
            address_of(status.base_url)
        except ValueError as error:
            self._dead_letter(record, topic_id, "invalid", f"base_url: {error}")
            return
        self._on_loop(lambda: self._registry.update(status.worker_id, status, self._uptime_s()))

    def _dead_letter(self, record: Record, topic_id: str, reason: str, detail: str) -> None:
        letter = dead_letter(record, topic_id, "gateway", reason, detail)
        message = Message(self._topics.dead_letters, letter.key or b"", self._codec.encode(letter))
        self._on_loop(lambda: self._on_dead_letter(message))

    def _on_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None and not self._stop.is_set():
            on_loop(self._loop, call)
