"""The lake writer: every topic into append-only Delta tables, each record exactly once, whoever is killed and whenever.

The only file that imports deltalake. The protocol:

1. A writer claims the lake: it raises the version of app id `writer` in every table, `steps` first. Each later commit repeats its
   number, so that of two writers the newer goes on and the older ends as fenced (exit code 78) at its next commit.
2. A table knows how far each partition is in it by Delta `txn` actions: app id `<table>:<topic id>:<partition>`, version = one past
   the last offset handled. A topic made anew has another id, so it starts a new position.
3. Reading starts at the lowest mark of the tables that a topic feeds; none: at the log's start.
4. A flush appends to each table that has rows. On the very snapshot that the commit builds on, rows below the mark of
   their partition are removed (after a crash the boundaries of batches differ), and rows whose id is in the window of the newest
   `lake.dedupe_window` (a re-sent output has a new offset). Rows and marks land in one commit. A conflict: open
   again, check again, write again.
5. Then the positions are committed to Kafka, as advice for those who watch the lag. Nothing resumes from them.

A table without new rows is not committed at every flush. Its mark follows by an empty commit when there is none yet, when it is
MARK_OFFSETS behind or MARK_S old, and when the writer is told to stop: so that is the most a restart reads again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from runtime.kafka import Cluster, Fenced, SourceTruncated, Unavailable
from runtime.lifecycle import run_sync
from runtime.records import Decoder, cluster_of, create_topics
from runtime.telemetry import logger
from schemas.settings import Settings
from stream_jobs.errors import StreamJobError
from stream_jobs.lake_feed import Feed
from stream_jobs.lake_log import app_id, filesystem, table_uri
from stream_jobs.lake_positions import made_anew, positions
from stream_jobs.lake_tables import Row, Table, catalog
from stream_jobs.lake_window import Positions, Source, Window, fresh

WRITER = "writer"
MARK_OFFSETS = 10_000
MARK_S = 600.0
COMPACT_COMMITS = 256
_ATTEMPTS = 8

Bury = Callable[[Row, str], None]
"""Gives a row that no column type can hold its destination: (row, why)."""


class LakeError(StreamJobError):
    """Root of what goes wrong with the lake."""


class LakeMissing(LakeError):
    """There is no such lake, table or version. The message says where it was looked for."""


class LakeBusy(LakeError):
    """Commits kept colliding with others', which no second writer explains. Start again."""


class LakeTaken(Fenced):
    """A newer lake writer has claimed this lake. This one must end and must not be restarted."""


# -- tables as they lie


def open_table(uri: str, name: str, storage_options: Mapping[str, str], version: int | None = None) -> DeltaTable:
    """The table at its newest or a given version. Raises LakeMissing."""
    where = table_uri(uri, name)
    try:
        return DeltaTable(where, version=version, storage_options=dict(storage_options) or None)
    except TableNotFoundError as e:
        raise LakeMissing(f"no table {name} at {where}: run `clawstream lake` or `clawstream up` first") from e
    except DeltaError as e:
        if version is None:
            raise
        raise LakeMissing(f"table {name} at {where} has no version {version}: {e}") from e


def dataset(table: DeltaTable, storage_options: Mapping[str, str]) -> Any:
    """The table as a pyarrow dataset, by a native file system.

    Never otherwise: deltalake's own is Python code, which read-ahead threads call while the interpreter ends; a scan that stops
    early then crashes at exit.
    """
    return table.to_pyarrow_dataset(filesystem=filesystem(table.table_uri, storage_options))


# -- writing


class Lake:
    """One writer's hold on all tables. Every method raises LakeTaken once a newer writer has claimed them."""

    def __init__(
        self, uri: str, storage_options: Mapping[str, str], window_size: int, compact_commits: int = COMPACT_COMMITS
    ) -> None:
        self._uri, self._options, self._window_size = uri, dict(storage_options), window_size
        self._compact_commits = compact_commits
        self._epoch = 0
        self._windows: dict[str, Window] = {}
        self._marks: dict[str, dict[Source, int]] = {name: {} for name in catalog()}
        self._marked_at: dict[str, float] = {}
        self._commits = dict.fromkeys(catalog(), 0)

    def claim(self) -> None:
        """Make the tables that are missing, fence every older writer, read the windows back."""
        for name, table in catalog().items():
            self._create(table)
            self._claim(name)
            self._windows[name] = self._window(table)
            self._marked_at[name] = time.monotonic()

    def _create(self, table: Table) -> None:
        where = table_uri(self._uri, table.name)
        if DeltaTable.is_deltatable(where, self._options or None):
            return
        if "://" not in where:
            Path(where).mkdir(parents=True, exist_ok=True)
        try:
            DeltaTable.create(
                where,
                table.schema,
                mode="ignore",
                name=table.name,
                storage_options=self._options or None,
                configuration={
                    "delta.checkpointInterval": "20",
                    "delta.dataSkippingStatsColumns": ",".join((*table.stats, "kafka_timestamp")),
                    "delta.logRetentionDuration": "interval 7 days",
                    "delta.deletedFileRetentionDuration": "interval 7 days",
                },
            )
        except DeltaError:
            if not DeltaTable.is_deltatable(where, self._options or None):  # else: another writer has just made it
                raise

    def _claim(self, name: str) -> None:
        empty = catalog()[name].arrow([])

        def attempt() -> bool:
            table = self._open(name)
            held = table.transaction_version(WRITER) or 0
            if self._epoch and held > self._epoch:
                raise LakeTaken(f"lake {self._uri}: writer {held} took over from {self._epoch} while it was starting")
            epoch = self._epoch or held + 1
            self._commit(table, empty, {WRITER: epoch})
            self._epoch = epoch
            return True

        self._until_committed(name, attempt)

    def _open(self, name: str) -> DeltaTable:
        return open_table(self._uri, name, self._options)

    def _commit(self, table: DeltaTable, rows: pa.Table, versions: Mapping[str, int]) -> None:
        """One commit on exactly this snapshot. Raises CommitFailedError when another one has raised one of the versions since."""
        write_deltalake(
            table,
            rows,
            mode="append",
            schema_mode="merge",
            writer_properties=WriterProperties(compression="ZSTD"),
            commit_properties=CommitProperties(app_transactions=[Transaction(a, v) for a, v in versions.items()]),
        )

    def _until_committed(self, name: str, attempt: Callable[[], bool]) -> bool:
        for n in range(_ATTEMPTS):
            try:
                return attempt()
            except CommitFailedError as e:
                logger().warning("lake_commit_collided", table=name, attempt=n, error=str(e))
                time.sleep(0.02 * 2**n)
        raise LakeBusy(f"table {name} of lake {self._uri}: {_ATTEMPTS} commits collided")

    def _window(self, table: Table) -> Window:
        """Keys of the table's newest rows by log timestamp; only files that can hold some are read."""
        window = Window(table.key, self._window_size)
        if not table.key:
            return window
        delta = self._open(table.name)
        files = pa.table(delta.get_add_actions(flatten=True))
        if not files.num_rows:
            return window
        since = oldest_of_newest(files, self._window_size)
        wanted = None if since is None else pc.field("kafka_timestamp") >= since
        columns = list(dict.fromkeys((*table.key, "kafka_timestamp")))
        rows = dataset(delta, self._options).to_table(columns=columns, filter=wanted).sort_by("kafka_timestamp")
        rows = rows.slice(max(0, rows.num_rows - self._window_size))
        values = zip(*(rows.column(c).to_pylist() for c in table.key), strict=True)
        window.add(window.digest(v) for v in values)
        return window

    def marks(self, name: str, sources: Iterable[Source]) -> Positions:
        """How far a table is in each source; sources it knows nothing of are left out."""
        known = _marks(self._open(name), name, sources)
        self._marks[name] |= known
        return known

    def mark_due(self, name: str, positions: Positions) -> bool:
        """Whether a table without new rows should get an empty commit, so that a restart does not read too much again."""
        known = self._marks[name]
        if any(offset and source not in known for source, offset in positions.items()):
            return True  # the first mark comes early: without one a restart can't tell what retention has taken since
        behind = max((offset - known.get(source, 0) for source, offset in positions.items()), default=0)
        return behind >= MARK_OFFSETS or (behind > 0 and time.monotonic() - self._marked_at[name] >= MARK_S)

    def append(self, name: str, rows: Sequence[Row], positions: Positions, bury: Bury, mark: bool = False) -> int:
        """Append the rows that the table does not have and move its marks to `positions`. Returns how many rows were new.

        positions: of every source of the table, past all of `rows`. mark: commit even when no row is new.
        """
        table, window = catalog()[name], self._windows[name]
        added: list[Row] = []

        def attempt() -> bool:
            snapshot = self._open(name)
            if snapshot.transaction_version(WRITER) != self._epoch:
                raise LakeTaken(f"lake {self._uri}: another writer took over from {self._epoch}")
            marks = _marks(snapshot, name, positions)
            moved = {s: offset for s, offset in positions.items() if offset > marks.get(s, 0)}
            added[:] = fresh(rows, marks, window)
            if not moved or not (added or mark):
                added.clear()
                return False
            storable = self._storable(table, added, bury)
            self._commit(snapshot, storable, {WRITER: self._epoch, **{app_id(name, s): o for s, o in moved.items()}})
            return True

        if self._until_committed(name, attempt):
            self._marks[name] |= positions
            self._marked_at[name] = time.monotonic()
            if table.key:
                window.add(window.of(row) for row in added)
            self._tidy(name)
        return len(added)

    @staticmethod
    def _storable(table: Table, rows: list[Row], bury: Bury) -> pa.Table:
        """The rows in Arrow; those with a value that no column can hold are buried and taken out of `rows`."""
        try:
            return table.arrow(rows)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            good = []
            for row in rows:
                try:
                    table.arrow([row])
                    good.append(row)
                except (pa.ArrowException, ValueError, TypeError, OverflowError) as e:
                    bury(row, f"table {table.name}: {type(e).__name__}: {e}")
            rows[:] = good
            return table.arrow(rows)

    def _tidy(self, name: str) -> None:
        """Now and then make large files of small ones, and delete files that nobody has needed for a week."""
        self._commits[name] += 1
        if self._commits[name] % self._compact_commits:
            return
        table = self._open(name)
        try:
            table.optimize.compact()
            table.vacuum(dry_run=False)
        except CommitFailedError as e:  # the old files are all still there
            logger().warning("lake_compaction_collided", table=name, error=str(e))


def _marks(table: DeltaTable, name: str, sources: Iterable[Source]) -> dict[Source, int]:
    found = {source: table.transaction_version(app_id(name, source)) for source in sources}
    return {source: version for source, version in found.items() if version is not None}


def oldest_of_newest(files: pa.Table, rows: int) -> Any:
    """Log timestamp that the newest `rows` rows are not older than, by the files' statistics; None: any row could be among them."""
    newest = files.select(["num_records", "min.kafka_timestamp", "max.kafka_timestamp"]).sort_by(
        [("max.kafka_timestamp", "descending")]
    )
    if newest.column("max.kafka_timestamp").null_count or newest.column("num_records").null_count:
        return None
    total, oldest = 0, None
    for count, low in zip(newest.column(0), newest.column(1), strict=True):
        oldest = low if oldest is None or low.as_py() < oldest.as_py() else oldest
        total += count.as_py()
        if total >= rows:
            return oldest
    return None


# -- the process


def main(settings: Settings) -> None:
    """Write the lake until told to stop. Never returns: exits 0, 78 when a newer writer took over, 79 for a truncated source."""
    run_sync("lake", settings, write)


def write(settings: Settings, stop: threading.Event) -> None:
    """Follow all topics until `stop`; begin again, with new positions, whenever one of them was made anew."""
    cluster = cluster_of(settings)
    create_topics(cluster, settings)
    _tell_of_new_topics(cluster, settings)
    lake = Lake(settings.lake_uri, settings.lake.storage_options, settings.lake.dedupe_window)
    lake.claim()
    decoder = Decoder(cluster, settings.kafka.topics.schemas)
    while not stop.is_set():
        feed = Feed(cluster, settings, decoder, lake.marks)
        try:
            _follow(lake, feed, settings.lake.flush_interval_s, stop)
        finally:
            feed.close()


def _tell_of_new_topics(cluster: Cluster, settings: Settings) -> None:
    """A wiped broker must not look like a quiet one."""
    stored = positions(settings, cluster)
    ids = cluster.topic_ids(sorted({p.topic for p in stored if not p.topic.endswith("*")}))
    for topic, former in made_anew(stored, ids):
        logger().warning(
            "topic_made_anew", topic=topic, topic_id=ids[topic], stored_topic_ids=former,
            action="read from its start; the rows of the old one stay",
        )  # fmt: skip


def _follow(lake: Lake, feed: Feed, interval_s: float, stop: threading.Event) -> None:
    """Read and flush until `stop`, or until a followed topic is another one."""
    flushed_at = float("-inf")
    while not stop.is_set():
        if feed.full or time.monotonic() - flushed_at >= interval_s:
            same = _topics_same(feed)
            if same is False:
                logger().warning("lake_topics_changed", dropped={n: len(r) for n, r in feed.rows.items() if r})
                return
            if same is None:
                stop.wait(1.0)
                continue
            _flush(lake, feed, marks=False)
            flushed_at = time.monotonic()
        try:
            feed.poll()
        except SourceTruncated as e:
            if feed.gone(e):
                return
    if _topics_same(feed):
        _flush(lake, feed, marks=True)


def _topics_same(feed: Feed) -> bool | None:
    """None: Kafka can't tell now, so nothing read may be written yet."""
    try:
        return feed.look()
    except Unavailable as e:
        logger().warning("lake_waits_for_kafka", error=str(e))
        return None


def _flush(lake: Lake, feed: Feed, marks: bool) -> None:
    added = {}
    for name, rows in feed.rows.items():
        positions = feed.positions(name)
        mark = marks or lake.mark_due(name, positions)
        if rows or mark:
            added[name] = lake.append(name, rows, positions, feed.bury, mark)
    feed.taken()
    if any(added.values()):
        logger().debug("lake_flushed", rows={n: c for n, c in added.items() if c})
