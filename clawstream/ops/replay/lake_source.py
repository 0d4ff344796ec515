"""Replay input from the lake: the records of one run at fixed versions of the tables.

Rows have the offset and log time of their records, which gives the log order. Ticks are not stored,
but their effects are: the closing time in each trajectory row counts as a tick of its partition. A
last tick at the end of all records closes what is due. The result equals that of a replay from
topics unless time-outs differ; then time only advances with the records.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from clawstream.ops.replay.fold import ReplayEvent
from clawstream.ops.replay.record_filter import RecordFilter
from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.records import Assessment, Curation, Reward, SessionEvent, Step, Tick
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, payload_of
from clawstream.stream_jobs.assemble.payload.new_messages import new_messages
from clawstream.stream_jobs.assemble.payload.trainability import trainability
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic
from clawstream.stream_jobs.lake.delta.table import LakeError, LakeMissing, dataset, open_table
from clawstream.stream_jobs.lake.tables.row_events import events_of

CHUNK = 1000
"""Records in memory at once."""
_EPOCH = 1 << 40
"""Offsets of a recreated topic follow all of its predecessor."""
_PLACE = ("kafka_topic_id", "kafka_partition", "kafka_offset", "kafka_timestamp")
CLOSINGS = "trajectories"
READ: Mapping[SourceTopic, Mapping[str, type]] = {
    STEPS: {"steps": Step, "session_events": SessionEvent},
    REWARDS: {"rewards": Reward, "curation": Curation, "assessments": Assessment},
}
"""The tables of each input, with the type of their records."""


def snapshot_versions(
    settings: Settings, table_versions: Mapping[str, int | None] | None = None
) -> dict[str, int]:
    """Return the version of each table that a replay reads: the given or the newest one.

    A table with version None is not read. Raises LakeMissing.
    """
    found, table_versions = {}, table_versions or {}
    if "steps" in table_versions and table_versions["steps"] is None:
        raise LakeMissing(f"lake {settings.lake_uri} had no table steps then")
    for name in (*READ[STEPS], *READ[REWARDS], CLOSINGS):
        wanted = table_versions.get(name)
        if name in table_versions and wanted is None:
            continue
        try:
            table = open_table(settings.lake_uri, name, settings.lake.storage_options, wanted)
        except LakeMissing:
            if wanted is not None or name == "steps":
                raise
            continue  # the lake was created by an older release, without that table
        found[name] = int(table.version())
    return found


def partitions_of(settings: Settings, versions: Mapping[str, int]) -> int:
    """Return the number of input partitions by the run's rows, at least that of the settings."""
    highest, of_run = settings.kafka.partitions - 1, pc.field("run_id") == settings.run_id
    for name, rows in _datasets(settings, versions).items():
        if name != CLOSINGS:
            found = rows.to_table(columns=[_PLACE[1]], filter=of_run).column(0)
            highest = max(highest, pc.max(found).as_py() if len(found) else 0)
    return highest + 1


def _datasets(settings: Settings, versions: Mapping[str, int]) -> dict[str, Any]:
    storage = settings.lake.storage_options
    return {
        name: dataset(open_table(settings.lake_uri, name, storage, version), storage)
        for name, version in versions.items()
    }


class _Ref(NamedTuple):
    """The position of one record.

    time: Running maximum of its partition, ms. timestamp: Its own, ms. offset: Unique and rising
    in its partition, also across recreated topics.
    """

    time: int
    partition: int
    source: SourceTopic
    offset: int
    table: str
    timestamp: int


@dataclass(frozen=True, slots=True)
class Span:
    """Log time [since, until) in ms; None: all."""

    since_ms: int | None = None
    until_ms: int | None = None


class LakeReplaySource:
    """The records of a run in the lake, in the order of the log."""

    def __init__(
        self,
        settings: Settings,
        versions: Mapping[str, int],
        partitions: int,
        span: Span,
        record_filter: RecordFilter,
        new_messages_bytes: int = 0,
    ) -> None:
        """partitions: From `partitions_of`. new_messages_bytes: as in `Limits` of assemble.

        Raises LakeError when the lake has no record of the run.
        """
        self.unreadable = 0
        self._record_filter, self._span, self._partitions = record_filter, span, partitions
        self._new_messages_bytes = new_messages_bytes
        self._tables = _datasets(settings, versions)
        self._epochs: dict[str, int] = {}
        self._stamps: dict[int, tuple[array[int], array[int]]] = {}
        """Of the steps, by partition: offsets in order, and timestamps."""
        self._refs = sorted(ref for source in (STEPS, REWARDS) for ref in self._index(source))
        if not self._refs:
            raise LakeError(
                f"lake {settings.lake_uri} has nothing of run {record_filter.run} in that "
                "window, at these versions"
            )
        self.end = max(ref.time for ref in self._refs)
        self._ticks = self._closings()
        self.end = max([self.end, *(t for t, _ in self._ticks)])

    def _where(self, *more: Any) -> Any:
        """Return the condition for rows of the run."""
        return reduce(and_, more, pc.field("run_id") == self._record_filter.run)

    def _within(self, column: str) -> list[Any]:
        """Return the conditions for rows in the window."""
        span, at = self._span, pc.field(column)
        since = [at >= _instant(span.since_ms)] if span.since_ms is not None else []
        return since + ([at < _instant(span.until_ms)] if span.until_ms is not None else [])

    def _index(self, source: SourceTopic) -> Iterator[_Ref]:
        """Yield the positions of all records of one input; about 220 bytes of memory each."""
        parts, where = [], self._where(*self._within(_PLACE[3]))
        for name in (n for n in READ[source] if n in self._tables):
            rows = self._tables[name].to_table(columns=list(_PLACE), filter=where)
            names = pa.array([name] * rows.num_rows, pa.string())
            parts.append(rows.append_column("table", names))
        if not parts:
            return
        rows = pa.concat_tables(parts)
        firsts = rows.group_by("kafka_topic_id").aggregate([("kafka_timestamp", "min")])
        topic_ids = firsts.sort_by("kafka_timestamp_min").column("kafka_topic_id").to_pylist()
        self._epochs |= {topic_id: index for index, topic_id in enumerate(topic_ids)}
        places = sorted(
            (p, o + _EPOCH * self._epochs[i], t // 1000, name)
            for i, p, o, t, name in zip(
                *(rows.column(c).to_pylist() for c in _PLACE[:3]),
                rows.column(_PLACE[3]).cast(pa.int64()).to_pylist(),
                rows.column("table").to_pylist(),
                strict=True,
            )
        )
        time: dict[int, int] = {}
        for partition, offset, timestamp, name in places:
            if source == STEPS:
                offsets, stamps = self._stamps.setdefault(partition, (array("q"), array("q")))
                offsets.append(offset)
                stamps.append(timestamp)
            time[partition] = max(time.get(partition, 0), timestamp)
            yield _Ref(time[partition], partition, source, offset, name, timestamp)

    def _closings(self) -> list[tuple[int, int]]:
        """Return (time, partition) of each closing in the window."""
        if CLOSINGS not in self._tables:
            return []
        where = self._where(*self._within("closed_at"), pc.field("part") == 0)
        columns = ["closed_at", "kafka_partition"]
        rows = self._tables[CLOSINGS].to_table(columns=columns, filter=where)
        times = (t // 1000 for t in rows.column("closed_at").cast(pa.int64()).to_pylist())
        return sorted(set(zip(times, rows.column("kafka_partition").to_pylist(), strict=True)))

    def events(self) -> Iterator[ReplayEvent]:
        """Yield all records and ticks, as `ReplaySource.events`."""
        ticks, at = self._ticks, 0
        for first in range(0, len(self._refs), CHUNK):
            refs = self._refs[first : first + CHUNK]
            events = self._read(refs)
            for ref in refs:
                while at < len(ticks) and ticks[at] <= (ref.time, ref.partition):
                    yield _tick(*ticks[at])
                    at += 1
                event = self._record_filter.apply(events[ref])
                if event is not None:
                    key = event.trajectory_key.encode()
                    yield ReplayEvent(ref.time, ref.partition, ref.source, ref.offset, key, event)
        yield from (_tick(*tick) for tick in ticks[at:])
        yield from (_tick(self.end, partition) for partition in range(self._partitions))

    def _read(self, refs: list[_Ref]) -> dict[_Ref, Any]:
        """Read records, table by table, by one scan over the files that can contain some."""
        found: dict[_Ref, Any] = {}
        for name in {ref.table for ref in refs}:
            wanted = {(r.partition, r.offset): r for r in refs if r.table == name}
            times = [r.timestamp for r in wanted.values()]
            at = pc.field(_PLACE[3])
            where = self._where(at >= _instant(min(times)), at <= _instant(max(times)))
            for place, event in self._events(name, where):
                if (ref := wanted.get(place)) is not None:
                    found[ref] = event
        return found

    def _events(self, name: str, where: Any) -> Iterator[tuple[tuple[int, int], Any]]:
        """Yield ((partition, offset as in `_Ref`), record) of rows."""
        record = next(tables[name] for tables in READ.values() if name in tables)
        rows = self._tables[name].to_table(filter=where)
        ids, partitions, offsets = (rows.column(c).to_pylist() for c in _PLACE[:3])
        for topic_id, p, o, event in zip(
            ids, partitions, offsets, events_of(record, rows), strict=True
        ):
            if topic_id in self._epochs:
                yield (p, o + _EPOCH * self._epochs[topic_id]), event

    def payload(
        self, partition: int, starts: Mapping[int, int]
    ) -> Iterable[tuple[int, CachedPayload]]:
        """As `InputLog.payload`. Reads only files of the trajectory's time."""
        offsets, stamps = self._stamps[partition]
        times = [stamps[bisect_left(offsets, offset)] for offset in starts]
        raw = [offset % _EPOCH for offset in starts]
        at = pc.field(_PLACE[3])
        where = self._where(
            at >= _instant(min(times)), at <= _instant(max(times)),
            pc.field(_PLACE[1]) == partition, pc.field(_PLACE[2]).isin(raw),
        )  # fmt: skip
        for name in READ[STEPS]:
            if name in self._tables:
                for (_, offset), event in self._events(name, where):
                    chosen = self._record_filter.apply(event) if offset in starts else None
                    if isinstance(chosen, Step):
                        added = new_messages(
                            RecordedRequest(chosen.request_json), self._new_messages_bytes
                        )
                        start = starts[offset]
                        yield offset, payload_of(chosen, trainability(chosen), start, added)
                    elif isinstance(chosen, SessionEvent):
                        yield offset, chosen.metadata_json or b""


def _tick(time: int, partition: int) -> ReplayEvent:
    return ReplayEvent(time, partition, STEPS, -1, None, Tick(partition=partition))


def _instant(ms: int) -> Any:
    return pa.scalar(ms * 1000, pa.timestamp("us", "UTC"))
