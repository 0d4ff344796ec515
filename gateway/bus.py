"""Where records go: the protocol, Kafka, and an in-memory fake for tests and try-outs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gateway.errors import BusUnavailable, RecordTooLarge
from runtime import kafka

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

    async def publish(self, messages: Sequence[Message]) -> None:
        """Returns once all are acknowledged by all in-sync replicas; one key keeps its order.

        Raises BusUnavailable (some may have arrived: send all again, ids make that harmless) or RecordTooLarge.
        """
        ...


class KafkaBus:
    """Kafka, with a cheap state of health: a metadata probe every second and what became of the last acknowledgements."""

    def __init__(self, cluster: kafka.Cluster, probe_topic: str, produce_timeout_s: float) -> None:
        self._cluster, self._topic, self._timeout_s = cluster, probe_topic, produce_timeout_s
        self._producer = cluster.producer(
            message_timeout_ms=max(1, int(produce_timeout_s * 1000)), queue_buffering_max_kbytes=QUEUE_KB
        )
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
                there = self._topic in self._cluster.topics(self._topic)
            except kafka.KafkaError:
                continue
            if there:
                now = time.monotonic()
                self._uptime_s += min(now - seen_at, SILENT_AFTER_S / 2)
                self._ok_at = seen_at = now

    @property
    def reachable(self) -> bool:
        return self._ok_at > self._failed_at and time.monotonic() - self._ok_at < SILENT_AFTER_S

    @property
    def uptime_s(self) -> float:
        return self._uptime_s

    async def publish(self, messages: Sequence[Message]) -> None:
        acks: list[asyncio.Future[kafka.Ack]] = []
        try:
            for m in messages:
                acks.append(self._producer.send_soon(m.topic, m.key, m.value))
            async with asyncio.timeout(self._timeout_s):
                for ack in acks:
                    await ack
        except kafka.TooLarge as error:
            raise RecordTooLarge(f"a record is larger than Kafka takes: {error}") from error
        except TimeoutError as error:
            self._failed_at = time.monotonic()
            waited = f"not acknowledged within {self._timeout_s:g} s"
            raise BusUnavailable(f"Kafka at {self._cluster.bootstrap_servers}: {waited}") from error
        except kafka.KafkaError as error:
            self._failed_at = time.monotonic()
            raise BusUnavailable(f"Kafka at {self._cluster.bootstrap_servers}: {error}") from error
        finally:
            for ack in acks:  # no one waits any more: what still comes, or came, must not end up as an unread exception
                if not ack.cancel() and not ack.cancelled():
                    ack.exception()
        self._ok_at = time.monotonic()

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is in flight, then end."""
        self._closed.set()
        self._producer.close(timeout_s)


class MemoryBus:
    """A log in memory. `messages` is everything acknowledged, in order.

    reachable=False: known to be away. acknowledges=False: looks well, but does not acknowledge. `gate` cleared: it takes its time.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reachable = True
        self.acknowledges = True
        self.uptime_s = 0.0
        self.max_bytes = 10 * 1024 * 1024
        self.gate = asyncio.Event()
        self.gate.set()

    async def publish(self, messages: Sequence[Message]) -> None:
        await self.gate.wait()
        if not (self.reachable and self.acknowledges):
            raise BusUnavailable("the memory bus was told not to acknowledge")
        if any(len(m.value) > self.max_bytes for m in messages):
            raise RecordTooLarge(f"a record is larger than {self.max_bytes} bytes")
        self.messages.extend(messages)
