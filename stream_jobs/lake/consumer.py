"""Read the topics of the lake from Kafka and buffer rows that the tables do not have yet."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from clawstream.runtime.kafka import (
    Cluster,
    Reader,
    Record,
    SourceTruncated,
    Unavailable,
    heartbeat,
)
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import Decoder, dead_letter, reason_of
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import REPLAYS, Topics
from clawstream.stream_jobs.errors import TooManyFields
from clawstream.stream_jobs.lake.dedupe import Positions
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of
from clawstream.stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas
from clawstream.stream_jobs.lake.tables.table import Row, Table
from clawstream.stream_jobs.lake.writer import Lake

POLL_RECORDS = 500
POLL_S = 0.1
FETCH_BYTES = 1 << 20
FETCH_WAIT_MS = 250
"""A fetch is answered after this many bytes or milliseconds.

Rows wait for the next flush anyway, and each fetch names all partitions of all topics.
"""
HEARTBEAT_S = 5.0
MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Encoded bytes that trigger a flush, whatever the number of rows."""
_OMIT_DIVISOR = 8
"""Divisor of the bytes of a record whose table omits most of it, as `trajectories` does."""


class _Followed(NamedTuple):
    topic_id: str
    tables: tuple[str, ...]
    records: frozenset[str]


class LakeConsumer:
    """Read a share of every topic of the lake and buffer rows until `commit`.

    Reading starts at the committed offsets of the tables. A topic is followed by its id. When
    `refresh_topics` finds that an id changed, drop this consumer with its buffer: the offsets of a
    recreated topic are unrelated. Unreadable values are counted and logged; the process that owns
    the topic writes the dead letter, or the lake if no other process does (`_is_owner`).
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        schemas: WriterSchemas,
        decoder: Decoder,
        lake: Lake,
    ) -> None:
        self._cluster, self._codec, self._lake, self._share = cluster, schemas, lake, lake.share
        self._decode = RowDecoder(
            schemas, decoder, lake.tables, self._add_columns, self._reject_invalid
        )
        self._topics = settings.kafka.topics
        self._flush_rows = settings.lake.flush_rows
        self._followed: dict[str, _Followed] = {}
        self._reader: Reader = cluster.reader(
            f"{settings.kafka.topic_prefix}-lake",
            {},
            fetch_min_bytes=FETCH_BYTES,
            fetch_wait_max_ms=FETCH_WAIT_MS,
        )
        self._producer = cluster.producer()
        self._committed: dict[tuple[str, int], int] = {}
        self._start: dict[tuple[str, int], int] = {}
        self._committed_at = time.monotonic()
        self.rows: dict[str, list[Row]] = {name: [] for name in catalog()}
        self._buffered_rows = self._buffered_bytes = 0
        self.skipped = 0

    @property
    def full(self) -> bool:
        """Whether a flush is due before the flush interval ends."""
        return self._buffered_rows >= self._flush_rows or self._buffered_bytes >= MAX_BUFFER_BYTES

    def refresh_topics(self) -> bool:
        """Follow new topics.

        Returns:
            False if a followed topic was deleted or recreated.

        Raises:
            Unavailable: Kafka does not answer.
            SourceTruncated: a topic lost records that the lake has not read.
        """
        ids = self._cluster.topic_ids(list(self._followed))
        if any(ids.get(topic) != f.topic_id for topic, f in self._followed.items()):
            return False
        counts = self._cluster.topics()
        kept = {t: self._share.partitions(n) for t, n in counts.items() if self._intact_tables(t)}
        self._follow({t: own for t, own in kept.items() if own and t not in self._followed})
        return True

    def _intact_tables(self, topic: str) -> list[str]:
        """Return the tables that a topic feeds, without damaged ones."""
        return [name for name in tables_of(self._topics, topic) if name not in self._lake.damaged]

    def _follow(self, new: Mapping[str, range]) -> None:
        ids = self._cluster.topic_ids(list(new))
        ends = {topic: self._cluster.watermarks(topic, new[topic]) for topic in ids}
        if self._cluster.topic_ids(list(ids)) != ids:
            return  # recreated meanwhile: these ends may be another topic's; the next call finds it
        found: dict[str, _Followed] = {}
        start: dict[tuple[str, int], int] = {}
        for topic, topic_id in ids.items():
            followed = found[topic] = _Followed(
                topic_id, tables_of(self._topics, topic), records_of(self._topics, topic)
            )
            partitions = [(topic_id, p) for p in new[topic]]
            committed = [
                m
                for t in followed.tables
                for m in [self._lake.committed_offsets(t, partitions)]
                if t not in self._lake.damaged
            ]
            for p, (low, high) in ends[topic].items():
                start[topic, p] = first_offset(
                    topic, p, [m.get((topic_id, p)) for m in committed], low, high
                )
            positions = {p: o for (t, p), o in start.items() if t == topic}
            logger().info("lake_follows", topic=topic, topic_id=topic_id, positions=positions)
        self._followed |= found
        if start:
            self._start |= start
            self._reader.add(start)

    def poll(self) -> None:
        """Read at most POLL_RECORDS; wait at most POLL_S for the first.

        Raises:
            SourceTruncated: the next offset of a partition is not on Kafka any more.
        """
        for record in self._reader.poll(POLL_RECORDS, POLL_S):
            self._take(record)

    def _take(self, record: Record) -> None:
        followed = self._followed[record.topic]
        if record.value is None and record.topic == self._topics.schemas:
            return  # a tombstone of the compacted topic
        value = record.value or b""
        try:
            name, found = self._decode(record, followed.topic_id, followed.tables)
        except (Undecodable, UnknownSchema) as e:
            self._skip(record, reason_of(e), str(e))
            return
        except TooManyFields as e:
            self._reject_invalid(record, str(e))
            return
        if name not in followed.records:
            self._skip(record, "invalid", f"a {name} does not belong on {record.topic}")
            return
        if REPLAYS in record.headers:
            self._lake.redelivered.add((followed.topic_id, record.partition, record.offset))
        for table, rows in found:
            if table in self._lake.damaged:
                continue
            self.rows[table] += rows
            self._buffered_rows += len(rows)
            self._buffered_bytes += len(value) // (
                _OMIT_DIVISOR if self._lake.tables[table].omit else 1
            )

    def _add_columns(self, wider: Table) -> bool:
        """Add columns of a newer schema, also to buffered rows. Return False if they do not fit."""
        former = self._lake.tables[wider.name]
        if not self._lake.add_columns(wider):
            return False
        self.rows[wider.name] = [wider.upgraded(row, former) for row in self.rows[wider.name]]
        return True

    def _skip(self, record: Record, reason: str, detail: str) -> None:
        self.skipped += 1
        if self._is_owner(record.topic):
            self._dead_letter(record, reason, detail)
        else:
            logger().warning(
                "lake_skipped",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                reason=detail,
            )

    def _reject_invalid(self, record: Record, why: str) -> None:
        """Dead-letter a record of any topic that a table cannot take: its owner may accept it."""
        self.skipped += 1
        self._dead_letter(record, "invalid", why)

    def _is_owner(self, topic: str) -> bool:
        """Return whether no other process dead-letters the records of a topic."""
        run_and_channel = self._topics.parse_ready_batches(topic)
        validation = run_and_channel is not None and run_and_channel[1] == "val"
        return validation or topic in (
            self._topics.weights,
            self._topics.trained_tokens,
            self._topics.schemas,
            self._topics.dead_letters,
        )

    def positions(self, table: str) -> Positions:
        """Return the next offset of each partition of a table; `rows` holds all before it."""
        return {
            (self._followed[topic].topic_id, partition): offset
            for (topic, partition), offset in self._reader.positions.items()
            if table in self._followed[topic].tables
        }

    def reject(self, row: Row, why: str) -> None:
        """Dead-letter a record that no column can hold: its owner may have accepted it."""
        topic_id, partition, offset, _ = row[-4:]
        topic = next(t for t, f in self._followed.items() if f.topic_id == topic_id)
        (record,) = self._cluster.read_range(topic, partition, offset, offset)
        self._dead_letter(record, "invalid", why)

    def _dead_letter(self, record: Record, reason: str, detail: str) -> None:
        """Write a dead letter, at least once: the lake keeps one row of a repeated one."""
        entry = dead_letter(record, self._followed[record.topic].topic_id, "lake", reason, detail)
        self._producer.put(self._topics.dead_letters, entry.key, self._codec.encode(entry))
        self._producer.flush()
        logger().warning(
            "dead_letter",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=reason,
            detail=detail,
        )

    def commit(self) -> None:
        """Clear `rows` after they are in the lake, and commit the positions to Kafka.

        Commits no position of a topic that feeds a damaged table, so its lag includes that table.
        """
        for rows in self.rows.values():
            rows.clear()
        self._buffered_rows = self._buffered_bytes = 0
        self._lake.redelivered.clear()
        moved = {s: o for s, o in self._intact_positions().items() if self._committed.get(s) != o}
        self._reader.commit(moved)
        self._committed |= moved
        self._committed_at = time.monotonic()

    def commit_heartbeat(self) -> None:
        """Every `HEARTBEAT_S`, commit the positions again that wait for the end of a flush.

        With a long flush or flush interval the lake would otherwise look stalled.
        """
        if time.monotonic() - self._committed_at < HEARTBEAT_S:
            return
        before = self._start | self._committed
        waiting = {s: before[s] for s, o in self._intact_positions().items() if before[s] != o}
        self._reader.commit(waiting, heartbeat())
        self._committed_at = time.monotonic()

    def _intact_positions(self) -> Mapping[tuple[str, int], int]:
        """Return the positions without those of topics that feed a damaged table."""
        behind = {
            t for t, f in self._followed.items() if len(self._intact_tables(t)) < len(f.tables)
        }
        return {s: o for s, o in self._reader.positions.items() if s[0] not in behind}

    def is_recreated(self, error: SourceTruncated) -> bool:
        """Return True if the topic of a truncated source was recreated.

        Raises:
            SourceTruncated: it was not; this is `error` itself.
        """
        try:
            if not self.refresh_topics():
                return True
        except Unavailable as e:
            raise error from e
        raise error

    def close(self) -> None:
        """Stop reading and drop the buffer, which is read again after the next start."""
        self._reader.close()
        self._producer.close()


def records_of(topics: Topics, topic: str) -> frozenset[str]:
    """Return the names of the records that belong on a topic."""
    batches = topics.parse_ready_batches(topic)
    specs = topics.specs(1, -1) if batches is None else (topics.ready_batches_spec(*batches),)
    return frozenset(r.__name__ for spec in specs if spec.name == topic for r in spec.records)


def first_offset(
    topic: str, partition: int, committed: Sequence[int | None], low: int, high: int
) -> int:
    """Return the offset at which to start reading a partition.

    This is the lowest committed offset of the topic's tables, or the start of the log if a table
    has none; the end of the log if all tables are damaged.

    Args:
        committed: one value per table of the topic; None: no committed offset.
        low, high: first and next offset of the partition on Kafka.

    Raises:
        SourceTruncated: an offset is not within the log, so records are lost to the lake.
    """
    if not committed:
        return high
    known = [m for m in committed if m is not None]
    for outside in (m for m in known if not low <= m <= high):
        side = f"ends at {high}" if outside > high else f"starts at {low}"
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} {side}, position {outside} (lake); "
            "run clawstream status --positions"
        )
    return min(known) if len(known) == len(committed) else low
