"""The only file that imports the Kafka client: one cluster, its topics, producers and readers.

Positions are (topic id, partition, offset): a topic that was deleted and made again has another id, and is another topic.
Readers see committed records only. Nothing here knows what a record means.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import KafkaError as _Code
from confluent_kafka import Producer as _Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from runtime.errors import PlumbingError

READ_TIMEOUT_S = 30.0


class KafkaError(PlumbingError):
    """Root of what Kafka does not do for us."""


class Unavailable(KafkaError):
    """The cluster did not answer or did not acknowledge in time. Nothing is known of what was sent; retry with the same ids."""


class Fenced(KafkaError):
    """A newer producer with the same transactional id took over. This process must end and must not be restarted."""


class SourceTruncated(KafkaError):
    """A stored position lies outside of what the topic still has. Run `clawstream doctor`; never skipped silently."""


class TooLarge(KafkaError):
    """The record is larger than the topic takes."""


class Record(NamedTuple):
    """One record as read. timestamp_ms: the log's. headers: last value of each name."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


class Ack(NamedTuple):
    """Where an acknowledged record lies."""

    partition: int
    offset: int


def _error(e: BaseException) -> KafkaError:
    """Our error for one of the client's."""
    code = e.args[0] if isinstance(e, KafkaException) and e.args else None
    if isinstance(code, _Code):
        if code.code() in (_Code._FENCED, _Code.INVALID_PRODUCER_EPOCH, _Code.PRODUCER_FENCED):
            return Fenced(str(code))
        if code.code() == _Code.MSG_SIZE_TOO_LARGE:
            return TooLarge(str(code))
        if code.code() in (_Code._AUTO_OFFSET_RESET, _Code.OFFSET_OUT_OF_RANGE):
            return SourceTruncated(str(code))
        return Unavailable(str(code))
    return KafkaError(str(e))


def _record(m: Message) -> Record:
    headers = m.headers()
    return Record(
        m.topic(), m.partition(), m.offset(), m.timestamp()[1], m.key(), m.value(), dict(headers) if headers else {}
    )


class Producer:
    """Idempotent, acks=all, murmur2. `send` waits for the acknowledgement on an asyncio loop; `put` + `flush` do without one.

    With a transactional id: the newest instance of the id fences all older ones when it starts.
    """

    def __init__(self, options: Mapping[str, Any], transactional_id: str | None = None, **overrides: Any) -> None:
        config: dict[str, Any] = {
            "acks": "all",
            "enable.idempotence": True,
            "partitioner": "murmur2_random",
            "compression.type": "lz4",
            "linger.ms": 2,
            "message.max.bytes": 10 * 1024 * 1024,
            "retry.backoff.ms": 20,
            **options,
            **overrides,
        }
        if transactional_id is not None:
            config |= {"transactional.id": transactional_id, "transaction.timeout.ms": 10_000, "retry.backoff.ms": 5}
        self._producer = _Producer(config)
        self._done: deque[tuple[asyncio.Future[Ack], Any, Any]] = deque()
        self._wake_pending = False
        self._poller: threading.Thread | None = None
        self._closing = False
        self._failed: BaseException | None = None
        if transactional_id is not None:
            try:
                self._producer.init_transactions(READ_TIMEOUT_S)
            except KafkaException as e:
                raise _error(e) from e

    # -- with an event loop

    async def send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> Ack:
        """Produce and wait for the acknowledgement of all in-sync replicas. Raises Unavailable, TooLarge or Fenced."""
        return await self.send_soon(topic, key, value, headers, partition)

    def send_soon(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[Ack]:
        """Produce; the future is the acknowledgement. Records of one partition keep the order of the calls."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Ack] = loop.create_future()
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, name="kafka-acks", daemon=True)
            self._poller.start()

        def delivered(err: _Code | None, msg: Message) -> None:  # on the poll thread
            self._done.append((future, err, msg))
            if not self._wake_pending:
                self._wake_pending = True
                loop.call_soon_threadsafe(self._resolve)

        self._produce(topic, key, value, headers, partition, delivered)
        return future

    def _poll(self) -> None:
        while not self._closing:
            self._producer.poll(0.2)

    def _resolve(self) -> None:
        self._wake_pending = False
        while self._done:
            future, err, msg = self._done.popleft()
            if future.done():
                continue
            if err is not None:
                future.set_exception(_error(KafkaException(err)))
            else:
                future.set_result(Ack(msg.partition(), msg.offset()))

    # -- without one

    def put(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None = None,
        partition: int | None = None,
    ) -> None:
        """Produce; `flush` or the end of the transaction waits for the acknowledgements and raises what failed."""

        def delivered(err: _Code | None, _: Message) -> None:
            if err is not None and self._failed is None:
                self._failed = KafkaException(err)

        self._produce(topic, key, value, headers, partition, delivered)
        self._producer.poll(0)  # else deliveries pile up until the queue is full

    def flush(self, timeout_s: float = READ_TIMEOUT_S) -> None:
        """Wait until everything put so far is acknowledged. Raises Unavailable, TooLarge or Fenced."""
        left = self._producer.flush(timeout_s)
        self._raise_failed()
        if left:
            raise Unavailable(f"{left} records were not acknowledged within {timeout_s:g} s")

    def _raise_failed(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise _error(failed) from failed

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Everything put inside becomes visible at once, or not at all. Raises Fenced when a newer instance took over."""
        try:
            self._producer.begin_transaction()
            try:
                yield
            except BaseException:
                self._producer.abort_transaction(READ_TIMEOUT_S)
                raise
            self._producer.commit_transaction(READ_TIMEOUT_S)
            self._raise_failed()
        except KafkaException as e:
            raise _error(e) from e

    def _produce(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Mapping[str, bytes] | None,
        partition: int | None,
        delivered: Any,
    ) -> None:
        more: dict[str, Any] = {"partition": partition} if partition is not None else {}
        try:
            self._producer.produce(
                topic, value, key, on_delivery=delivered, headers=dict(headers) if headers else None, **more
            )
        except BufferError as e:
            raise Unavailable(f"the producer's queue is full: {e}") from e
        except KafkaException as e:
            raise _error(e) from e

    def purge(self) -> None:
        """Give up what is still in the queue; its futures fail."""
        self._producer.purge()

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for what is in flight, then stop the poll thread."""
        self._producer.flush(timeout_s)
        self._closing = True
        if self._poller is not None:
            self._poller.join(1.0)


class Reader:
    """Reads given partitions from given offsets, committed records only. Group and commits are advice for lag displays.

    start: (topic, partition) to first offset. An offset that the topic no longer has raises SourceTruncated.
    """

    def __init__(
        self, options: Mapping[str, Any], group: str, start: Mapping[tuple[str, int], int], **overrides: Any
    ) -> None:
        self._consumer = Consumer(
            {
                "group.id": group,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 50,
                "fetch.message.max.bytes": 10 * 1024 * 1024,
                "queued.max.messages.kbytes": 65536,
                **options,
                **overrides,
            }
        )
        self._next: dict[tuple[str, int], int] = dict(start)
        self._ends: set[tuple[str, int]] = set()
        self._assign(start)

    def _assign(self, start: Mapping[tuple[str, int], int]) -> None:
        if start:
            self._consumer.incremental_assign([TopicPartition(t, p, o) for (t, p), o in start.items()])

    def add(self, start: Mapping[tuple[str, int], int]) -> None:
        """Read further partitions too."""
        self._next.update(start)
        self._assign(start)

    def poll(self, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """Up to max_records, as soon as there are some. Empty after timeout_s, or at the end of a partition."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return []
        out: list[Record] = []
        for m in (first, *(self._consumer.consume(max_records - 1, 0) if max_records > 1 else ())):
            err = m.error()
            if err is None:
                out.append(_record(m))
                self._next[m.topic(), m.partition()] = m.offset() + 1
                self._ends.discard((m.topic(), m.partition()))
            elif err.code() == _Code._PARTITION_EOF:
                # Control records take offsets: only the end of the partition tells how far a reader has really come.
                self._next[m.topic(), m.partition()] = max(self._next[m.topic(), m.partition()], m.offset())
                self._ends.add((m.topic(), m.partition()))
            elif err.code() in (_Code._AUTO_OFFSET_RESET, _Code.OFFSET_OUT_OF_RANGE) or err.fatal():
                raise _error(KafkaException(err))
        return out

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        """Next offset of each partition: everything below was returned by `poll`, or was no record."""
        return self._next

    @property
    def at_end(self) -> bool:
        """Whether every partition was read to the end it had when last looked at."""
        return self._ends >= self._next.keys()

    def commit(self, positions: Mapping[tuple[str, int], int]) -> None:
        """Tell Kafka how far the group is. Advice only: no one resumes from it. Failure is not an error."""
        if positions:
            self._consumer.commit(
                offsets=[TopicPartition(t, p, o) for (t, p), o in positions.items()], asynchronous=True
            )

    def close(self) -> None:
        """Leave; commits in flight are finished."""
        self._consumer.close()


class Cluster:
    """One Kafka cluster. Cheap to make: it connects when first used.

    client_options: librdkafka options for every client, such as security.protocol and sasl.*.
    """

    def __init__(self, bootstrap_servers: str, client_options: Mapping[str, str] | None = None) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._options: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "log_level": 2,  # what matters comes back from the call; a broker that is away makes 20 lines a second otherwise
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.propagation.max.ms": 5000,
            "error_cb": _ignore_error,
            **(client_options or {}),
        }
        self._admin: AdminClient | None = None

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(self._options)
        return self._admin

    def producer(self, transactional_id: str | None = None, **overrides: Any) -> Producer:
        """A producer. With a transactional id it fences the older ones at once. overrides: librdkafka options, `_` for `.`"""
        return Producer(self._options, transactional_id, **{k.replace("_", "."): v for k, v in overrides.items()})

    def reader(self, group: str, start: Mapping[tuple[str, int], int], **overrides: Any) -> Reader:
        """A reader of given partitions. overrides: librdkafka options, `_` for `.`"""
        return Reader(self._options, group, start, **{k.replace("_", "."): v for k, v in overrides.items()})

    # -- topics

    def create_topic(
        self, name: str, partitions: int, config: Mapping[str, str], replication: int = 1, min_insync: int = 1
    ) -> bool:
        """Make a topic; False when it was there. Returns once it can be written."""
        new = NewTopic(name, partitions, replication, config={**config, "min.insync.replicas": str(min_insync)})
        try:
            self.admin.create_topics([new], operation_timeout=READ_TIMEOUT_S)[name].result()
        except KafkaException as e:
            if e.args[0].code() == _Code.TOPIC_ALREADY_EXISTS:
                return False
            raise _error(e) from e
        self._wait_until_made(name)
        return True

    def _wait_until_made(self, name: str) -> None:
        for _ in range(300):
            metadata = self.topics(name).get(name)
            if metadata is not None:
                return
            threading.Event().wait(0.02)
        raise Unavailable(f"topic {name} was made, but is not in the metadata after 6 s")

    def topics(self, name: str | None = None) -> dict[str, int]:
        """Topic to number of partitions; of one topic (absent when it does not exist) or of all."""
        try:
            listed = (
                self.admin.list_topics(name, timeout=READ_TIMEOUT_S)
                if name
                else self.admin.list_topics(timeout=READ_TIMEOUT_S)
            )
        except KafkaException as e:
            raise _error(e) from e
        return {
            t: len(m.partitions)
            for t, m in listed.topics.items()
            if m.error is None and m.partitions and all(p.leader >= 0 for p in m.partitions.values())
        }

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Kafka's UUID of each topic that exists."""
        if not names:
            return {}
        out = {}
        for name, future in self.admin.describe_topics(
            TopicCollection(list(names)), request_timeout=READ_TIMEOUT_S
        ).items():
            try:
                out[name] = str(future.result().topic_id)
            except KafkaException as e:
                if e.args[0].code() != _Code.UNKNOWN_TOPIC_OR_PART:
                    raise _error(e) from e
        return out

    def topic_id(self, name: str) -> str:
        """Kafka's UUID of a topic; KafkaError when there is none of that name."""
        found = self.topic_ids([name]).get(name)
        if found is None:
            raise KafkaError(f"topic {name} does not exist on {self.bootstrap_servers}: run `clawstream topics create`")
        return found

    def set_topic_config(self, name: str, config: Mapping[str, str]) -> None:
        """Replace the topic's own configuration."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, name, set_config=dict(config))
        for future in self.admin.alter_configs([resource]).values():
            future.result()

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all it has."""
        try:
            self.admin.delete_topics([name], operation_timeout=READ_TIMEOUT_S)[name].result()
        except KafkaException as e:
            raise _error(e) from e

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Drop everything below an offset."""
        for future in self.admin.delete_records([TopicPartition(topic, partition, before)]).values():
            try:
                future.result()
            except KafkaException as e:
                raise _error(e) from e

    # -- offsets

    def watermarks(self, topic: str, partitions: Iterable[int] | None = None) -> dict[int, tuple[int, int]]:
        """Partition to (first offset that is there, one past the last, control records included)."""
        consumer = Consumer({**self._options, "group.id": "clawstream-offsets", "enable.auto.commit": False})
        try:
            wanted = range(self.topics(topic).get(topic, 0)) if partitions is None else partitions
            return {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=READ_TIMEOUT_S) for p in wanted}
        except KafkaException as e:
            raise _error(e) from e
        finally:
            consumer.close()

    def check_position(self, topic: str, stored_topic_id: str, partition: int, offset: int) -> bool:
        """Whether a stored position is of today's topic of that name: False for another id, which starts a new position.

        Raises SourceTruncated when it is the same topic but the position lies past its end or before its start.
        """
        if self.topic_ids([topic]).get(topic) != stored_topic_id:
            return False
        low, high = self.watermarks(topic, [partition])[partition]
        if offset > high:
            raise SourceTruncated(
                f"source truncated: {topic}-{partition} ends at {high}, position {offset}; run clawstream doctor"
            )
        if offset < low:
            raise SourceTruncated(
                f"source truncated: {topic}-{partition} starts at {low}, position {offset}; run clawstream doctor"
            )
        return True

    def read_range(self, topic: str, partition: int, first: int, last: int) -> Iterator[Record]:
        """Every committed record with first <= offset <= last, in order. Waits for those not yet readable, 30 s at most."""
        if last < first:
            return
        reader = self.reader("clawstream-range", {(topic, partition): first})
        try:
            idle = 0
            while reader.positions[topic, partition] <= last:
                batch = reader.poll(2000, 0.1)
                for record in batch:
                    if record.offset > last:
                        return
                    yield record
                idle = 0 if batch else idle + 1
                if not batch and reader.at_end and reader.positions[topic, partition] > last:
                    return
                if idle > READ_TIMEOUT_S / 0.1:
                    raise Unavailable(
                        f"{topic}-{partition}: offset {last} could not be read within {READ_TIMEOUT_S:g} s"
                    )
        finally:
            reader.close()

    def read_all(self, topic: str, partition: int = 0, first: int | None = None) -> Iterator[Record]:
        """Every committed record from `first` (default: the first there is) to the end the partition has now."""
        low, high = self.watermarks(topic, [partition])[partition]
        start = low if first is None else first
        if start >= high:
            return
        reader = self.reader("clawstream-range", {(topic, partition): start})
        try:
            idle = 0
            while reader.positions[topic, partition] < high:
                batch = reader.poll(2000, 0.1)
                yield from (r for r in batch if r.offset < high)
                idle = 0 if batch else idle + 1
                if idle > READ_TIMEOUT_S / 0.1:
                    raise Unavailable(
                        f"{topic}-{partition}: its end {high} could not be read within {READ_TIMEOUT_S:g} s"
                    )
        finally:
            reader.close()

    # -- groups

    def groups(self) -> list[str]:
        """Names of all consumer groups."""
        try:
            listed = self.admin.list_consumer_groups(request_timeout=READ_TIMEOUT_S).result()
        except KafkaException as e:
            raise _error(e) from e
        return sorted(g.group_id for g in listed.valid)

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """What the group has committed: (topic, partition) to next offset."""
        request = ConsumerGroupTopicPartitions(group)
        try:
            found = self.admin.list_consumer_group_offsets([request], request_timeout=READ_TIMEOUT_S)[group].result()
        except KafkaException as e:
            raise _error(e) from e
        return {(tp.topic, tp.partition): tp.offset for tp in found.topic_partitions if tp.offset >= 0}


def _ignore_error(_: _Code) -> None:
    """Errors that matter come back from the call they concern; the rest is librdkafka saying that it retries."""


BEGINNING = OFFSET_BEGINNING
