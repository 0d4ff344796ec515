"""Append rows and committed offsets to a writer's share of the tables.

Protocol: `stream_jobs.lake.main`.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from runtime.logs import logger
from stream_jobs.errors import LakeDamaged, LakeRepaired
from stream_jobs.lake.dedupe import (
    DedupeWindow,
    Positions,
    TopicIdPartition,
    digest,
    drop_duplicates,
)
from stream_jobs.lake.delta.log import app_id, read_committed_offsets
from stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    LakeError,
    SchemaRefused,
    add_columns,
    commit,
    create,
    dataset,
    open_table,
    reading,
    refresh,
)
from stream_jobs.lake.fencing import (
    REPAIR,
    SINGLE_WRITER,
    LakeFenced,
    Lease,
    PartitionShare,
    acquire_lease,
)
from stream_jobs.lake.keys import existing_keys
from stream_jobs.lake.tables.catalog import Row, Table, catalog

COMMIT_AFTER_OFFSETS = 10_000
COMMIT_AFTER_S = 600.0
REOPEN_COMMITS = 20
REOPEN_S = 60.0
"""A table is reopened after this many commits or seconds.

Its log grows in memory, and old log files are cleaned up.
"""
_ATTEMPTS = 8
LEASE_TIMEOUT_S = 60.0
"""How long a writer tries to lease a table while other writers commit to it."""

RejectRow = Callable[[Row, str], None]
"""Dead-letters a row that no column type can hold: (row, reason)."""


class LakeBusy(LakeError):
    """Commits kept colliding, more often than a second writer explains. Start again."""


class _Opened(NamedTuple):
    table: Delta
    at: float
    commits: int


class Lake:
    """One writer's share of all tables.

    Every method raises LakeFenced once a newer writer has leased the share.

    tables: by name; columns are added to them while the writer runs.
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str],
        window_size: int,
        history: timedelta = timedelta(days=2),
        share: PartitionShare = SINGLE_WRITER,
    ) -> None:
        self._history, self.share = history, share
        self._uri, self._options, self._window_size = uri, dict(storage_options), window_size
        self._lease: Lease | None = None
        self._lease_versions: dict[str, int] = {}
        """The app id of this writer and its version, which every commit repeats."""
        self.tables: dict[str, Table] = dict(catalog())
        self.redelivered: set[tuple[str, int, int]] = set()
        """(topic id, partition, offset) of records re-sent from dead letters.

        They can be of any age, so they are looked up in the whole table.
        """
        self._windows: dict[str, DedupeWindow] = {}
        self._opened: dict[str, _Opened] = {}
        self._offsets: dict[str, dict[TopicIdPartition, int]] = {name: {} for name in catalog()}
        self._committed_at: dict[str, float] = {}
        self._known: dict[str, set[TopicIdPartition]] = {name: set() for name in catalog()}
        """Partitions whose offsets `_offsets` has as long as this writer holds the lease."""
        self.damaged: dict[str, LakeDamaged] = {}
        """Tables that cannot be read, and why. They take no rows and keep their offsets."""
        self._repairs: dict[str, int | None] = {}
        """Number of repairs of each table when it was leased."""
        self._stale_windows: set[str] = set()
        """Tables whose last commit may have landed or not: their windows are read again."""

    def acquire(self) -> None:
        """Create missing tables, lease all tables and fill the dedupe windows.

        This fences older writers of this share or of another layout. Skips damaged tables.

        Raises:
            LakeDamaged: all tables are damaged.
        """
        before = []
        for name, table in self.tables.items():
            with self._skipping_damaged(name):
                create(
                    self._uri,
                    name,
                    table.schema,
                    (*table.stats, "kafka_timestamp"),
                    self._history,
                    self._options,
                )
                before.append(self._latest(name))

        def highest(app: str) -> int | None:
            return max(
                (v for t in before if (v := t.transaction_version(app)) is not None), default=None
            )

        for name in self.tables:
            if name not in self.damaged:
                with self._skipping_damaged(name):
                    self._acquire_table(name, highest)
        if len(self.damaged) == len(self.tables):
            raise next(iter(self.damaged.values()))

    def _acquire_table(self, name: str, highest: Callable[[str], int | None]) -> None:
        """Lease a table and fill its dedupe window."""
        self._acquire_lease(name, highest)
        self._windows[name] = self._window(self._latest(name), self.tables[name])
        self._stale_windows.discard(name)
        self._committed_at[name] = time.monotonic()

    @contextmanager
    def _skipping_damaged(self, name: str) -> Iterator[None]:
        """Record a table as damaged instead of raising LakeDamaged."""
        try:
            yield
        except LakeDamaged as e:
            self._forget(name)
            if isinstance(e, LakeRepaired):
                logger().info(
                    "lake_table_repaired",
                    table=name,
                    action="its topics are read again from its committed offsets",
                )
            elif str(self.damaged.get(name)) != str(e):
                action = "other tables are written; rows of this one wait on Kafka for its repair"
                logger().error("lake_table_damaged", table=name, error=str(e), action=action)
            self.damaged[name] = e

    def recover(self) -> bool:
        """Lease damaged tables that can be read again.

        Returns:
            True if there are any: read their topics again from their committed offsets.
        """
        before = list(self.damaged)
        for name in before:
            with self._skipping_damaged(name):
                self._forget(name)
                self._offsets[name] = {}
                self._acquire_table(name, lambda app: None)
                del self.damaged[name]
                logger().info(
                    "lake_table_recovered", table=name, version=self._latest(name).version()
                )
        return len(self.damaged) < len(before)

    def _acquire_lease(self, name: str, highest: Callable[[str], int | None]) -> None:
        """Lease a table.

        A lease collides with the commits of the writers that it fences. Those read and write files
        between their commits; this loop does not, so it finds a gap between two of them.

        Args:
            highest: greatest version of an app id in any table, for the first table: a table
                that was deleted and recreated has lost its versions.
        """
        empty = self.tables[name].arrow([])
        table = self._latest(name)

        def version_of(app: str) -> int | None:
            here = table.transaction_version(app)
            return here if self._lease is not None else max(here or 0, highest(app) or 0) or None

        collided, until = 0, time.monotonic() + LEASE_TIMEOUT_S
        while True:
            lease, versions = acquire_lease(self.share, self._lease, version_of)
            try:
                commit(table, empty, versions)
                break
            except CommitCollided as e:
                collided += 1
                if time.monotonic() > until:
                    raise LakeBusy(
                        f"table {name} of lake {self._uri}: {self.share} can't lease it: "
                        f"{collided} commits collided in {LEASE_TIMEOUT_S:g} s"
                    ) from e
                table = self._latest(name)
        if collided:
            logger().info("lake_lease_collided", table=name, collided=collided)
        self._lease, self._lease_versions = lease, {self.share.app_id: lease.epoch}
        self._repairs[name] = table.transaction_version(REPAIR)

    def _latest(self, name: str) -> Delta:
        """Return a table at its newest version; refreshing is cheaper than opening."""
        opened = self._opened.pop(name, None)
        if (
            opened is None
            or opened.commits >= REOPEN_COMMITS
            or time.monotonic() - opened.at > REOPEN_S
        ):
            opened = _Opened(open_table(self._uri, name, self._options), time.monotonic(), 0)
        else:
            refresh(opened.table, self._uri, name, self._options)
        self._opened[name] = opened
        return opened.table

    def _leased_snapshot(self, name: str) -> Delta:
        """Return a table at its newest version for a commit, checking lease and repairs."""
        table = self._latest(name)
        epoch = self._lease_versions.get(self.share.app_id, 0)
        if table.transaction_version(self.share.app_id) != epoch:
            raise LakeFenced(
                f"lake {self._uri}: another writer took over from {epoch} ({self.share})"
            )
        self._check_not_repaired(name, table)
        opened = self._opened[name]
        self._opened[name] = opened._replace(commits=opened.commits + 1)
        return table

    def _check_not_repaired(self, name: str, table: Delta) -> None:
        if table.transaction_version(REPAIR) != self._repairs.get(name):
            raise LakeRepaired(name, "a repair has restored an older version")

    def check_repairs(self) -> None:
        """Mark tables as damaged that were repaired since they were leased.

        A commit notices a repair too, but a table without new rows has no commits.
        """
        for name in self.tables:
            if name not in self.damaged:
                with self._skipping_damaged(name):
                    self._check_not_repaired(name, self._latest(name))

    def _until_committed(self, name: str, attempt: Callable[[], bool]) -> bool:
        for n in range(_ATTEMPTS):
            try:
                return attempt()
            except CommitCollided as e:
                self._forget(name)
                logger().warning("lake_commit_collided", table=name, attempt=n, error=str(e))
                time.sleep(0.02 * 2**n)
            except BaseException:  # the commit may have landed
                self._forget(name)
                raise
        raise LakeBusy(f"table {name} of lake {self._uri}: {_ATTEMPTS} commits collided")

    def _forget(self, name: str) -> None:
        """Drop all cached state of a table."""
        self._opened.pop(name, None)
        self._known[name].clear()
        self._stale_windows.add(name)

    def _window(self, snapshot: Delta, table: Table) -> DedupeWindow:
        """Read the keys of the share's newest rows by log timestamp into a window.

        Reads only files that can hold some of them.
        """
        window = DedupeWindow(self._window_size)
        if not table.key or not (self.share.writers == 1 or self._has_offsets(table.name)):
            return window
        with reading(snapshot, table.name, self._options):
            rows = self._newest(snapshot, table).sort_by("kafka_timestamp")
        rows = rows.slice(max(0, rows.num_rows - self._window_size))
        values = zip(*(rows.column(c).to_pylist() for c in table.key), strict=True)
        window.add(digest(v) for v in values)
        return window

    def _has_offsets(self, name: str) -> bool:
        """Return whether the table can have rows of this share."""
        committed = read_committed_offsets(self._uri, name, self._options)
        return any(p % self.share.writers == self.share.writer for _, p in committed)

    def _newest(self, delta: Delta, table: Table) -> pa.Table:
        """Read at least as many of the share's newest rows as the window holds.

        Rows of other shares lie between them, so each round looks further back.
        """
        files = pa.table(delta.get_add_actions(flatten=True))
        source = dataset(delta, self._options)
        columns = list(dict.fromkeys((*table.key, "kafka_timestamp")))
        found: list[pa.Table] = []
        rows, before = self._window_size, None
        while True:
            since = oldest_of_newest(files, rows)
            found.append(
                source.to_table(columns=columns, filter=rows_of(self.share, since, before))
            )
            if since is None or sum(t.num_rows for t in found) >= self._window_size:
                return pa.concat_tables(found)
            rows, before = 4 * rows, since

    def committed_offsets(self, name: str, partitions: Iterable[TopicIdPartition]) -> Positions:
        """Return the committed offsets of a table; {} for a damaged one.

        Omits partitions without a committed offset.
        """
        if name not in self.damaged:
            with self._skipping_damaged(name):
                return self._read_offsets(self._latest(name), name, list(partitions))
        return {}

    def _read_offsets(
        self, table: Delta, name: str, partitions: Iterable[TopicIdPartition]
    ) -> dict[TopicIdPartition, int]:
        wanted = list(partitions)
        found = {p: table.transaction_version(app_id(name, p)) for p in wanted}
        known = {p: offset for p, offset in found.items() if offset is not None}
        self._offsets[name] |= known
        self._known[name] |= set(wanted)
        return known

    def _offsets_on(self, snapshot: Delta, name: str, positions: Positions) -> Positions:
        """Return the committed offsets on a snapshot that this writer leases.

        Nobody else moves them, so they are cached until a commit fails.
        """
        if positions.keys() <= self._known[name]:
            return self._offsets[name]
        return self._read_offsets(snapshot, name, positions)

    def commit_due(self, name: str, positions: Positions) -> bool:
        """Return whether a table without new rows needs a commit of its offsets alone."""
        if name in self.damaged:
            return False
        known = self._offsets[name]
        if any(offset and p not in known for p, offset in positions.items()):
            return True  # commit it early: without it a restart can't see what retention deleted
        lags = [max(0, offset - known.get(p, 0)) for p, offset in positions.items()]
        behind = max(lags, default=0)
        if sum(lags) > self._window_size // (4 * self.share.writers):
            # All writers together: `lookup.check_not_behind` must not see an idle table as late.
            return True
        return behind >= COMMIT_AFTER_OFFSETS or (
            behind > 0 and time.monotonic() - self._committed_at[name] >= COMMIT_AFTER_S
        )

    def append(
        self,
        name: str,
        rows: Sequence[Row],
        positions: Positions,
        reject: RejectRow,
        commit_offsets: bool = False,
    ) -> int:
        """Append the rows that a table does not have, and commit its offsets.

        A damaged table takes no rows; `recover` tells when its topics must be read again.

        Args:
            positions: next offset of every partition of the table, past all of `rows`.
            reject: called for each row that no column can hold.
            commit_offsets: commit even if no row is new.

        Returns:
            The number of new rows.
        """
        table = self.tables[name]
        added: list[Row] = []
        digests: list[bytes] = []
        moved: dict[TopicIdPartition, int] = {}

        def attempt() -> bool:
            snapshot = self._leased_snapshot(name)
            committed = self._offsets_on(snapshot, name, positions)
            if name in self._stale_windows:
                self._windows[name] = self._window(snapshot, table)
                self._stale_windows.discard(name)
            moved.clear()  # reading may start below for another table's sake; offsets only rise
            moved.update(
                (s, offset) for s, offset in positions.items() if offset > committed.get(s, 0)
            )
            added[:], digests[:] = self._drop_redelivered(
                snapshot, table, *drop_duplicates(table, rows, committed, self._windows[name])
            )
            if not moved or not (added or commit_offsets):
                added.clear()
                return False
            storable = storable_rows(table, added, reject)
            if table.key and len(added) < len(digests):
                digests[:] = [digest(table.key_of(row)) for row in added]
            commit(
                snapshot,
                storable,
                {**self._lease_versions, **{app_id(name, s): o for s, o in moved.items()}},
            )
            return True

        if name in self.damaged:
            return 0
        landed = False
        with self._skipping_damaged(name):
            landed = self._until_committed(name, attempt)
        if name in self.damaged:
            return 0
        if landed:
            self._offsets[name] |= moved
            self._committed_at[name] = time.monotonic()
            self._windows[name].add(digests)
        return len(added)

    def _drop_redelivered(
        self, snapshot: Delta, table: Table, rows: list[Row], digests: list[bytes]
    ) -> tuple[list[Row], list[bytes]]:
        """Drop redelivered rows whose key the table has, of whatever age."""
        redelivered = (
            {table.key_of(row) for row in rows if row[-4:-1] in self.redelivered}
            if table.key
            else set()
        )
        if not redelivered:
            return rows, digests
        with reading(snapshot, table.name, self._options):
            there = {
                digest(key)
                for key in existing_keys(dataset(snapshot, self._options), table.key, redelivered)
            }
        new = [(row, one) for row, one in zip(rows, digests, strict=True) if one not in there]
        return [row for row, _ in new], [one for _, one in new]

    def add_columns(self, wider: Table) -> bool:
        """Add columns to a table.

        Returns:
            False if they conflict with its columns or it is damaged; the table is then unchanged.

        Raises:
            TooManyFields: the table would have too many columns of other releases.
        """
        name = wider.name

        def attempt() -> bool:
            add_columns(
                self._leased_snapshot(name),
                name,
                wider.arrow([]),
                self._lease_versions,
                catalog()[name].schema,
            )
            return True

        try:
            if wider.name not in self.damaged:
                with self._skipping_damaged(wider.name):
                    self._until_committed(wider.name, attempt)
        except SchemaRefused as e:
            logger().warning("lake_columns_refused", table=wider.name, error=str(e))
            return False
        if wider.name in self.damaged:
            return False
        new = wider.schema.names
        logger().info(
            "lake_columns_added",
            table=wider.name,
            new=[n for n in new if n not in self.tables[wider.name].index],
        )
        self.tables[wider.name] = wider
        return True


def storable_rows(table: Table, rows: list[Row], reject: RejectRow) -> pa.Table:
    """Convert rows to Arrow; rejects rows that no column can hold and removes them from `rows`."""
    try:
        return table.arrow(rows)
    except MemoryError:
        raise  # Arrow's MemoryError is an ArrowException too
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        good = []
        for row in rows:
            try:
                table.arrow([row])
                good.append(row)
            except MemoryError:
                raise
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as e:
                reject(row, f"table {table.name}: {type(e).__name__}: {e}")
        rows[:] = good
        return table.arrow(rows)


def rows_of(share: PartitionShare, since: Any, before: Any) -> pc.Expression | None:
    """Return the filter of a share's rows with since <= log timestamp < before; None: all."""
    stamp, partition = pc.field("kafka_timestamp"), pc.field("kafka_partition")
    wanted = [] if since is None else [stamp >= since]
    if before is not None:
        wanted.append(stamp < before)
    if share.writers > 1:
        wanted.append(
            partition - pc.divide(partition, share.writers) * share.writers == share.writer
        )
    return functools.reduce(operator.and_, wanted) if wanted else None


def oldest_of_newest(files: pa.Table, rows: int) -> Any:
    """Return a log timestamp that none of the newest `rows` rows is older than.

    Uses the statistics of the files. None: any row could be among them.
    """
    if "min.kafka_timestamp" not in files.column_names:  # created without its statistics
        return None
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
