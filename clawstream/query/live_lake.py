"""Query a lake that is being written, from several threads, with small copies for fast lists.

A connection to the lake takes half a second and reads Delta snapshots of that moment. `LiveLake`
keeps one connection and moves it to newer snapshots: only tables with a new version are registered
again. A `Copy` is a table in memory with the few columns of a table that a list needs. It is kept
up to date from the files that are new; when files are gone (merged, expired), it is rebuilt. `find`
searches the index of the texts, which follows the same snapshots.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

from clawstream.query.connection import (
    connect,
    connect_empty,
    open_dataset,
    translated_errors,
)
from clawstream.search.index import TextIndex
from runtime.logs import logger
from schemas.errors import ForeseenError
from schemas.settings import Settings
from stream_jobs.errors import SqlError
from stream_jobs.lake.delta.log import committed_at
from stream_jobs.lake.delta.table import Delta, DeltaError, LakeMissing, open_table, refresh
from stream_jobs.lake.tables.catalog import catalog

FRESH_S = 1.0
"""A snapshot is looked for at most this often."""
WAIT_S = 30.0
"""A caller waits for newer snapshots only if the present ones are older; otherwise a background
thread refreshes."""

CALLS = "steps"
"""The table whose texts are indexed."""
ALL = "all tables"
"""Name in `LiveLake.failed` when the lake cannot be connected to again."""


class Copy(NamedTuple):
    """Columns of a table in memory.

    table: the table of the lake. select: SELECT over the relation `new_rows`. newest: columns that
    identify a row, and the column whose highest value counts; None: every row does.
    """

    table: str
    select: str
    newest: tuple[tuple[str, ...], str] | None = None


class LiveLake:
    """The newest snapshots of a lake. Thread-safe; one query at a time.

    Args:
        settings: of the lake, which need not exist yet.
        copies: name to copy; queries read them like tables.
    """

    def __init__(self, settings: Settings, copies: Mapping[str, Copy]) -> None:
        self._settings, self._copies = settings, copies
        self.texts = TextIndex(settings.lake.sql_timeout_s)
        """The full-text index of the recorded calls."""
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self.failed: dict[str, str] = {}
        """Tables whose newest version could not be read, with the reason."""
        self._tables: dict[str, Delta] = {}
        self._shown: dict[str, int] = {}
        self._committed: dict[str, tuple[int, float | None]] = {}
        self._files: dict[str, frozenset[str]] = {}
        self._schemas: dict[str, Any] = {}
        self._looked_at = float("-inf")
        self._closed = False
        self._connect()

    def rows(
        self,
        query: str,
        parameters: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Return the rows of a query as dictionaries.

        Args:
            parameters: values of `$name`.
            tables: name to Arrow table, for this query only.

        Raises:
            SqlError: the query fails, for example at a damaged file, or takes too long.
        """
        self._keep_fresh()
        with self._lock, self._time_limit(), translated_errors(), self._with(tables or {}):
            cursor = self._connection.execute(query, dict(parameters or {}))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def newest_commit_s(self) -> float | None:
        """Return when the newest snapshot of any table was written, in seconds since the epoch.

        None: there is no table, or its log cannot be read.
        """
        self._keep_fresh()
        with self._lock:
            shown = dict(self._shown)
        for name, version in shown.items():
            if self._committed.get(name, (None,))[0] != version:
                self._committed[name] = (version, self._committed_s(name, version))
        times = [at for name in shown if (at := self._committed[name][1]) is not None]
        return max(times, default=None)

    def _committed_s(self, name: str, version: int) -> float | None:
        options = self._settings.lake.storage_options
        try:
            at = committed_at(self._settings.lake_uri, name, version, options)
        except (OSError, ValueError):
            return None
        return None if at is None else at.timestamp()

    def start(self) -> None:
        """Index texts in the background, and follow the lake while nobody queries it, too."""
        self.texts.start(self.refresh)

    def find(self, search: str) -> tuple[list[pa.Table], float]:
        """Return the trajectories with each term of a search, and the indexed share of the calls.

        Raises:
            SqlError: it takes too long.
        """
        self._keep_fresh()
        return self.texts.find(search)

    @contextmanager
    def _with(self, tables: Mapping[str, Any]) -> Iterator[None]:
        """Let queries read further tables."""
        for name, table in tables.items():
            self._connection.register(name, table)
        try:
            yield
        finally:
            for name in tables:
                self._connection.unregister(name)

    def close(self) -> None:
        """End the running query; later ones fail. Call it when the process stops."""
        self._closed = True
        self._connection.interrupt()
        self.texts.stop()

    @contextmanager
    def _time_limit(self) -> Iterator[None]:
        """Interrupt a query at `lake.sql_timeout_s`, and explain the error of an expensive one."""
        if self._closed:
            raise SqlError("the inspector is stopping")
        limit, ended = self._settings.lake.sql_timeout_s, threading.Event()

        def interrupt() -> None:
            ended.set()
            self._connection.interrupt()

        timer = threading.Timer(limit, interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except SqlError as e:
            if not ended.is_set():
                raise
            raise SqlError(
                f"the query took longer than lake.sql_timeout_s = {limit:g} s: filter by a run"
            ) from e
        except MemoryError as e:
            raise SqlError(f"the query needs more than lake.sql_memory_mb: {e}") from e
        finally:
            timer.cancel()
            timer.join()  # it must not interrupt the next query

    def refresh(self) -> bool:
        """Move to the newest snapshots. Returns whether any table has changed.

        A table that cannot be read keeps its last snapshot and is tried again at the next call;
        `failed` names it.
        """
        with self._refreshing:
            self._looked_at = time.monotonic()
            found = {}
            for name in catalog():
                with self._noting_failure(name):
                    if (dataset := self._newest(name)) is not None:
                        found[name] = dataset
            with self._lock:
                return self._show(found)

    def _keep_fresh(self) -> None:
        age = time.monotonic() - self._looked_at
        if age >= WAIT_S:
            self.refresh()
        elif age >= FRESH_S and not self._refreshing.locked():
            threading.Thread(target=self.refresh, name="lake", daemon=True).start()

    def _connect(self) -> None:
        try:
            connection = connect(self._settings, with_comments=True)
        except LakeMissing:
            connection = connect_empty()
        for name, copy in self._copies.items():
            connection.register("new_rows", catalog()[copy.table].arrow([]))
            connection.execute(f"CREATE TEMP TABLE {name} AS {copy.select}")
        self._connection = connection
        self._shown.clear()
        self._files.clear()
        self._schemas = {name: table.schema for name, table in catalog().items()}

    @contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        """Keep the error of a table in `failed`; log a new one."""
        try:
            with translated_errors():
                yield
            self.failed.pop(name, None)
        except (ForeseenError, DeltaError, MemoryError) as e:
            if self.failed.get(name) != str(e):
                logger().warning("lake_table_unreadable", table=name, error=str(e))
            self.failed[name] = str(e)

    def _newest(self, name: str) -> Any | None:
        """Open the newest version of a table; None if it does not exist or is shown already."""
        uri, options = self._settings.lake_uri, self._settings.lake.storage_options
        if name in self._tables:
            refresh(self._tables[name], uri, name, options)
        else:
            try:
                self._tables[name] = open_table(uri, name, options)
            except LakeMissing:
                return None
        if self._tables[name].version() == self._shown.get(name):
            return None
        return open_dataset(self._tables[name], name, options)

    def _show(self, found: dict[str, Any]) -> bool:
        """Let queries see newer datasets; return whether they see any."""
        if any(not dataset.schema.equals(self._schemas[name]) for name, dataset in found.items()):
            before, options = self._connection, self._settings.lake.storage_options
            with self._noting_failure(ALL):
                self._connect()  # views keep the columns that their table had
            if ALL in self.failed:
                return False
            before.close()
            for name, table in self._tables.items():
                with self._noting_failure(name):
                    found[name] = open_dataset(table, name, options)
            self._schemas |= {name: dataset.schema for name, dataset in found.items()}
        for name, dataset in found.items():
            if self._closed:
                break
            with self._noting_failure(name):
                self._show_table(name, dataset)
        return any(name not in self.failed for name in found)

    def _show_table(self, name: str, dataset: Any) -> None:
        """Bring the copies of a table up to date, then the table. Nothing changes if one fails."""
        before = self._files.get(name, frozenset())
        fragments = {fragment.path: fragment for fragment in dataset.get_fragments()}
        rebuilt = not before <= fragments.keys()
        new = [f for path, f in fragments.items() if rebuilt or path not in before]
        rows = ds.FileSystemDataset(
            new, dataset.schema, dataset.format, filesystem=dataset.filesystem
        )
        self._connection.register("new_rows", rows)
        self._connection.begin()
        try:
            for made, copy in self._copies.items():
                if copy.table == name:
                    self._copy(made, copy, rebuilt)
            if name == CALLS:
                self.texts.follow(fragments)
            self._connection.commit()
        # An interrupted query, too: else the next refresh would begin inside of the transaction.
        except BaseException:
            self._connection.rollback()
            raise
        self._connection.register(f"{name}_raw", dataset)
        self._files[name] = frozenset(fragments)
        self._shown[name] = self._tables[name].version()

    def _copy(self, name: str, copy: Copy, rebuilt: bool) -> None:
        if rebuilt:
            self._connection.execute(f"DELETE FROM {name}")
        self._connection.execute(f"INSERT INTO {name} {copy.select}")
        if copy.newest is not None:
            key, order = ", ".join(copy.newest[0]), copy.newest[1]
            self._connection.execute(
                f"""DELETE FROM {name} WHERE rowid NOT IN (
                    SELECT max_by(rowid, ({order}, rowid)) FROM {name} GROUP BY {key})"""
            )
