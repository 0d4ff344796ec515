"""Write a share of all tables. Protocol: `clawstream.stream_jobs.lake.main`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

from clawstream.runtime.logs import logger
from clawstream.stream_jobs.errors import LakeDamaged, LakeRepaired
from clawstream.stream_jobs.lake.dedupe import Positions, TopicIdPartition
from clawstream.stream_jobs.lake.delta.table import Delta, SchemaRefused
from clawstream.stream_jobs.lake.fencing import SINGLE_WRITER, Lease, PartitionShare
from clawstream.stream_jobs.lake.table_writer import RejectRow, TableWriter
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import Row, Table

_T = TypeVar("_T")


class Lake:
    """One writer's share of all tables.

    A damaged table takes no rows and has no offsets; the others go on. Every method raises
    LakeFenced once a newer writer has leased the share.

    tables: by name; columns are added to them while the writer runs.
    damaged: tables that cannot be read, and why.
    redelivered: (topic id, partition, offset) of records re-sent from dead letters. They can be of
        any age, so they are looked up in the whole table.
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str],
        window_size: int,
        history: timedelta = timedelta(days=2),
        share: PartitionShare = SINGLE_WRITER,
    ) -> None:
        self.uri, self.share, self._history = uri, share, history
        self.tables: dict[str, Table] = dict(catalog())
        self.redelivered: set[tuple[str, int, int]] = set()
        self.damaged: dict[str, LakeDamaged] = {}
        self._lease: Lease | None = None
        self._writers = {
            name: TableWriter(uri, dict(storage_options), table, window_size, share)
            for name, table in self.tables.items()
        }

    def acquire(self) -> None:
        """Create missing tables, lease all tables and fill the dedupe windows.

        This fences older writers of this share or of another layout. Skips damaged tables.

        Raises:
            LakeDamaged: all tables are damaged.
        """

        def created(writer: TableWriter) -> Delta:
            writer.create(self._history)
            return writer.latest()

        before = [
            t for name in self.tables if (t := self._on_table(name, created, None)) is not None
        ]

        def highest(app: str) -> int | None:
            versions = [v for t in before if (v := t.transaction_version(app)) is not None]
            return max(versions, default=None)

        for name in self.tables:
            self._on_table(name, lambda w: self._acquire_table(w, highest), None)
        if len(self.damaged) == len(self.tables):
            raise next(iter(self.damaged.values()))

    def _acquire_table(self, writer: TableWriter, least: Callable[[str], int | None]) -> None:
        """Lease a table and fill its window; unreadable rows do not change who holds the lease."""
        self._lease = writer.acquire(self._lease, least)
        writer.fill_window()

    def _on_table(self, name: str, action: Callable[[TableWriter], _T], otherwise: _T) -> _T:
        """Return `action` of the writer of a table, or `otherwise` if the table is damaged."""
        if name not in self.damaged:
            try:
                return action(self._writers[name])
            except LakeDamaged as e:
                self._set_damaged(name, e)
        return otherwise

    def _set_damaged(self, name: str, error: LakeDamaged) -> None:
        former = self.damaged.get(name)
        self._writers[name].forget()
        self.damaged[name] = error
        if isinstance(error, LakeRepaired):
            action = "its topics are read again from its committed offsets"
            logger().info("lake_table_repaired", table=name, action=action)
        elif str(former) != str(error):
            action = "other tables are written; rows of this one wait on Kafka for its repair"
            logger().error("lake_table_damaged", table=name, error=str(error), action=action)

    def recover(self) -> bool:
        """Lease damaged tables that can be read again.

        Returns:
            True if there are any: read their topics again from their committed offsets.
        """
        before = list(self.damaged)
        for name in before:
            writer = self._writers[name]
            try:
                writer.fill_window()  # a lease is a commit: none for a table that is still damaged
                self._acquire_table(writer, lambda app: None)
                version = writer.latest().version()
            except LakeDamaged as e:
                self._set_damaged(name, e)
            else:
                del self.damaged[name]
                logger().info("lake_table_recovered", table=name, version=version)
        return len(self.damaged) < len(before)

    def check_repairs(self) -> None:
        """Mark tables as damaged that were repaired since they were leased.

        A commit notices a repair too, but a table without new rows has no commits.
        """
        for name in self.tables:
            self._on_table(name, TableWriter.check_not_repaired, None)

    def committed_offsets(self, name: str, partitions: Iterable[TopicIdPartition]) -> Positions:
        """Return the committed offsets of a table; {} for a damaged one.

        Omits partitions without a committed offset.
        """
        nothing: Positions = {}
        return self._on_table(name, lambda w: w.committed_offsets(partitions), nothing)

    def commit_due(self, name: str, positions: Positions) -> bool:
        """Return whether a table without new rows needs a commit of its offsets alone."""
        return self._on_table(name, lambda w: w.commit_due(positions), False)

    def append(
        self,
        name: str,
        rows: Sequence[Row],
        positions: Positions,
        reject: RejectRow,
        commit_offsets: bool = False,
    ) -> int:
        """Append rows to a table and commit its offsets: `TableWriter.append`.

        Returns:
            The number of new rows; 0 for a damaged table: `recover` tells when its topics must be
            read again.
        """
        return self._on_table(
            name,
            lambda w: w.append(rows, positions, self.redelivered, reject, commit_offsets),
            0,
        )

    def add_columns(self, wider: Table) -> bool:
        """Add columns to a table.

        Returns:
            False if they conflict with its columns or it is damaged; the table is then unchanged.

        Raises:
            TooManyFields: the table would have too many columns of other releases.
        """

        def add(writer: TableWriter) -> bool:
            writer.add_columns(wider)
            self.tables[wider.name] = wider
            return True

        try:
            return self._on_table(wider.name, add, False)
        except SchemaRefused as e:
            logger().warning("lake_columns_refused", table=wider.name, error=str(e))
            return False
