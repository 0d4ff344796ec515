"""Erase trajectories from the lake: their blobs, then their rows, then the files that had them.

Each step may be repeated, so an interrupted erasure is started again. Readers of former versions
fail afterwards. A writer that runs meanwhile opens the table again: committed offsets stay, so it
writes no row twice. Rows that it has yet to read from Kafka come later; erase again then.

The tables of admission (`batches`, `groups`, `late_revisions`) keep ids and rewards: they tell what
was trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow.compute as pc

from clawstream.runtime.blob_store import BlobStore
from clawstream.schemas.blob_refs import MOVABLE, referenced
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.ids import check_run_id, check_trajectory_key, key_of_trajectory
from clawstream.schemas.records import Reward, SessionEvent, Step
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.snapshots import SnapshotError, named_snapshots
from clawstream.stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    LakeError,
    LakeMissing,
    dataset,
    delete_rows,
    open_table,
)
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of

Places = Mapping[tuple[str, int], Collection[int]]
"""(topic id, partition) to offsets."""
_PLACE = ("kafka_topic_id", "kafka_partition", "kafka_offset")
Keys = Collection[tuple[str, str]]
"""(run id, trajectory key) of what is erased."""
LETTERS = "dead_letters"
ORPHAN_HOURS = 1
"""Files of no commit may be in writing now; older ones are of writers that were killed."""
BLOB_AGE_S = 3600.0
"""Age of a blob in seconds from which every record that names it counts as read by the lake."""
_ATTEMPTS = 8
_TABLES = {Step: "steps", SessionEvent: "session_events", Reward: "rewards"}
_STEP_BLOBS = "blobs"
_BLOB_COLUMNS = (
    (_TABLES[Step], _STEP_BLOBS),
    *((_TABLES[kind], field) for kind in (SessionEvent, Reward) for field in MOVABLE[kind]),
)
"""Table and column that name blobs; a step lists its moved fields and its images in `blobs`."""


class ErasureCollided(LakeError):
    """Other commits to a table came between each time. Some rows may be left: try again."""


class BlobTooYoung(LakeError):
    """A blob was written lately: a record that the lake has yet to read may name it."""


class Found(NamedTuple):
    """Rows of a table that are to be erased.

    topic: Where the log has them, too. kept_until: When its retention ends; None: never, but for
        `clawstream topics trim`.
    """

    table: str
    rows: int
    topic: str
    kept_until: datetime | None


class _Selection(NamedTuple):
    """The same rows as a filter of Arrow and as a condition in SQL."""

    filter: pc.Expression
    predicate: str


def _at(places: Places) -> _Selection:
    """Select rows by their places on the log."""
    condition, parts = pc.scalar(False), list[str]()
    for (topic_id, partition), offsets in places.items():
        here = (pc.field("kafka_topic_id") == topic_id) & (pc.field("kafka_partition") == partition)
        condition |= here & pc.field("kafka_offset").isin(sorted(offsets))
        listed = ", ".join(map(str, sorted(offsets)))
        parts.append(
            f"(kafka_topic_id = '{topic_id}' AND kafka_partition = {partition} "
            f"AND kafka_offset IN ({listed}))"
        )
    return _Selection(condition, " OR ".join(parts) or "false")


class Erasure:
    """The erasure of some trajectories from the lake of the settings.

    Args:
        settings: The lake, its blob store, and the retention of the topics.
        keys: The trajectories; for an agent's or anonymous session the whole session.

    Raises:
        InvalidId: A key has another form.
    """

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._settings, self._options = settings, settings.lake.storage_options
        self._runs: Mapping[str, set[str]] = defaultdict(set)
        for run_id, key in keys:
            self._runs[check_run_id(run_id)].add(check_trajectory_key(key))

    def find(self) -> Iterator[Found]:
        """Yield the tables that have rows of the trajectories, from the lake as it is now."""
        for name, table in self._tables():
            rows = dataset(table, self._options).to_table(
                columns=["kafka_timestamp"], filter=self._selected(name, table).filter
            )
            if rows.num_rows:
                newest = pc.max(rows.column("kafka_timestamp")).as_py()
                yield Found(name, rows.num_rows, *self._in_log(name, newest))

    def blobs(self) -> set[str]:
        """Return the digests of blobs that only these trajectories name."""
        mine, others = set[str](), set[str]()
        tables = dict(self._tables())
        for name, field in _BLOB_COLUMNS:
            if name in tables:
                data, own = dataset(tables[name], self._options), self._own.filter
                mine |= _digests(data, field, own)
                others |= _digests(data, field, ~own)
        return mine - others

    def run(self) -> int:
        """Erase; return the number of deleted blobs.

        Raises:
            SnapshotError: A named snapshot keeps rows of the lake.
            ErasureCollided: Other commits came between each time.
            BlobTooYoung: Nobody knows yet whether another trajectory names a blob; no row is
                erased.
            BlobStoreAway: A blob could not be deleted.
        """
        if snapshots := sorted(named_snapshots(self._settings)):
            raise SnapshotError(
                f"the named snapshots {', '.join(snapshots)} keep rows: first "
                f"`clawstream tables snapshot {snapshots[0]} --delete`"
            )
        store = BlobStore(self._settings.blob_uri, self._settings.gateway.blob_options)
        blobs = self.blobs()
        for digest in sorted(blobs):
            if store.age_s(digest) < BLOB_AGE_S:
                raise BlobTooYoung(
                    f"blob {store.url_of(digest)} was written in the last {BLOB_AGE_S / 60:g} "
                    "minutes, and a record that the lake has yet to read may name it, too: erase "
                    "again later"
                )
            store.delete(digest)
        for name, _ in self._tables():
            self._delete(name)
            _purge(open_table(self._settings.lake_uri, name, self._options))
        return len(blobs)

    def _tables(self) -> Iterator[tuple[str, Delta]]:
        """Yield the tables that exist and have rows of one trajectory each."""
        for name, table in catalog().items():
            if name == LETTERS or {"run_id", "trajectory_key"} <= set(table.schema.names):
                try:
                    yield name, open_table(self._settings.lake_uri, name, self._options)
                except LakeMissing:
                    continue

    def _selected(self, name: str, table: Delta) -> _Selection:
        """Select the rows of the trajectories in a table of `_tables`."""
        if name != LETTERS:
            return self._own
        try:
            schemas = dataset(
                open_table(self._settings.lake_uri, "schemas", self._options), self._options
            )
        except LakeMissing:
            schemas = None
        return _at(_letters_of(dataset(table, self._options), _codec_of(schemas), self._runs))

    @property
    def _own(self) -> _Selection:
        """Select by run and trajectory key."""
        condition, parts = pc.scalar(False), list[str]()
        for run_id, keys in self._runs.items():
            names = sorted(keys)
            condition |= (pc.field("run_id") == run_id) & pc.field("trajectory_key").isin(names)
            listed = ", ".join(map(repr, names))  # no key has a quote
            parts.append(f"(run_id = '{run_id}' AND trajectory_key IN ({listed}))")
        return _Selection(condition, " OR ".join(parts) or "false")

    def _delete(self, name: str) -> None:
        """Delete the rows of a table, those that came meanwhile too."""
        for _ in range(_ATTEMPTS):
            table = open_table(self._settings.lake_uri, name, self._options)
            selected = self._selected(name, table)
            if not dataset(table, self._options).count_rows(filter=selected.filter):
                return
            try:
                delete_rows(table, selected.predicate)
            except CommitCollided:
                continue
        raise ErasureCollided(
            f"table {name}: other commits came between {_ATTEMPTS} times; erase again"
        )

    def _in_log(self, name: str, newest: datetime) -> tuple[str, datetime | None]:
        """Return the topic of a table, and when its retention has removed a record of that time."""
        kafka = self._settings.kafka
        specs = kafka.topics.specs(kafka.partitions, int(kafka.steps_retention_s * 1000))
        spec = next(s for s in specs if name in tables_of(kafka.topics, s.name))
        kept_ms = int(spec.config["retention.ms"])
        until = None if kept_ms < 0 else newest.astimezone(UTC) + timedelta(milliseconds=kept_ms)
        return spec.name, until


def _letters_of(letters: Any, codec: Codec, runs: Mapping[str, Collection[str]]) -> Places:
    """Return the places of the dead letters of some trajectories.

    Kafka's key decides only if the record cannot be decoded: a record is also a dead letter because
    it has another key, and the key of a candidate is its run.

    Args:
        letters: dataset of the table.
        codec: that knows the schemas.
        runs: run id to trajectory keys.
    """
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    everywhere = {key for keys in runs.values() for key in keys}
    for row in _rows(letters, ["key", "value", *_PLACE]):
        run, key = _trajectory_of(codec, row["key"], row["value"])
        if key in (everywhere if run is None else runs.get(run, ())):
            topic_id, partition, offset = (row[name] for name in _PLACE)
            found[topic_id, partition].append(offset)
    return found


def _trajectory_of(
    codec: Codec, key: bytes | None, value: bytes | None
) -> tuple[str | None, str | None]:
    """Return run id and trajectory key of a record; the run is None if it cannot be decoded."""
    try:
        event = codec.decode(value)
    except (Undecodable, UnknownSchema):
        return None, None if key is None else key.decode(errors="replace")
    name = getattr(event, "trajectory_key", None)
    if name is None and (whole := getattr(event, "trajectory_id", None)) is not None:
        name = key_of_trajectory(whole)
    return getattr(event, "run_id", None), name


def _codec_of(schemas: Any | None) -> Codec:
    """Return a codec that knows the schemas of this release and those of the lake's table."""
    codec = Codec()
    if schemas is not None:
        for row in _rows(schemas, ["schema_json", "confluent_id"]):
            with suppress(Undecodable):  # such a schema is a dead letter itself
                codec.announce(row["schema_json"], row["confluent_id"])
    return codec


def _rows(data: Any, columns: list[str]) -> Iterator[dict[str, Any]]:
    for batch in data.to_batches(columns=columns):
        yield from batch.to_pylist()


def _digests(data: Any, field: str, condition: pc.Expression) -> set[str]:
    """Return the digests of the blobs that a column's rows name."""
    if field == _STEP_BLOBS:
        return {
            digest
            for batch in data.to_batches(columns=[field], filter=condition)
            for digest in pc.struct_field(pc.list_flatten(batch.column(0)), "sha256").to_pylist()
        }
    refers = pc.starts_with(pc.field(field), '{"$blob":')
    found = set[str]()
    for batch in data.to_batches(columns=[field], filter=condition & refers):
        for value in batch.column(0).to_pylist():
            if (blob := referenced(field, value.encode())) is not None:
                found.add(blob.sha256)
    return found


def _purge(table: Delta) -> None:
    """Delete all files that the newest version does not name."""
    for hours, orphans in ((0, False), (ORPHAN_HOURS, True)):
        table.vacuum(
            retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=orphans
        )
