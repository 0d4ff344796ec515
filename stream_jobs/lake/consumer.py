"""The Kafka side of the lake: which topics there are, from where each is read, and the rows that are not in the lake yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from runtime.kafka import Cluster, Reader, Record, SourceTruncated, Unavailable
from runtime.logs import logger
from runtime.topics.records import Decoder, dead_letter, reason_of
from schemas.errors import Undecodable, UnknownSchema
from schemas.settings import Settings
from schemas.topics import REPLAYS, Topics
from stream_jobs.errors import TooManyFields
from stream_jobs.lake.dedupe import Positions
from stream_jobs.lake.tables.catalog import Row, Table, catalog, tables_of
from stream_jobs.lake.tables.row_decoder import RowDecoder, WriterSchemas
from stream_jobs.lake.writer import Lake

POLL_RECORDS = 500
POLL_S = 0.1
FETCH_BYTES = 1 << 20
FETCH_WAIT_MS = 250
"""A fetch is answered once so much is there, or after so long. What is read waits for the next flush anyway, and each fetch names all partitions of
all topics."""
MAX_BUFFER_BYTES = 64 * 1024 * 1024
"""Encoded bytes read before the next flush, whatever the number of rows."""
_PART_KEPT = 8
"""Of a record whose table leaves most of it out an eighth is counted: what is kept of a trajectory is far less."""


class _Followed(NamedTuple):
    topic_id: str
    tables: tuple[str, ...]
    records: frozenset[str]


class LakeConsumer:
    """Reads its share of every topic that the lake keeps, from what its tables have committed, and buffers rows until `taken`.

    A topic is followed under the id it had when it was found; `look` tells when that changed, and then this feed must be
    dropped with all it has buffered: offsets of one topic say nothing of another. Unreadable values are counted and logged
    where the process that works on the topic makes the dead letter; where there is none (`_is_ours`), the lake makes it.
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
        self._parse = RowDecoder(schemas, decoder, lake.tables, self._add_columns)
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
        self.rows: dict[str, list[Row]] = {name: [] for name in catalog()}
        self._buffered_rows = self._buffered_bytes = 0
        self.skipped = 0

    @property
    def full(self) -> bool:
        """Whether it is time to flush, however short ago the last flush was."""
        return self._buffered_rows >= self._flush_rows or self._buffered_bytes >= MAX_BUFFER_BYTES

    def refresh_topics(self) -> bool:
        """Follow topics that are new. False: one of those followed was deleted or made anew. Raises Unavailable, SourceTruncated."""
        ids = self._cluster.topic_ids(list(self._followed))
        if any(ids.get(topic) != f.topic_id for topic, f in self._followed.items()):
            return False
        there = self._cluster.topics()
        kept = {t: self._share.partitions(n) for t, n in there.items() if self._written(t)}
        self._follow({t: own for t, own in kept.items() if own and t not in self._followed})
        return True

    def _written(self, topic: str) -> list[str]:
        """Tables that a topic feeds, without those that are damaged."""
        return [name for name in tables_of(self._topics, topic) if name not in self._lake.damaged]

    def _follow(self, new: Mapping[str, range]) -> None:
        ids = self._cluster.topic_ids(list(new))
        ends = {topic: self._cluster.watermarks(topic, new[topic]) for topic in ids}
        if self._cluster.topic_ids(list(ids)) != ids:
            return  # made anew meanwhile: these may be the ends of another topic; the next look finds it
        found: dict[str, _Followed] = {}
        start: dict[tuple[str, int], int] = {}
        for topic, topic_id in ids.items():
            followed = found[topic] = _Followed(
                topic_id, tables_of(self._topics, topic), records_of(self._topics, topic)
            )
            sources = [(topic_id, p) for p in new[topic]]
            marks = [
                m
                for t in followed.tables
                for m in [self._lake.committed_offsets(t, sources)]
                if t not in self._lake.damaged
            ]
            for p, (low, high) in ends[topic].items():
                start[topic, p] = first_offset(
                    topic, p, [m.get((topic_id, p)) for m in marks], low, high
                )
            positions = {p: o for (t, p), o in start.items() if t == topic}
            logger().info("lake_follows", topic=topic, topic_id=topic_id, positions=positions)
        self._followed |= found
        if start:
            self._reader.add(start)

    def poll(self) -> None:
        """Read what there is, at most POLL_RECORDS, waiting POLL_S when there is nothing. Raises SourceTruncated."""
        for record in self._reader.poll(POLL_RECORDS, POLL_S):
            self._take(record)

    def _take(self, record: Record) -> None:
        followed = self._followed[record.topic]
        if record.value is None and record.topic == self._topics.schemas:
            return  # compacted: a key may be taken back
        value = record.value or b""
        try:
            name, found = self._parse(record, followed.topic_id, followed.tables)
        except (Undecodable, UnknownSchema) as e:
            self._skip(record, reason_of(e), str(e))
            return
        except TooManyFields as e:
            self.skipped += 1
            self._dead_letter(
                record, "invalid", str(e)
            )  # on any topic: its owner may have taken it
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
                _PART_KEPT if self._lake.tables[table].omit else 1
            )

    def _add_columns(self, wider: Table) -> bool:
        """Columns for what a newer schema has besides, for the rows that wait as well. False: the lake can't have them."""
        former = self._lake.tables[wider.name]
        if not self._lake.add_columns(wider):
            return False
        self.rows[wider.name] = [wider.upgraded(row, former) for row in self.rows[wider.name]]
        return True

    def _skip(self, record: Record, reason: str, detail: str) -> None:
        self.skipped += 1
        if self._is_ours(record.topic):
            self._dead_letter(record, reason, detail)
        else:
            logger().warning(
                "lake_skipped",
                topic=record.topic,
                partition=record.partition,
                offset=record.offset,
                reason=detail,
            )

    def _is_ours(self, topic: str) -> bool:
        """Topics that no other process reads from a position it keeps, so that the lake is who must bury what is wrong there."""
        run_and_channel = self._topics.parse_ready_batches(topic)
        validation = run_and_channel is not None and run_and_channel[1] == "val"
        return validation or topic in (
            self._topics.weights,
            self._topics.schemas,
            self._topics.dead_letters,
        )

    def positions(self, table: str) -> Positions:
        """How far the topics of a table were read: all rows below are in `rows`, in the lake, or were none."""
        return {
            (self._followed[topic].topic_id, partition): offset
            for (topic, partition), offset in self._reader.positions.items()
            if table in self._followed[topic].tables
        }

    def reject(self, row: Row, why: str) -> None:
        """Dead-letter the record of a row that no column can hold. Its owner may have taken it, so the lake must say it."""
        topic_id, partition, offset, _ = row[-4:]
        topic = next(t for t, f in self._followed.items() if f.topic_id == topic_id)
        (record,) = self._cluster.read_range(topic, partition, offset, offset)
        self._dead_letter(record, "invalid", why)

    def _dead_letter(self, record: Record, reason: str, detail: str) -> None:
        """At least once: after a crash the same record may be buried again; the lake keeps one row of it."""
        letter = dead_letter(record, self._followed[record.topic].topic_id, "lake", reason, detail)
        self._producer.put(self._topics.dead_letters, letter.key, self._codec.encode(letter))
        self._producer.flush()
        logger().warning(
            "dead_letter", topic=record.topic, partition=record.partition, offset=record.offset, reason=reason,
            detail=detail,
        )  # fmt: skip

    def commit(self) -> None:
        """All of `rows` is in the lake: forget it, and tell Kafka how far the lake is.

        Of a topic that feeds a damaged table Kafka is told nothing: its lag is what that table lacks.
        """
        for rows in self.rows.values():
            rows.clear()
        self._buffered_rows = self._buffered_bytes = 0
        self._lake.redelivered.clear()
        behind = {t for t, f in self._followed.items() if len(self._written(t)) < len(f.tables)}
        moved = {
            s: o
            for s, o in self._reader.positions.items()
            if s[0] not in behind and self._committed.get(s) != o
        }
        self._reader.commit(moved)
        self._committed |= moved

    def is_recreated(self, error: SourceTruncated) -> bool:
        """Whether an offset that can't be read is so because its topic was made anew; raises `error` when it was not."""
        try:
            if not self.refresh_topics():
                return True
        except Unavailable as e:
            raise error from e
        raise error

    def close(self) -> None:
        """Stop reading; what is buffered is dropped and will be read again."""
        self._reader.close()
        self._producer.close()


def records_of(topics: Topics, topic: str) -> frozenset[str]:
    """Names of what belongs on a topic."""
    batches = topics.parse_ready_batches(topic)
    specs = topics.specs(1, -1) if batches is None else (topics.ready_batches_spec(*batches),)
    return frozenset(r.__name__ for spec in specs if spec.name == topic for r in spec.records)


def first_offset(
    topic: str, partition: int, marks: Sequence[int | None], low: int, high: int
) -> int:
    """Where to begin, given the marks of the topic's tables: at the lowest, or at the log's start when a table has none.

    No marks at all: no table takes the topic's rows now.

    Raises SourceTruncated when the log ends before a mark or begins after it: something was lost that the lake has never seen.
    """
    if not marks:
        return high
    known = [m for m in marks if m is not None]
    for wrong in (m for m in known if not low <= m <= high):
        side = f"ends at {high}" if wrong > high else f"starts at {low}"
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} {side}, position {wrong} (lake); run clawstream doctor"
        )
    return min(known) if len(known) == len(marks) else low
