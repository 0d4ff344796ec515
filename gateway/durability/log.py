"""The producer of records: the protocol, and Kafka."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import orjson

from clawstream.gateway.errors import KafkaUnavailable, RecordTooLarge
from clawstream.runtime import kafka
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import die

PROBE_INTERVAL_S = 1.0
SILENT_AFTER_S = 3.0
"""Kafka counts as unreachable after this time without a successful probe or acknowledgement."""
QUEUE_KB = 256 * 1024
"""Memory for records that wait for their acknowledgement; records beyond it are spooled."""
POSITION_EVERY_S = 5.0
"""Interval between queries of the end of the steps topic.

A position may be older than its segment by this time. The segment then counts as older, which is
safe.
"""
PASSED_FOR_S = 10.0
"""Time for which a result of `passed_since` is reused.

All segments of an outage ask about the same position.
"""


class Message(NamedTuple):
    """One record, encoded."""

    topic: str
    key: bytes
    value: bytes


class LogPosition(NamedTuple):
    """The end of the steps topic at some time. ends: End offset of each partition."""

    topic_id: str
    ends: tuple[int, ...]

    def dump(self) -> bytes:
        """Encode as JSON."""
        return orjson.dumps([self.topic_id, list(self.ends)])

    @classmethod
    def load(cls, packed: bytes) -> LogPosition:
        """Decode the result of `dump`."""
        topic_id, ends = orjson.loads(packed)
        return cls(topic_id, tuple(ends))


class Passed(NamedTuple):
    """The records that the steps topic has received since a position.

    seconds: From the first of these records to the newest, by the timestamps of the topic. An
        outage directly after the position, in which the topic received nothing, does not count.
    """

    records: int
    seconds: float


Sent = Callable[[KafkaUnavailable | RecordTooLarge | None], None]
"""Called with the result of a send: None if all records are acknowledged."""


class LogProducer(Protocol):
    """A producer that reports acknowledgements."""

    @property
    def reachable(self) -> bool:
        """Whether to expect an acknowledgement. Cheap; may be a few seconds out of date."""
        ...

    @property
    def uptime_s(self) -> float:
        """Seconds during which Kafka was reachable.

        Stands still in an outage, so that nothing measured by it ages then.
        """
        ...

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        """Send messages; the records of a key keep their order.

        After KafkaUnavailable, some messages may have arrived. Send all of them again; the ids make
        duplicates harmless.

        Args:
            messages: If empty, `sent` gets None at once.
            sent: Called once, on the event loop, possibly before this method returns. Gets None if
                all in-sync replicas have all messages, otherwise the error.
        """
        ...

    @property
    def position(self) -> LogPosition | None:
        """The last known end of the steps topic; None: not known yet."""
        ...

    async def passed_since(self, position: LogPosition) -> Passed:
        """Return what the steps topic has received since a position. Raises KafkaUnavailable."""
        ...


class KafkaLogProducer:
    """Kafka, with a cheap health check by a metadata probe every second and by acknowledgements.

    The probe also detects a topic that was deleted and created again because its broker was wiped;
    see `clawstream.runtime.kafka.LoopProducer`.
    """

    def __init__(self, cluster: kafka.Cluster, probe_topic: str, produce_timeout_s: float) -> None:
        self._cluster, self._topic = cluster, probe_topic
        self._loop_producer = cluster.loop_producer(
            produce_timeout_s, die, queue_buffering_max_kbytes=QUEUE_KB
        )
        self._ok_at = self._failed_at = float("-inf")
        self._uptime_s = 0.0
        self._position: LogPosition | None = None
        self._position_at = float("-inf")
        self._passed: tuple[LogPosition, float, Passed] | None = None
        self._closed = threading.Event()
        # A daemon thread: a probe of a silent broker may take longer than a shutdown should.
        self._prober = threading.Thread(target=self._probe, name="kafka-health", daemon=True)

    def start(self) -> None:
        """Start the probe thread."""
        self._prober.start()

    def _probe(self) -> None:
        seen_at = time.monotonic()
        while not self._closed.wait(PROBE_INTERVAL_S if self.reachable else PROBE_INTERVAL_S / 4):
            try:
                # Both calls are needed: only the metadata shows that every partition has a
                # leader, and only the description has the topic id.
                partitions = self._cluster.topics(self._topic).get(self._topic)
                topic_id = (
                    self._cluster.topic_ids([self._topic]).get(self._topic) if partitions else None
                )
                if not partitions or topic_id is None:
                    continue
                self._update_position(topic_id, partitions)
            except kafka.KafkaError:
                continue
            now = time.monotonic()
            self._uptime_s += min(now - seen_at, SILENT_AFTER_S / 2)
            self._ok_at = seen_at = now

    def _update_position(self, topic_id: str, partitions: int) -> None:
        former = None if self._position is None else self._position.topic_id
        if topic_id == former and time.monotonic() - self._position_at < POSITION_EVERY_S:
            return
        ends = self._cluster.ends(self._topic, range(partitions))
        if former not in (None, topic_id):
            self._loop_producer.renew_soon(f"topic {self._topic} was recreated")
            logger().warning("topic_recreated", topic=self._topic, topic_id=topic_id, former=former)
        self._position = LogPosition(topic_id, tuple(ends[p] for p in range(partitions)))
        self._position_at = time.monotonic()

    @property
    def position(self) -> LogPosition | None:
        return self._position

    @property
    def reachable(self) -> bool:
        return self._ok_at > self._failed_at and time.monotonic() - self._ok_at < SILENT_AFTER_S

    @property
    def uptime_s(self) -> float:
        return self._uptime_s

    def send(self, messages: Sequence[Message], sent: Sent) -> None:
        if messages:
            self._loop_producer.post(messages, partial(self._report, sent))
        else:  # no evidence about the health of Kafka
            sent(None)

    def _report(self, sent: Sent, error: kafka.KafkaError | None) -> None:
        if error is None:
            now = time.monotonic()
            if now - self._ok_at < SILENT_AFTER_S:
                self._ok_at = now
                sent(None)
            else:  # no probe has checked yet that this is still the same topic
                sent(
                    KafkaUnavailable(
                        f"Kafka at {self._cluster.bootstrap_servers} acknowledged out of a silence"
                    )
                )
        elif isinstance(error, kafka.TooLarge):
            sent(RecordTooLarge(f"a record is larger than Kafka takes: {error}"))
        else:
            self._failed_at = time.monotonic()
            sent(KafkaUnavailable(f"Kafka at {self._cluster.bootstrap_servers}: {error}"))

    async def passed_since(self, position: LogPosition) -> Passed:
        if (
            self._passed is None
            or self._passed[0] != position
            or time.monotonic() - self._passed[1] > PASSED_FOR_S
        ):
            try:
                passed = await asyncio.to_thread(self._count_passed, position)
            except kafka.KafkaError as error:
                raise KafkaUnavailable(
                    f"Kafka at {self._cluster.bootstrap_servers}: {error}"
                ) from error
            self._passed = (position, time.monotonic(), passed)
        return self._passed[2]

    def _count_passed(self, position: LogPosition) -> Passed:
        """Query the records since a position (blocking).

        All records count if the topic was recreated since then.
        """
        same = self._cluster.topic_id(self._topic) == position.topic_id
        starts, ends = dict[int, int](), dict[int, int]()
        for p, (low, end) in self._cluster.watermarks(
            self._topic, isolation="read_uncommitted"
        ).items():
            start = max(low, position.ends[p]) if same and p < len(position.ends) else low
            if start < end:
                starts[p], ends[p] = start, end
        first = self._cluster.timestamps_at(self._topic, starts)
        newest = self._cluster.timestamps_at(self._topic, {p: ends[p] - 1 for p in first})
        seconds = max([0, *(newest[p] - first[p] for p in newest)]) / 1000
        return Passed(sum(ends[p] - start for p, start in starts.items()), seconds)

    async def close(self, timeout_s: float = 5.0) -> None:
        """Wait for the sends in flight, then close the producer."""
        await self._loop_producer.drain(timeout_s)
        self._closed.set()
        await asyncio.to_thread(self._loop_producer.close, 1.0)
