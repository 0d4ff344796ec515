"""One cluster: its topics, offsets and groups, and the way to producers and readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka import KafkaError as Code
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, OffsetSpec, TopicMetadata

from clawstream.runtime.kafka.commit import Commit
from clawstream.runtime.kafka.errors import (
    Denied,
    KafkaError,
    SourceTruncated,
    Unavailable,
    translated,
    translating,
)
from clawstream.runtime.kafka.leaders import all_led, is_led
from clawstream.runtime.kafka.loop_producer import LoopProducer
from clawstream.runtime.kafka.producer import Producer
from clawstream.runtime.kafka.reader import FETCH_BYTES, READ_TIMEOUT_S, Reader, fetch_options
from clawstream.runtime.kafka.record import Record
from clawstream.runtime.kafka.retries import ASK_S, COORDINATOR_STARTS, LEADER_MOVES, retried
from clawstream.runtime.kafka.security import Refusals

REFRESH_MS = 3000
"""Metadata refresh of the admin client, in ms.

It sends requests to the broker that it takes for the controller. When that broker dies, it only
finds the new one at a refresh, by default after five minutes.
"""
_FORBIDDEN = (Code.TOPIC_AUTHORIZATION_FAILED, Code.CLUSTER_AUTHORIZATION_FAILED)


class ClusterView(NamedTuple):
    """The cluster id, and the node ids of the brokers that serve, as one broker sees them."""

    cluster_id: str | None
    brokers: frozenset[int]


class Cluster:
    """One Kafka cluster. Cheap to make: it connects when first used.

    client_options: librdkafka options for every client, see `security.client_options`.
    """

    def __init__(
        self, bootstrap_servers: str, client_options: Mapping[str, str] | None = None
    ) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._refusals = Refusals()
        self._options: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            # Relevant errors come with their call; an absent broker would log 20 lines a second.
            "log_level": 2,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.propagation.max.ms": 5000,
            # A metadata request of a producer or admin client must not create a topic.
            "allow.auto.create.topics": "false",
            "error_cb": self._refusals.note,
            **(client_options or {}),
        }
        self._admin: AdminClient | None = None
        self._admin_lock = threading.Lock()

    @property
    def admin(self) -> AdminClient:
        """The client of all threads for questions; made when first used."""
        with self._admin_lock:
            if self._admin is None:
                self._admin = AdminClient(
                    {"topic.metadata.refresh.interval.ms": REFRESH_MS, **self._options}
                )
        return self._admin

    def producer(self, transactional_id: str | None = None, **overrides: Any) -> Producer:
        """Create a producer; with a transactional id it fences older producers of the id at once.

        overrides: librdkafka options, `_` for `.`.
        """
        return Producer(self._options, transactional_id, **_dotted(overrides))

    def loop_producer(
        self, timeout_s: float, on_bug: Callable[[Exception], object], **overrides: Any
    ) -> LoopProducer:
        """Create a producer for one event loop.

        Args:
            timeout_s: Longest wait for an acknowledgement, in seconds.
            on_bug: Called with an exception of a delivery callback.
            overrides: librdkafka options, `_` for `.`.
        """
        return LoopProducer(self._options, timeout_s, on_bug, **_dotted(overrides))

    def reader(self, group: str, start: Mapping[tuple[str, int], int], **overrides: Any) -> Reader:
        """Create a reader of given partitions. overrides: librdkafka options, `_` for `.`."""
        return Reader(self._options, group, start, self._ends, **_dotted(overrides))

    # -- topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        config: Mapping[str, str],
        replication: int = 1,
        min_insync: int = 1,
    ) -> bool:
        """Create a topic and wait until it is writable; return False when it exists."""
        new = NewTopic(
            name, partitions, replication, config={**config, "min.insync.replicas": str(min_insync)}
        )
        try:
            self.admin.create_topics([new], operation_timeout=READ_TIMEOUT_S)[name].result()
        except KafkaException as e:
            if e.args[0].code() != Code.TOPIC_ALREADY_EXISTS:
                raise translated(e) from e
            self._wait_until_made(name)  # another process is just making it
            return False
        self._wait_until_made(name)
        return True

    def _wait_until_made(self, name: str) -> None:
        deadline = time.monotonic() + READ_TIMEOUT_S
        while self.topics(name).get(name) is None:
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"topic {name} was made, but is not in the metadata after {READ_TIMEOUT_S:g} s"
                )
            time.sleep(0.02)

    def ask(self, timeout_s: float) -> None:
        """Check that a broker answers, for commands that a person waits for.

        Raises:
            Unavailable: No broker answers in time; the message says what to do.
            Denied: The brokers refuse the connection.
        """
        self._listed(timeout_s=timeout_s)

    def view(self, timeout_s: float) -> ClusterView | None:
        """Return what a broker knows of its cluster; None without an answer in time."""
        try:
            metadata = self.admin.list_topics(timeout=timeout_s)
        except KafkaException:
            return None
        return ClusterView(metadata.cluster_id, frozenset(metadata.brokers))

    def topics(self, name: str | None = None) -> dict[str, int]:
        """Return topic to number of partitions, of one topic or of all.

        Omits topics without a leader.
        """
        return {t: len(m.partitions) for t, m in self._listed(name).items() if is_led(m)}

    def topics_under(self, prefix: str) -> dict[str, int]:
        """Return topic to number of partitions of all topics with a prefix.

        For callers that treat a missing topic as deleted.

        Raises:
            Unavailable: A topic has no leader.
        """
        return all_led(self._listed(), prefix)

    def _listed(
        self, name: str | None = None, timeout_s: float = READ_TIMEOUT_S
    ) -> dict[str, TopicMetadata]:
        """Return the metadata of topics. Raises Unavailable and Denied as `ask`."""

        each_s = min(ASK_S, timeout_s)

        def listed() -> dict[str, TopicMetadata]:
            before = self._refusals.count(self.admin)
            try:
                return dict(self.admin.list_topics(name, timeout=each_s).topics)
            except KafkaException:
                self._refusals.check(self.admin, before)
                raise

        patience = dict.fromkeys((Code._TRANSPORT, Code._TIMED_OUT), timeout_s - each_s)
        try:
            return retried(listed, patience)
        except Denied:
            raise
        except Unavailable as e:
            raise Unavailable(
                f"no Kafka answers at {self.bootstrap_servers} within {timeout_s:g} s: start one "
                "with `clawstream up` or `clawstream broker run`, or set kafka.bootstrap_servers "
                "and, for a listener with TLS or a login, kafka.security"
            ) from e

    def topic_ids(self, names: Sequence[str]) -> dict[str, str]:
        """Return Kafka's UUID of each topic that exists."""
        if not names:
            return {}
        out = {}
        for name, future in self.admin.describe_topics(
            TopicCollection(list(names)), request_timeout=READ_TIMEOUT_S
        ).items():
            try:
                out[name] = str(future.result().topic_id)
            except KafkaException as e:
                if e.args[0].code() != Code.UNKNOWN_TOPIC_OR_PART:
                    raise translated(e) from e
        return out

    def topic_configs(self, names: Sequence[str]) -> dict[str, dict[str, str] | None]:
        """Return the configuration of each existing topic, defaults included, by one request.

        A topic that may not be described has None.
        """
        if not names:
            return {}
        asked = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names]
        out: dict[str, dict[str, str] | None] = {}
        for resource, future in self.admin.describe_configs(
            asked, request_timeout=READ_TIMEOUT_S
        ).items():
            try:
                out[resource.name] = {name: entry.value for name, entry in future.result().items()}
            except KafkaException as e:
                if e.args[0].code() in _FORBIDDEN:
                    out[resource.name] = None
                elif e.args[0].code() != Code.UNKNOWN_TOPIC_OR_PART:
                    raise translated(e) from e
        return out

    def topic_id(self, name: str) -> str:
        """Return Kafka's UUID of a topic. Raises KafkaError when the topic does not exist."""
        found = self.topic_ids([name]).get(name)
        if found is None:
            raise KafkaError(
                f"topic {name} does not exist on {self.bootstrap_servers}: run `clawstream "
                "topics create`"
            )
        return found

    def delete_topic(self, name: str) -> None:
        """Delete a topic with all its records."""
        with translating():
            self.admin.delete_topics([name], operation_timeout=READ_TIMEOUT_S)[name].result()

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Delete all records below an offset."""
        at = TopicPartition(topic, partition, before)
        with translating():
            self.admin.delete_records([at])[at].result()

    # -- offsets

    def watermarks(
        self, topic: str, partitions: Iterable[int] | None = None, isolation: str = "read_committed"
    ) -> dict[int, tuple[int, int]]:
        """Return partition to (first offset, one past the last, control records included).

        With read_committed, the end is the first record of the oldest open transaction, if any;
        with read_uncommitted it is the end of the log.
        """
        wanted = list(range(self.topics(topic).get(topic, 0)) if partitions is None else partitions)
        return retried(lambda: self._watermarks(topic, wanted, isolation), LEADER_MOVES)

    def _ends(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return the end of each partition; does not wait for a broker that is away."""
        with translating():
            found = self._watermarks(topic, partitions, "read_committed")
        return {partition: end for partition, (_, end) in found.items()}

    def _watermarks(
        self, topic: str, partitions: Iterable[int], isolation: str
    ) -> dict[int, tuple[int, int]]:
        """Use a new client: a request to a broker that dies is not resent to the next leader."""
        consumer = self._asking("clawstream-offsets", isolation)
        try:
            return {
                p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=ASK_S)
                for p in partitions
            }
        finally:
            consumer.close()

    def _asking(self, group: str, isolation: str) -> Consumer:
        """Create a consumer that reads nothing: for questions."""
        return Consumer(
            {
                **self._options,
                "group.id": group,
                "enable.auto.commit": False,
                "isolation.level": isolation,
            }
        )

    def end(self, topic: str, partition: int) -> int:
        """Return the end as `watermarks` does, without a new client: about 1 ms, for frequent
        calls.
        """
        at = TopicPartition(topic, partition)
        asked = self.admin.list_offsets(
            {at: OffsetSpec.latest()},
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ASK_S,
        )
        try:
            return int(asked[at].result().offset)
        except KafkaException:  # its leader moves, or it does not exist: a new client waits for it
            return self.watermarks(topic, [partition])[partition][1]

    def ends(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition to one past its last record, with open transactions, by one request."""
        asked = {TopicPartition(topic, p): OffsetSpec.latest() for p in partitions}
        found = self.admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=ASK_S
        )
        with translating():
            return {tp.partition: int(future.result().offset) for tp, future in found.items()}

    def timestamps_at(self, topic: str, offsets: Mapping[int, int]) -> dict[int, int]:
        """Return partition to the log timestamp (ms) of the first record at or after an offset.

        Omits partitions without such a record.

        Raises:
            Unavailable: The records cannot be read within 30 s.
        """
        found: dict[int, int] = {}
        if not offsets:
            return found
        start = {(topic, p): offset for p, offset in offsets.items()}
        reader = self.reader("clawstream-timestamps", start, fetch_message_max_bytes=FETCH_BYTES[0])
        deadline = time.monotonic() + READ_TIMEOUT_S
        try:
            while len(found) < len(offsets) and not reader.at_end:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{topic}: its records could not be read within {READ_TIMEOUT_S:g} s"
                    )
                for record in reader.poll(100, 0.1):
                    found.setdefault(record.partition, record.timestamp_ms)
        finally:
            reader.close()
        return found

    def offsets_at(
        self, topic: str, timestamp_ms: int, isolation: str = "read_committed"
    ) -> dict[int, int]:
        """Return partition to the first offset with a log timestamp at or after `timestamp_ms`.

        Without such a record it is the end.
        """
        partitions = range(self.topics(topic).get(topic, 0))
        at = OffsetSpec.for_timestamp(timestamp_ms)
        asked = {TopicPartition(topic, p): at for p in partitions}
        ends, found = self.watermarks(topic, partitions, isolation), dict[int, int]()
        for tp, future in self.admin.list_offsets(asked, request_timeout=READ_TIMEOUT_S).items():
            with translating():
                offset = future.result().offset
            found[tp.partition] = offset if offset >= 0 else ends[tp.partition][1]
        return found

    def check_position(self, topic: str, stored_topic_id: str, partition: int, offset: int) -> bool:
        """Return whether a stored position belongs to the current topic of that name.

        Returns:
            False for another topic id: the reader starts a new position.

        Raises:
            SourceTruncated: The topic is the same, but the position is past its end or before its
                start.
        """
        if self.topic_ids([topic]).get(topic) != stored_topic_id:
            return False
        low, high = self.watermarks(topic, [partition])[partition]
        if not low <= offset <= high:
            edge = f"ends at {high}" if offset > high else f"starts at {low}"
            raise SourceTruncated(
                f"source truncated: {topic}-{partition} {edge}, position {offset}; run "
                "clawstream status --positions"
            )
        return True

    def read_range(self, topic: str, partition: int, first: int, last: int) -> Iterator[Record]:
        """Yield every committed record with first <= offset <= last.

        Waits up to 30 s for the last.
        """
        return self.read_ranges(topic, partition, [(first, last)])

    def read_ranges(
        self, topic: str, partition: int, ranges: Iterable[tuple[int, int]]
    ) -> Iterator[Record]:
        """Yield the records of several disjoint, ascending ranges (first, last) with one client."""
        wanted = [r for r in ranges if r[0] <= r[1]]
        if not wanted:
            return
        at = (topic, partition)
        reader = self.reader("clawstream-range", {at: wanted[0][0]}, **fetch_options(wanted))
        try:
            for first, last in wanted:
                if reader.positions[at] != first:
                    reader.seek(at, first)
                yield from reader.read_until(at, last + 1)
        finally:
            reader.close()

    def read_all(
        self, topic: str, partition: int = 0, first: int | None = None, await_open: bool = False
    ) -> Iterator[Record]:
        """Yield every committed record from `first` (default: the start) to the current end.

        await_open: Wait until open transactions of other producers end, and include what follows
        them.

        Raises:
            Unavailable: A transaction is still open after 30 s.
        """
        isolation = "read_uncommitted" if await_open else "read_committed"
        low, high = self.watermarks(topic, [partition], isolation)[partition]
        start = low if first is None else first
        if start >= high:
            return
        reader = self.reader("clawstream-range", {(topic, partition): start})
        try:
            yield from reader.read_until((topic, partition), high)
        finally:
            reader.close()

    # -- groups

    def groups(self, timeout_s: float = READ_TIMEOUT_S) -> list[str]:
        """Return the names of all consumer groups.

        Raises:
            Unavailable: A broker does not say which groups it coordinates.
        """
        each_s = min(ASK_S, timeout_s)

        def names() -> list[str]:
            return group_names(self.admin.list_consumer_groups(request_timeout=each_s).result())

        codes = (*LEADER_MOVES, *COORDINATOR_STARTS)
        return retried(names, dict.fromkeys(codes, timeout_s - each_s))

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """Return what the group has committed: (topic, partition) to next offset."""
        return {at: commit.offset for at, commit in self.commits(group).items()}

    def commits(
        self, group: str, timeout_s: float = READ_TIMEOUT_S
    ) -> dict[tuple[str, int], Commit]:
        """Return what the group has committed, with the metadata, by (topic, partition).

        Asks as a consumer of the group that joins nothing. The admin client's question for the
        offsets of a group ends the process when its time-out passes or its connection breaks
        (confluentinc/librdkafka#4605).

        Raises:
            Unavailable: Kafka does not answer in time.
        """
        asked = [
            TopicPartition(topic, partition)
            for topic, metadata in self._listed(timeout_s=timeout_s).items()
            for partition in metadata.partitions
        ]
        # A reader of committed records would wait here for the end of open transactions.
        consumer = self._asking(group, "read_uncommitted")
        try:
            # A broker that has just started is still reading its groups; the client does not wait.
            found = retried(
                lambda: consumer.committed(asked, timeout=timeout_s), COORDINATOR_STARTS
            )
        finally:
            consumer.close()
        for tp in found:
            if tp.error is not None and tp.error.code() != Code.UNKNOWN_TOPIC_OR_PART:
                raise translated(KafkaException(tp.error))
        return {
            (tp.topic, tp.partition): Commit(tp.offset, _metadata(tp))
            for tp in found
            if tp.offset >= 0
        }


def _metadata(committed: TopicPartition) -> str:
    """Return the metadata of a commit, without that of clients that do not end it as C does.

    librdkafka ends it with a null character, and reads it up to the next one.
    """
    try:
        return committed.metadata or ""
    except UnicodeDecodeError:
        return ""


def _dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return librdkafka's names of options: `linger_ms` is `linger.ms`."""
    return {name.replace("_", "."): value for name, value in overrides.items()}


def group_names(listed: Any) -> list[str]:
    """Return the names in the client's list of groups.

    Raises:
        KafkaException: A broker did not say which groups it coordinates: the list is not whole.
    """
    for error in listed.errors:
        # The client gives its code instead of an exception, and `except` does not catch a code.
        raise KafkaException(error)
    return sorted(group.group_id for group in listed.valid)
