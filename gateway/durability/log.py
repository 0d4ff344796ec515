"""Where records go: the protocol, Kafka, and an in-memory fake for tests and try-outs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import orjson

from gateway.errors import KafkaUnavailable, RecordTooLarge
from runtime import kafka
from runtime.logs import logger
from runtime.process.lifecycle import die

PROBE_INTERVAL_S = 1.0
SILENT_AFTER_S = 3.0
"""Kafka counts as away when neither a probe nor an acknowledgement came for so long."""
QUEUE_KB = 256 * 1024
"""Memory for records that wait for their acknowledgement; what goes beyond is spooled."""


POSITION_EVERY_S = 5.0
"""How often it is asked where the log ends. What spooled records are judged by may be older by that: they count as older, which is safe."""
PASSED_FOR_S = 10.0
"""How long an answer to `passed_since` is used again: all segments of an outage ask about the same position."""


class Message(NamedTuple):
    """One record, encoded."""

    topic: str
    key: bytes
    value: bytes


class LogPosition(NamedTuple):
    """Where the log of steps ended at some moment. ends: by partition."""

    topic_id: str
    ends: tuple[int, ...]

    def dump(self) -> bytes:
        """As JSON."""
        return orjson.dumps([self.topic_id, list(self.ends)])

    @classmethod
    def load(cls, packed: bytes) -> LogPosition:
        """What `dump` gave."""
        topic_id, ends = orjson.loads(packed)
        return cls(topic_id, tuple(ends))


class Passed(NamedTuple):
    """What has come to the log of steps since a position. seconds: from the first of these records to the newest, by the log's timestamps; so
    the time in which the log took nothing right behind the position, because it was away, is none.
    """

    records: int
    seconds: float


Sent = Callable[[KafkaUnavailable | RecordTooLarge | None], None]
"""Told what became of records: None when all are acknowledged."""


class LogProducer(Protocol):
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

        No messages: None, at once. One key keeps its order. After KafkaUnavailable some may have arrived: send all again, ids make that harmless.
        """
        ...

    @property
    def position(self) -> LogPosition | None:
        """Where the log of steps ended when that was last seen; None: not seen yet."""
        ...

    async def passed_since(self, position: LogPosition) -> Passed:
        """What has come to the log of steps since then. Raises KafkaUnavailable."""
        ...


class KafkaLogProducer:
    """Kafka, with a cheap state of health: a metadata probe every second and what became of the last acknowledgements.

    The probe also sees when the topic is another one than before: its broker was wiped under us, see `runtime.kafka.LoopProducer`.
    """

    def __init__(self, cluster: kafka.Cluster, probe_topic: str, produce_timeout_s: float) -> None:
        self._cluster, self._topic = cluster, probe_topic
        self._loop_producer = cluster.loop_producer(
            produce_timeout_s, die, queue_buffering_max_kbytes=QUEUE_KB
        )
        self._topic_id: str | None = None
        self._ok_at = self._failed_at = float("-inf")
        self._uptime_s = 0.0
        self._position: LogPosition | None = None
        self._position_at = float("-inf")
        self._passed: tuple[LogPosition, float, Passed] | None = None
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
                partitions = self._cluster.topics(self._topic).get(self._topic)
                topic_id = (
                    self._cluster.topic_ids([self._topic]).get(self._topic) if partitions else None
                )
                if partitions and topic_id is not None:
                    self._look_where_it_ends(topic_id, partitions)
            except kafka.KafkaError:
                continue
            if topic_id is not None:
                if self._topic_id not in (None, topic_id):
                    self._loop_producer.renew_soon(f"topic {self._topic} was made anew")
                    logger().warning(
                        "topic_recreated",
                        topic=self._topic,
                        topic_id=topic_id,
                        former=self._topic_id,
                    )
                self._topic_id = topic_id
                now = time.monotonic()
                self._uptime_s += min(now - seen_at, SILENT_AFTER_S / 2)
                self._ok_at = seen_at = now

    def _look_where_it_ends(self, topic_id: str, partitions: int) -> None:
        if topic_id == self._topic_id and time.monotonic() - self._position_at < POSITION_EVERY_S:
            return
        ends = self._cluster.ends(self._topic, range(partitions))
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
            self._loop_producer.post(messages, partial(self._told, sent))
        else:  # says nothing about the health of Kafka
            sent(None)

    def _told(self, sent: Sent, error: kafka.KafkaError | None) -> None:
        if error is None:
            now = time.monotonic()
            if now - self._ok_at < SILENT_AFTER_S:
                self._ok_at = now
                sent(None)
            else:  # the probe has not looked yet whether this is still the same log
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
                passed = await asyncio.to_thread(self._ask_passed, position)
            except kafka.KafkaError as error:
                raise KafkaUnavailable(
                    f"Kafka at {self._cluster.bootstrap_servers}: {error}"
                ) from error
            self._passed = (position, time.monotonic(), passed)
        return self._passed[2]

    def _ask_passed(self, position: LogPosition) -> Passed:
        """Of a topic that was made anew since then everything counts (blocking)."""
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

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait for what is in flight, then end."""
        self._closed.set()
        self._loop_producer.close(timeout_s)


class InMemoryLogProducer:
    """A log in memory. `messages` is everything acknowledged, in order.

    reachable=False: known to be away. acknowledges=False: looks well, but does not acknowledge. `gate` cleared: it takes its time. passed: what
    has come to it since whenever.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reachable = True
        self.acknowledges = True
        self.uptime_s = 0.0
        self.max_bytes = 10 * 1024 * 1024
        self.position: LogPosition | None = LogPosition("memory", (0,))
        self.passed = Passed(0, 0.0)
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

    def _take(self, messages: Sequence[Message]) -> KafkaUnavailable | RecordTooLarge | None:
        if messages and not (self.reachable and self.acknowledges):
            return KafkaUnavailable("the memory producer was told not to acknowledge")
        if any(len(m.value) > self.max_bytes for m in messages):
            return RecordTooLarge(f"a record is larger than {self.max_bytes} bytes")
        self.messages.extend(messages)
        return None

    async def passed_since(self, position: LogPosition) -> Passed:
        return self.passed
