"""Where records go: the protocol, Kafka, and an in-memory fake for tests and try-outs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from gateway.errors import BusUnavailable, RecordTooLarge
from runtime import kafka
from runtime.telemetry import logger

PROBE_INTERVAL_S = 1.0
SILENT_AFTER_S = 3.0
"""Kafka counts as away when neither a probe nor an acknowledgement came for so long."""
QUEUE_KB = 256 * 1024
"""Memory for records that wait for their acknowledgement; what goes beyond is spooled."""


class Message(NamedTuple):
    """One record, encoded."""

    topic: str
    key: bytes
    value: bytes


Sent = Callable[[BusUnavailable | RecordTooLarge | None], None]
"""Told what became of records: None when all are acknowledged."""


class Bus(Protocol):
    """A log that acknowledges."""

    @property
    def reachable(self) -> bool:
        """Whether an acknowledgement can be expected. Cheap; may lag a few seconds behind the truth."""
        ...

    @property
    def uptime_s(self) -> float:
        """Seconds during which the log was seen reachable. Stands still in an outage: what is judged by it does not age then."""
        ...

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        """Calls `sent` once, on the loop, soon or before it returns: all in-sync replicas have all of them, or why not.

        No messages: None, at once. One key keeps its order. After BusUnavailable some may have arrived: send all again, ids make that harmless.
        """
        ...

    async def written_since(self, unix_s: float) -> int:
        """Records that came to the log of steps since then, at least. Raises BusUnavailable."""
        ...


class KafkaBus:
    """Kafka, with a cheap state of health: a metadata probe every second and what became of the last acknowledgements.

    The probe also sees when the topic is another one than before: its broker was wiped under us, see `runtime.kafka.Outbox`.
    """

    def __init__(self, cluster: kafka.Cluster, probe_topic: str, produce_timeout_s: float) -> None:
        self._cluster, self._topic = cluster, probe_topic
        self._outbox = cluster.outbox(produce_timeout_s, queue_buffering_max_kbytes=QUEUE_KB)
        self._topic_id: str | None = None
        self._ok_at = self._failed_at = float("-inf")
        self._uptime_s = 0.0
        self._closed = threading.Event()
        # A daemon: a probe of a silent broker may hang for longer than a stop should take.
        self._prober = threading.Thread(target=self._probe, name="kafka-health", daemon=True)

    def start(self) -> None:
        """Begin to probe."""
        self._prober.start()

    def _probe(self) -> None:
        seen_at = time.monotonic()
        while not self._closed.wait(PROBE_INTERVAL_S if self.reachable else PROBE_INTERVAL_S / 4):
            try:
                # Both: only the metadata says that every partition has a leader, only the description has the id.
                there = self._topic in self._cluster.topics(self._topic)
                topic_id = self._cluster.topic_ids([self._topic]).get(self._topic) if there else None
            except kafka.KafkaError:
                continue
            if topic_id is not None:
                if self._topic_id not in (None, topic_id):
                    self._outbox.renew_soon(f"topic {self._topic} was made anew")
                    logger().warning("topic_made_anew", topic=self._topic, topic_id=topic_id, former=self._topic_id)
                self._topic_id = topic_id
                now = time.monotonic()
                self._uptime_s += min(now - seen_at, SILENT_AFTER_S / 2)
                self._ok_at = seen_at = now

    @property
    def reachable(self) -> bool:
        return self._ok_at > self._failed_at and time.monotonic() - self._ok_at < SILENT_AFTER_S

    @property
    def uptime_s(self) -> float:
        return self._uptime_s

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        if messages:
            self._outbox.post(messages, partial(self._told, sent))
        else:  # says nothing about the health of Kafka
            sent(None)

    def _told(self, sent: Sent, error: kafka.KafkaError | None) -> None:
        if error is None:
            now = time.monotonic()
            if now - self._ok_at < SILENT_AFTER_S:
                self._ok_at = now
                sent(None)
            else:  # the probe has not looked yet whether this is still the same log
                sent(BusUnavailable(f"Kafka at {self._cluster.bootstrap_servers} acknowledged out of a silence"))
        elif isinstance(error, kafka.TooLarge):
            sent(RecordTooLarge(f"a record is larger than Kafka takes: {error}"))
        else:
            self._failed_at = time.monotonic()
            sent(BusUnavailable(f"Kafka at {self._cluster.bootstrap_servers}: {error}"))

    async def written_since(self, unix_s: float) -> int:
        try:
            return await asyncio.to_thread(self._cluster.written_since, self._topic, int(unix_s * 1000))
        except kafka.KafkaError as error:
            raise BusUnavailable(f"Kafka at {self._cluster.bootstrap_servers}: {error}") from error

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is in flight, then end."""
        self._closed.set()
        self._outbox.close(timeout_s)


class MemoryBus:
    """A log in memory. `messages` is everything acknowledged, in order.

    reachable=False: known to be away. acknowledges=False: looks well, but does not acknowledge. `gate` cleared: it takes its time. others: how
    many records other writers have put on it since whenever.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reachable = True
        self.acknowledges = True
        self.uptime_s = 0.0
        self.max_bytes = 10 * 1024 * 1024
        self.others = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._waiting: set[asyncio.Task[None]] = set()

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        if self.gate.is_set() or not messages:
            sent(self._take(messages))
            return
        task = asyncio.create_task(self._send_later(messages, sent))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _send_later(self, messages: Sequence[Message], sent: Sent) -> None:
        await self.gate.wait()
        sent(self._take(messages))

    def _take(self, messages: Sequence[Message]) -> BusUnavailable | RecordTooLarge | None:
        if messages and not (self.reachable and self.acknowledges):
            return BusUnavailable("the memory bus was told not to acknowledge")
        if any(len(m.value) > self.max_bytes for m in messages):
            return RecordTooLarge(f"a record is larger than {self.max_bytes} bytes")
        self.messages.extend(messages)
        return None

    async def written_since(self, unix_s: float) -> int:
        return self.others
