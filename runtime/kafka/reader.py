"""Reading given partitions from given offsets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition
from confluent_kafka import KafkaError as Code

from clawstream.runtime.kafka.commit import NO_METADATA, CommitMetadata
from clawstream.runtime.kafka.errors import KafkaError, Unavailable, translated, translating
from clawstream.runtime.kafka.record import Record, record_of
from clawstream.runtime.logs import logger

_ENDS_READING = (
    Code._AUTO_OFFSET_RESET,
    Code.OFFSET_OUT_OF_RANGE,
    Code._BAD_MSG,
    Code._BAD_COMPRESSION,
    Code.INVALID_MSG,  # the client would go on behind what it could not read
)
READ_TIMEOUT_S = 30.0
REPEAT_LOG_S = 30.0
"""How often the same error is logged again, while it lasts."""
SILENT_S = 60.0
"""How long a reader may be silent until it asks whether records wait."""
DOUBT_S = 5.0
"""How much longer, if some do: a record may have come in the moment of the question."""
FETCH_BYTES = (64 * 1024, 10 * 1024 * 1024)
"""Minimum and maximum fetch size of a range read, at `FETCH_BYTES_EACH` per offset."""
FETCH_BYTES_EACH = 16 * 1024
BEGINNING = OFFSET_BEGINNING
"""As a first offset: wherever the log starts."""


class ErrorLogThrottle:
    """Logs, at a bounded rate, errors from which the client recovers by itself."""

    def __init__(self) -> None:
        self._logged: dict[int, float] = {}

    def log(self, err: Code, now: float) -> None:
        """Log it, but the same one only every 30 s. now: seconds."""
        if now - self._logged.get(err.code(), -REPEAT_LOG_S) >= REPEAT_LOG_S:
            self._logged[err.code()] = now
            logger().warning("kafka_not_readable", error=str(err))


class AsyncCommits:
    """Positions to commit, until Kafka has stored the newest of each partition. Pure."""

    def __init__(self) -> None:
        self._newest: dict[tuple[str, int], int] = {}
        self._due: dict[tuple[str, int], int] = {}

    def due(self, positions: Mapping[tuple[str, int], int]) -> Mapping[tuple[str, int], int]:
        """What to commit now: these, and those that have not landed."""
        self._newest |= positions
        self._due |= positions
        return dict(self._due)

    def again(self) -> AsyncCommits:
        """Return the same positions, all of them to commit."""
        other = AsyncCommits()
        other.due(self._newest)
        return other

    def landed(self, at: tuple[str, int], offset: int) -> None:
        """Record that Kafka has stored a position.

        The client retries commits, so an older one may be stored after a newer one; the newer is
        then due again.
        """
        if at not in self._newest:
            return
        if offset == self._newest[at]:
            self._due.pop(at, None)
        else:
            self._due[at] = self._newest[at]


class Silence:
    """Tells a reader that has nothing to read from one that has stopped reading. Pure."""

    def __init__(self, now: float) -> None:
        """now: seconds, as in all methods."""
        self.broken(now)

    def broken(self, now: float) -> None:
        """Record that the reader has delivered something."""
        self._ask_at, self._doubted = now + SILENT_S, False

    def asks(self, now: float) -> bool:
        """Return whether it is time to ask whether records wait."""
        return now >= self._ask_at

    def stopped(self, now: float, *, waiting: bool) -> bool:
        """Take the answer; return whether the reader has stopped."""
        stopped = waiting and self._doubted
        self._doubted = waiting and not stopped
        self._ask_at = now + (DOUBT_S if self._doubted else SILENT_S)
        return stopped


Ends = Callable[[str, Iterable[int]], Mapping[int, int]]
"""Topic and partitions to one past the last committed offset of each. Raises KafkaError."""


class Reader:
    """Reads given partitions from given offsets, committed records only.

    Who resumes from the commits of the group repeats the records since the last one that landed;
    for all others they only serve lag displays.

    If its client delivers nothing for a minute although records wait, it gets a new client, which
    continues at the same positions: librdkafka 2.16 was seen to stop for good after its only broker
    was killed and then frozen.

    Args:
        ends: Asks Kafka, by another client, for the ends of partitions.
        start: (topic, partition) to first offset. An offset that the topic no longer has raises
            SourceTruncated.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        group: str,
        start: Mapping[tuple[str, int], int],
        ends: Ends,
        **overrides: Any,
    ) -> None:
        self._options = {
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
        self._next: dict[tuple[str, int], int] = dict(start)
        self._ends: set[tuple[str, int]] = set()
        self._errors = ErrorLogThrottle()
        self._commits = AsyncCommits()
        self._ask_ends, self._silence = ends, Silence(time.monotonic())
        self._begin()

    def _begin(self) -> None:
        """Make a client that reads from the positions."""
        commits = self._commits
        self._consumer = Consumer({**self._options, "on_commit": partial(_on_commit, commits)})
        self._assign(self._next)

    def _assign(self, start: Mapping[tuple[str, int], int]) -> None:
        if start:
            self._consumer.incremental_assign(
                [TopicPartition(t, p, o) for (t, p), o in start.items()]
            )

    def add(self, start: Mapping[tuple[str, int], int]) -> None:
        """Read further partitions too."""
        self._next.update(start)
        self._assign(start)

    def seek(self, at: tuple[str, int], offset: int) -> None:
        """Continue a partition, which has delivered records already, at another offset.

        Records that were fetched of it are dropped.
        """
        with translating():
            self._consumer.seek(TopicPartition(*at, offset))
        self._next[at] = offset
        self._ends.discard(at)

    def poll(self, max_records: int = 500, timeout_s: float = 0.1) -> list[Record]:
        """Return up to `max_records`.

        An empty list after `timeout_s` or at the end of a partition.
        """
        first = self._consumer.poll(timeout_s)
        if first is None:
            self._renew_if_stopped()
            return []
        out: list[Record] = []
        for m in (first, *(self._consumer.consume(max_records - 1, 0) if max_records > 1 else ())):
            err = m.error()
            if err is None:
                out.append(record_of(m))
                self._next[m.topic(), m.partition()] = m.offset() + 1
                self._ends.discard((m.topic(), m.partition()))
            elif err.code() == Code._PARTITION_EOF:
                # Control records take offsets: only the end of the partition tells how far a reader
                # has really come.
                self._next[m.topic(), m.partition()] = max(
                    self._next[m.topic(), m.partition()], m.offset()
                )
                self._ends.add((m.topic(), m.partition()))
            elif err.code() in _ENDS_READING or err.fatal():
                raise translated(KafkaException(err), self._place(m.topic(), m.partition()))
            else:
                self._errors.log(err, time.monotonic())
                continue
            self._silence.broken(time.monotonic())
        return out

    def _place(self, topic: str | None, partition: int | None) -> str | None:
        """Say where reading has ended; None: the error is of no partition."""
        if topic is None or partition is None or (topic, partition) not in self._next:
            return None
        position = f"{topic}-{partition}, position {self._next[topic, partition]}"
        try:
            return f"{position}, end {self._ask_ends(topic, [partition])[partition]}"
        except KafkaError:
            return position

    def _renew_if_stopped(self) -> None:
        """Make a new client in place of one that has stopped."""
        if not self._silence.asks(time.monotonic()):
            return
        try:
            waiting = any(self._waiting())
        except KafkaError:  # away: the client has a reason to be silent
            waiting = False
        if not self._silence.stopped(time.monotonic(), waiting=waiting):
            return
        logger().error("kafka_reader_stopped", positions=[f"{t}-{p}" for t, p in self._next])
        # What the old client still reports of its commits is dropped, and they are made again.
        old, self._commits = self._consumer, self._commits.again()
        threading.Thread(target=old.close, name="stopped-reader", daemon=True).start()
        self._begin()

    def _waiting(self) -> Iterator[bool]:
        """Yield whether each partition has records to read. Raises KafkaError."""
        for topic in {topic for topic, _ in self._next}:
            partitions = [p for t, p in self._next if t == topic]
            for partition, end in self._ask_ends(topic, partitions).items():
                yield end > max(0, self._next[topic, partition])

    def read_until(
        self, at: tuple[str, int], end: int, max_records: int = 2000
    ) -> Iterator[Record]:
        """Yield the records of a partition, the reader's only one, below an offset.

        Args:
            at: Topic and partition.
            end: One past the last offset.
            max_records: Maximum number of records that are fetched before they are yielded.

        Raises:
            Unavailable: No record arrives for 30 s.
        """
        read_at = time.monotonic()
        while (left := end - self._next[at]) > 0:
            records = self.poll(min(max_records, left), 0.1)
            yield from (record for record in records if record.offset < end)
            now = time.monotonic()
            if records:
                read_at = now
            elif now - read_at > READ_TIMEOUT_S:
                raise Unavailable(
                    f"{at[0]}-{at[1]}: could not be read up to its offset {end - 1} within "
                    f"{READ_TIMEOUT_S:g} s"
                )

    @property
    def positions(self) -> Mapping[tuple[str, int], int]:
        """Next offset of each partition.

        Everything below was returned by `poll` or was no record.
        """
        return self._next

    @property
    def at_end(self) -> bool:
        """Whether every partition was read to the end it had when last looked at."""
        return self._ends >= self._next.keys()

    @property
    def group_metadata(self) -> Any:
        """The group, as `Producer.commit_positions` names it to Kafka."""
        return self._consumer.consumer_group_metadata()

    def commit(
        self, positions: Mapping[tuple[str, int], int], metadata: CommitMetadata = NO_METADATA
    ) -> None:
        """Commit the group's positions asynchronously.

        A failure is not an error: the next call, also one without positions, repeats commits that
        Kafka has not stored.
        """
        if due := self._commits.due(positions):
            self._consumer.commit(
                offsets=[TopicPartition(t, p, o, str(metadata)) for (t, p), o in due.items()],
                asynchronous=True,
            )

    def close(self) -> None:
        """Leave; commits in flight are finished."""
        self._consumer.close()


def _on_commit(
    commits: AsyncCommits, error: Code | None, partitions: Iterable[TopicPartition]
) -> None:
    """Called inside of `poll`: what became of a commit."""
    for tp in partitions:
        if error is None and tp.error is None:
            commits.landed((tp.topic, tp.partition), tp.offset)


def fetch_options(ranges: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Return fetch sizes for a read of some ranges: bytes fetched beyond a range are wasted.

    A larger record or batch is still delivered, alone.
    """
    each = sum(last - first + 1 for first, last in ranges) // len(ranges)
    size = min(max(FETCH_BYTES[0], each * FETCH_BYTES_EACH), FETCH_BYTES[1])
    return {
        "fetch_message_max_bytes": size,
        "queued_max_messages_kbytes": size // 1024,
        # A small queue is often full; by default the client then waits for a second.
        "fetch_queue_backoff_ms": 1,
    }
