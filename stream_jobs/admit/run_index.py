"""Find the records of a run among the candidates without a scan of the whole log.

Most of `claw.candidates` are ticks, so a scan takes longer with each day. A `RunIndex` lists, for
one partition and up to one offset, where each run begins and where its policies and its end are.
Whoever needs it reads the last index from `claw.runs`, scans only what came after, and publishes
the longer index. An index follows from the log alone, so any of them is correct for its topic id,
whoever wrote it; without one the whole log is scanned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.runtime.kafka import Cluster, KafkaError, Record
from clawstream.runtime.topics.records import Decoder, publish_schemas
from clawstream.schemas.codec.single_object import MAGIC
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.ids import is_run
from clawstream.schemas.records import AdmissionPolicy, IndexedRun, RunEnded, RunIndex
from clawstream.schemas.topics import Topics

HEADER_BYTES = 10
"""Header of a value in Avro single-object encoding; names its schema."""
MAX_UNATTRIBUTED = 1000
"""Offsets of unattributed records that are listed."""
PUBLISH_AFTER = 20_000
"""Offsets scanned since the last index, from which on the next one is published."""


class RunEvent(NamedTuple):
    """A policy or the end of a run, with its place on the log."""

    offset: int
    timestamp_ms: int
    event: AdmissionPolicy | RunEnded


@dataclass(slots=True)
class RunOffsets:
    """Offsets of a run: its first and last record, its policies, its end.

    policies: Also records of an unknown schema, which may be policies.
    """

    first: int
    last: int
    policies: list[int] = field(default_factory=list)
    ended: int | None = None


def published_indexes(cluster: Cluster, decoder: Decoder, topics: Topics) -> dict[int, RunIndex]:
    """Return the newest published index of each partition of the candidates."""
    found: dict[int, RunIndex] = {}
    if topics.runs in cluster.topics():
        for record in cluster.read_all(topics.runs):
            with suppress(Undecodable, UnknownSchema):
                index = decoder.decode(record.value)
                if isinstance(index, RunIndex):
                    found[index.partition] = index
    return found


class RunFinder:
    """The runs of one partition of the candidates, up to `read_to`."""

    def __init__(
        self,
        cluster: Cluster,
        decoder: Decoder,
        topics: Topics,
        partition: int,
        indexes: Mapping[int, RunIndex] | None = None,
    ) -> None:
        """Take the published index of the partition.

        Args:
            cluster: The installation's Kafka.
            decoder: Of the installation's records.
            topics: The installation's topics.
            partition: A partition of the candidates.
            indexes: The published indexes, when they were read for several partitions; None: they
                are read here.
        """
        self._cluster, self._decoder, self._topics = cluster, decoder, topics
        self.topic, self.partition = topics.candidates, partition
        self._topic_id = cluster.topic_id(self.topic)
        self.runs: dict[str, RunOffsets] = {}
        self.unattributed: list[int] = []
        """Records that are neither of a run nor ticks."""
        self._unlisted: int | None = None
        """The first unattributed record that is not listed."""
        self._ticks, self._candidates = set[bytes](), set[bytes]()
        """Headers of values that need no decoding."""
        self.read_to = self._published_to = 0
        if indexes is None:
            indexes = published_indexes(cluster, decoder, topics)
        if partition in indexes:
            self._load(indexes[partition])

    def read(self) -> None:
        """Scan to the end of the log, and publish the index if that was long."""
        first, end, ticks = self.read_to or None, self._watermarks()[1], self._ticks
        for record in self._cluster.read_all(self.topic, self.partition, first=first):
            key, value = record.key, record.value
            if key is None and value is not None and value[:HEADER_BYTES] in ticks:
                continue  # nearly all records
            self._add(record)
        self.read_to = max(self.read_to, end)
        if self.read_to - self._published_to >= PUBLISH_AFTER:
            # The index only saves time: a user may have no right to write, for example.
            with suppress(KafkaError):
                self._publish()

    def _add(self, record: Record) -> None:
        key, value, offset = record.key, record.value or b"", record.offset
        self.read_to = offset + 1
        run_id = None if key is None else key.decode("ascii", "replace")
        run = None if run_id is None else self.runs.get(run_id)
        if run is not None:
            run.last = offset
        elif key is not None and run_id is not None and is_run(key):
            run = self.runs[run_id] = RunOffsets(offset, offset)
        if run is not None and run_id is not None:
            self._add_to_run(run_id, run, offset, value)
        elif not self._is_tick(value):
            self._add_unattributed(offset)

    def next_offset(self, run_id: str, first: int) -> int:
        """Return an offset from `first` on, below which no record from `first` on is of the run."""
        run, found = self.runs.get(run_id), max(first, self.read_to)
        if run is not None and run.last >= first:
            found = max(first, run.first)
        if self._unlisted is not None:
            found = min(found, max(first, self._unlisted))
        return found

    def events(self, run_id: str, first: int = 0) -> list[RunEvent]:
        """Return the readable policies of a run and its end, from `first` on, in log order."""
        run = self.runs.get(run_id)
        if run is None:
            return []
        offsets = [*run.policies, *([] if run.ended is None else [run.ended])]
        found = []
        for record in self.records(o for o in sorted(offsets) if o >= first):
            with suppress(Undecodable, UnknownSchema):
                event = self._decoder.decode(record.value)
                if isinstance(event, AdmissionPolicy | RunEnded) and event.run_id == run_id:
                    found.append(RunEvent(record.offset, record.timestamp_ms, event))
        return found

    def records(self, offsets: Iterator[int]) -> Iterator[Record]:
        """Read the records at these ascending offsets, as far as the log still has them."""
        low = self._watermarks()[0]
        ranges = [(o, o) for o in offsets if o >= low]
        return self._cluster.read_ranges(self.topic, self.partition, ranges)

    def _watermarks(self) -> tuple[int, int]:
        return self._cluster.watermarks(self.topic, [self.partition])[self.partition]

    def _add_to_run(self, run_id: str, run: RunOffsets, offset: int, value: bytes) -> None:
        header = value[:HEADER_BYTES]
        if header in self._candidates:
            return
        try:
            name = self._type_name(value)
            if name == "Candidate":
                self._candidates.add(header)
            elif name == "AdmissionPolicy":
                run.policies.append(offset)
            elif name == "RunEnded" and run.ended is None:
                event = self._decoder.decode(value)
                if isinstance(event, RunEnded) and event.run_id == run_id:
                    run.ended = offset
        except UnknownSchema:
            run.policies.append(offset)  # possibly one of a newer release
        except Undecodable:
            pass  # admission dead-letters it

    def _is_tick(self, value: bytes) -> bool:
        try:
            found = self._type_name(value) == "Tick"
        except (Undecodable, UnknownSchema):
            return False
        if found and value.startswith(MAGIC):
            self._ticks.add(value[:HEADER_BYTES])
        return found

    def _type_name(self, value: bytes) -> str:
        """Return the record name of a value. Another release may have published its schema.

        Raises:
            Undecodable, UnknownSchema: As `Decoder.decode`.
        """
        try:
            return self._decoder.codec.type_name(value)
        except UnknownSchema:
            if not self._decoder.look_up():
                raise
            return self._decoder.codec.type_name(value)

    def _add_unattributed(self, offset: int) -> None:
        if len(self.unattributed) < MAX_UNATTRIBUTED:
            self.unattributed.append(offset)
        elif self._unlisted is None:
            self._unlisted = offset

    # -- the published index

    def _load(self, index: RunIndex) -> None:
        """Take a published index, without the records that the log has lost."""
        # After the index: a newer index would reach beyond an older end, as if records were lost.
        low, end = self._watermarks()
        if index.topic_id != self._topic_id or index.read_to > end:
            return
        self.read_to = self._published_to = max(low, index.read_to)
        self.unattributed = [o for o in index.unattributed if o >= low]
        self._unlisted = None if index.unlisted is None else max(low, index.unlisted)
        for run in index.runs:
            if run.last >= low:
                policies = [o for o in run.policies if o >= low]
                ended = run.ended if run.ended is not None and run.ended >= low else None
                self.runs[run.run_id] = RunOffsets(max(low, run.first), run.last, policies, ended)

    def _publish(self) -> None:
        runs = [
            IndexedRun(
                run_id=run_id,
                first=run.first,
                last=run.last,
                policies=tuple(run.policies),
                ended=run.ended,
            )
            for run_id, run in self.runs.items()
        ]
        index = RunIndex(
            topic_id=self._topic_id, partition=self.partition, read_to=self.read_to,
            runs=tuple(runs), unattributed=tuple(self.unattributed), unlisted=self._unlisted,
        )  # fmt: skip
        publish_schemas(self._cluster, self._topics.schemas)
        producer = self._cluster.producer()
        try:
            key = str(self.partition).encode()
            producer.put(self._topics.runs, key, self._decoder.codec.encode(index))
            producer.flush()
        finally:
            producer.close()
        self._published_to = self.read_to
