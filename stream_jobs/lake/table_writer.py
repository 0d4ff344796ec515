"""Append rows and committed offsets to one table. Protocol: `clawstream.stream_jobs.lake.main`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import pyarrow as pa

from clawstream.runtime.logs import logger
from clawstream.stream_jobs.errors import LakeRepaired
from clawstream.stream_jobs.lake.dedupe import (
    DedupeWindow,
    Positions,
    TopicIdPartition,
    digest,
    drop_duplicates,
)
from clawstream.stream_jobs.lake.delta.log import app_id, plain, read_committed_offsets
from clawstream.stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    LakeError,
    add_columns,
    commit,
    create,
    dataset,
    open_table,
    reading,
    refresh,
)
from clawstream.stream_jobs.lake.fencing import (
    REPAIR,
    LakeFenced,
    Lease,
    PartitionShare,
    acquire_lease,
)
from clawstream.stream_jobs.lake.keys import existing_keys
from clawstream.stream_jobs.lake.recent_rows import read_window
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import Row, Table

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
RecordPosition = tuple[str, int, int]
"""(topic id, partition, offset)."""
_T = TypeVar("_T")


class LakeBusy(LakeError):
    """Commits kept colliding, more often than a second writer explains. Start again."""


class Prepared(NamedTuple):
    """A commit to a snapshot. rows: may be empty. digests: of their keys. offsets: that rise."""

    rows: pa.Table
    digests: Sequence[bytes]
    offsets: Positions


class TableWriter:
    """One writer's share of one table.

    Every commit builds on a snapshot on which the lease was checked, and collides with a commit
    that came between. After an error the commit may have landed or not, so the cached state is
    dropped: the next call reads the table again.
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str],
        table: Table,
        window_size: int,
        share: PartitionShare,
    ) -> None:
        self.table = table
        self._uri, self._options = uri, storage_options
        self._window_size, self._share = window_size, share
        self._delta: Delta | None = None
        self._opened_at, self._commits = 0.0, 0
        self._epoch = 0
        self._repairs: int | None = None
        """Number of repairs of the table when it was leased."""
        self._window = DedupeWindow(window_size)
        self._window_read = False
        self._offsets: dict[TopicIdPartition, int] = {}
        self._read: set[TopicIdPartition] = set()
        """Partitions whose offsets `_offsets` has: nobody else moves them while the lease holds."""
        self._committed_at = 0.0

    def create(self, history: timedelta) -> None:
        """Create the table if it does not exist."""
        t = self.table
        stats = (*t.stats, "kafka_timestamp")
        create(self._uri, t.name, t.schema, stats, history, self._options)

    def acquire(self, lease: Lease | None, least: Callable[[str], int | None]) -> Lease:
        """Lease the table, which fences other writers of the share. Then call `fill_window`.

        A lease collides with the commits of the writers that it fences. Those read and write files
        between their commits; this loop does not, so it finds a gap between two of them.

        Args:
            lease: of another table of this lake; None: this is the first one.
            least: least version of an app id, for the first table: a table that was deleted and
                recreated has lost its versions.

        Raises:
            LakeBusy: Commits of other writers collide with the lease until the time-out.
        """
        self.forget()
        self._offsets = {}
        table = self.latest()

        def version_of(app: str) -> int | None:
            here = table.transaction_version(app)
            return here if lease is not None else max(here or 0, least(app) or 0) or None

        collided, until = 0, time.monotonic() + LEASE_TIMEOUT_S
        while True:
            acquired, versions = acquire_lease(self._share, lease, version_of)
            try:
                commit(table, self.table.arrow([]), versions)
                break
            except CommitCollided as e:
                collided += 1
                if time.monotonic() > until:
                    raise LakeBusy(
                        f"table {self.table.name} of lake {self._uri}: {self._share} can't lease "
                        f"it: {collided} commits collided in {LEASE_TIMEOUT_S:g} s"
                    ) from e
                table = self.latest()
        if collided:
            logger().info("lake_lease_collided", table=self.table.name, collided=collided)
        self._epoch, self._repairs = acquired.epoch, table.transaction_version(REPAIR)
        return acquired

    def fill_window(self) -> None:
        """Read the keys of the newest rows into the dedupe window."""
        self._window, self._window_read = self._read_window(self.latest()), True
        self._committed_at = time.monotonic()

    def latest(self) -> Delta:
        """Return the table at its newest version; refreshing is cheaper than opening."""
        name, delta = self.table.name, self._delta
        self._delta = None  # an error leaves none
        old = self._commits >= REOPEN_COMMITS or time.monotonic() - self._opened_at > REOPEN_S
        if delta is None or old:
            delta = open_table(self._uri, name, self._options)
            self._opened_at, self._commits = time.monotonic(), 0
        else:
            refresh(delta, self._uri, name, self._options)
        self._delta = delta
        return delta

    def forget(self) -> None:
        """Drop what is known of the table; the committed offsets stay as an estimate."""
        self._delta, self._window_read = None, False
        self._read.clear()

    def check_not_repaired(self) -> None:
        """Raise LakeRepaired if the table was repaired since it was leased."""
        self._check_repairs(self.latest())

    def _check_repairs(self, snapshot: Delta) -> None:
        if snapshot.transaction_version(REPAIR) != self._repairs:
            raise LakeRepaired(self.table.name, "a repair has restored an older version")

    def _until_committed(self, attempt: Callable[[Delta, Mapping[str, int]], _T]) -> _T:
        """Call `attempt` with a leased snapshot and the lease until it does not collide."""
        name, lease = self.table.name, {self._share.app_id: self._epoch}
        for n in range(_ATTEMPTS):
            try:
                snapshot = self.latest()
                if snapshot.transaction_version(self._share.app_id) != self._epoch:
                    raise LakeFenced(
                        f"lake {self._uri}: another writer took over from {self._epoch} "
                        f"({self._share})"
                    )
                self._check_repairs(snapshot)
                self._commits += 1
                return attempt(snapshot, lease)
            except CommitCollided as e:
                self.forget()
                logger().warning("lake_commit_collided", table=name, attempt=n, error=plain(e))
                time.sleep(0.02 * 2**n)
            except BaseException:  # the commit may have landed
                self.forget()
                raise
        raise LakeBusy(f"table {name} of lake {self._uri}: {_ATTEMPTS} commits collided")

    def _read_window(self, snapshot: Delta) -> DedupeWindow:
        if not self.table.key or (self._share.writers > 1 and not self._has_rows_of_share()):
            return DedupeWindow(self._window_size)
        return read_window(snapshot, self.table, self._share, self._window_size, self._options)

    def _has_rows_of_share(self) -> bool:
        committed = read_committed_offsets(self._uri, self.table.name, self._options)
        return any(p % self._share.writers == self._share.writer for _, p in committed)

    def _read_state(self, snapshot: Delta, positions: Positions) -> None:
        """Read committed offsets and the dedupe window where they are not cached."""
        if not positions.keys() <= self._read:
            self._read_offsets(snapshot, positions.keys())
        if not self._window_read:
            self._window, self._window_read = self._read_window(snapshot), True

    def committed_offsets(self, partitions: Iterable[TopicIdPartition]) -> Positions:
        """Return the committed offsets; omits partitions without one."""
        return self._read_offsets(self.latest(), list(partitions))

    def _read_offsets(self, snapshot: Delta, wanted: Collection[TopicIdPartition]) -> Positions:
        found = {p: snapshot.transaction_version(app_id(self.table.name, p)) for p in wanted}
        known = {p: offset for p, offset in found.items() if offset is not None}
        self._offsets |= known
        self._read.update(wanted)
        return known

    def commit_due(self, positions: Positions) -> bool:
        """Return whether the table without new rows needs a commit of its offsets alone."""
        known = self._offsets
        if any(offset and p not in known for p, offset in positions.items()):
            return True  # commit it early: without it a restart can't see what retention deleted
        lags = [max(0, offset - known.get(p, 0)) for p, offset in positions.items()]
        behind = max(lags, default=0)
        if sum(lags) > self._window_size // (4 * self._share.writers):
            # All writers together: `lookup.check_not_behind` must not see an idle table as late.
            return True
        return behind >= COMMIT_AFTER_OFFSETS or (
            behind > 0 and time.monotonic() - self._committed_at >= COMMIT_AFTER_S
        )

    def append(
        self,
        rows: Sequence[Row],
        positions: Positions,
        redelivered: Collection[RecordPosition],
        reject: RejectRow,
        commit_offsets: bool = False,
    ) -> int:
        """Append the rows that the table does not have, and commit its offsets.

        Args:
            positions: next offset of every partition of the table, past all of `rows`.
            redelivered: records that the table may have from any time in the past.
            reject: called for each row that no column can hold.
            commit_offsets: commit even if no row is new.

        Returns:
            The number of new rows.
        """

        def attempt(snapshot: Delta, lease: Mapping[str, int]) -> Prepared | None:
            self._read_state(snapshot, positions)
            prepared = self._prepare(snapshot, rows, positions, redelivered, reject, commit_offsets)
            if prepared is not None:
                moved = {app_id(self.table.name, p): o for p, o in prepared.offsets.items()}
                commit(snapshot, prepared.rows, {**lease, **moved})
            return prepared

        landed = self._until_committed(attempt)
        if landed is None:
            return 0
        self._offsets |= landed.offsets
        self._committed_at = time.monotonic()
        self._window.add(landed.digests)
        return int(landed.rows.num_rows)

    def _prepare(
        self,
        snapshot: Delta,
        rows: Sequence[Row],
        positions: Positions,
        redelivered: Collection[RecordPosition],
        reject: RejectRow,
        commit_offsets: bool,
    ) -> Prepared | None:
        """Return the commit of what a snapshot lacks; None: there is nothing to commit."""
        committed = self._offsets
        # Reading may start below for another table's sake; offsets only rise.
        moved = {p: offset for p, offset in positions.items() if offset > committed.get(p, 0)}
        new, digests = drop_duplicates(self.table, rows, committed, self._window)
        new, digests = self._drop_redelivered(snapshot, new, digests, redelivered)
        if not moved or not (new or commit_offsets):
            return None
        storable, kept = storable_rows(self.table, new, reject)
        if len(kept) < len(new) and self.table.key:
            digests = [digest(self.table.key_of(row)) for row in kept]
        return Prepared(storable, digests, moved)

    def _drop_redelivered(
        self,
        snapshot: Delta,
        rows: list[Row],
        digests: list[bytes],
        redelivered: Collection[RecordPosition],
    ) -> tuple[list[Row], list[bytes]]:
        """Drop redelivered rows whose key the table has, of whatever age."""
        table = self.table
        if not table.key or not redelivered:
            return rows, digests
        keys = {table.key_of(row) for row in rows if row[-4:-1] in redelivered}
        if not keys:
            return rows, digests
        with reading(snapshot, table.name, self._options):
            found = existing_keys(dataset(snapshot, self._options), table.key, keys)
        there = {digest(key) for key in found}
        new = [(row, one) for row, one in zip(rows, digests, strict=True) if one not in there]
        return [row for row, _ in new], [one for _, one in new]

    def add_columns(self, wider: Table) -> None:
        """Add the columns that a wider definition of the table has.

        Raises:
            SchemaRefused: they conflict with columns of the table, which is unchanged.
            TooManyFields: the table would have too many columns of other releases.
        """
        name, own = self.table.name, catalog()[self.table.name].schema
        self._until_committed(
            lambda snapshot, lease: add_columns(snapshot, name, wider.arrow([]), lease, own)
        )
        new = [n for n in wider.schema.names if n not in self.table.index]
        logger().info("lake_columns_added", table=name, new=new)
        self.table = wider


_NO_COLUMN_HOLDS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def storable_rows(
    table: Table, rows: Sequence[Row], reject: RejectRow
) -> tuple[pa.Table, Sequence[Row]]:
    """Convert rows to Arrow; rejects rows that no column can hold.

    Returns:
        The converted rows, and the same rows before.
    """
    try:
        return table.arrow(rows), rows
    except MemoryError:
        raise  # Arrow's MemoryError is an ArrowException too
    except _NO_COLUMN_HOLDS:
        good = []
        for row in rows:
            try:
                table.arrow([row])
                good.append(row)
            except MemoryError:
                raise
            except _NO_COLUMN_HOLDS as e:
                reject(row, f"table {table.name}: {type(e).__name__}: {e}")
        return table.arrow(good), good
