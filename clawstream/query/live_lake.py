"""Query a lake that is being written, from several threads, with small copies for fast lists.

A connection to the lake takes half a second and reads Delta snapshots of that moment. `LiveLake`
keeps one database and moves it to newer snapshots: only tables with a new version are registered
again. A `Copied` is a table in memory with the few columns of a table that a list needs. It is kept
up to date from the files that are new; when files are gone (merged, expired), it is rebuilt. `find`
searches the index of the texts, which follows the same snapshots.

One connection writes the copies, in transactions. Each query has a connection of its own, so
neither a slow query nor a refresh holds up another query.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds

from clawstream.inspector.queries.lake import Copied
from clawstream.query.connection import connect_empty, open_dataset, translated_errors
from clawstream.runtime.logs import logger
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.settings import Settings
from clawstream.search.index import TextIndex
from clawstream.stream_jobs.errors import SqlError
from clawstream.stream_jobs.lake.delta.log import committed_at
from clawstream.stream_jobs.lake.delta.table import (
    Delta,
    DeltaError,
    LakeMissing,
    open_table,
    refresh,
)
from clawstream.stream_jobs.lake.tables.catalog import catalog

FRESH_S = 1.0
"""A snapshot is looked for at most this often."""
WAIT_S = 30.0
"""A caller waits for newer snapshots only if the present ones are older; otherwise a background
thread refreshes."""

READERS = 4
"""Queries that run at once. More wait until one has ended."""
QUERY_S = 10.0
"""Longest time of a query of a page, and of its wait for a place."""
CALLS = "steps"
"""The table whose texts are indexed."""
ALL = "all tables"
"""Name in `LiveLake.failed` when no table can be read, or none is read to its end."""


class _Shown(NamedTuple):
    """A snapshot of a table that queries see. files: its paths."""

    version: int
    dataset: Any
    files: frozenset[str]


class _Database:
    """The copies, and the snapshots that queries see with them. One thread writes.

    Args:
        schemas: columns of all tables. The views keep them.
    """

    def __init__(
        self, copies: Mapping[str, Copied], schemas: Mapping[str, pa.Schema], memory_mb: int
    ) -> None:
        self.schemas, self._copies = schemas, copies
        self.shown: Mapping[str, _Shown] = {}
        self.connection = connect_empty(schemas, memory_mb)
        for name, copy in copies.items():
            self.connection.register("new_rows", schemas[copy.table].empty_table())
            self.connection.execute(f"CREATE TABLE {name} AS {copy.select}")

    def show(self, name: str, version: int, dataset: Any) -> None:
        """Bring the copies of a table up to date, then the table. Nothing changes if one fails."""
        before = self.shown[name].files if name in self.shown else frozenset[str]()
        fragments = {fragment.path: fragment for fragment in dataset.get_fragments()}
        rebuilt = not before <= fragments.keys()
        new = [f for path, f in fragments.items() if rebuilt or path not in before]
        rows = ds.FileSystemDataset(
            new, dataset.schema, dataset.format, filesystem=dataset.filesystem
        )
        self.connection.register("new_rows", rows)
        self.connection.begin()
        try:
            for made, copy in self._copies.items():
                if copy.table == name and new:
                    self._copy(made, copy, rebuilt, is_first=rebuilt or not before)
            self.connection.commit()
        # An interrupted query, too: else the next refresh would begin inside of the transaction.
        except BaseException:
            self.connection.rollback()
            raise
        # A new mapping: readers may be iterating over the one before.
        self.shown = {**self.shown, name: _Shown(version, dataset, frozenset(fragments))}

    def _copy(self, name: str, copy: Copied, rebuilt: bool, is_first: bool) -> None:
        if rebuilt:
            self.connection.execute(f"DELETE FROM {name}")
        self.connection.execute(f"INSERT INTO {name} {copy.select}")
        if copy.newest is not None:
            key, order = ", ".join(copy.newest[0]), copy.newest[1]
            changed = "" if is_first else f"SEMI JOIN (SELECT {key} FROM new_rows) USING ({key})"
            self.connection.execute(
                f"""DELETE FROM {name} WHERE rowid IN (SELECT place FROM (
                    SELECT c.rowid AS place, row_number() OVER (
                        PARTITION BY {key} ORDER BY {order} DESC, c.rowid DESC) AS nth
                    FROM {name} c {changed}) WHERE nth > 1)"""
            )
        if copy.then is not None:
            self.connection.execute(copy.then)


class _Reader:
    """A connection that runs one query at a time."""

    def __init__(self, database: _Database) -> None:
        self.database, self.connection = database, database.connection.cursor()
        self._versions: dict[str, int] = {}

    def follow(self) -> None:
        """Move to the newest snapshots of the database."""
        for name, shown in self.database.shown.items():
            if self._versions.get(name) != shown.version:
                self.connection.register(f"{name}_raw", shown.dataset)
                self._versions[name] = shown.version


class LiveLake:
    """The newest snapshots of a lake. Thread-safe.

    Args:
        settings: of the lake, which need not exist yet.
        copies: name to copy; queries read them like tables.
        query_s: longest time of a query; it is at most `lake.sql_timeout_s`.
    """

    def __init__(
        self, settings: Settings, copies: Mapping[str, Copied], query_s: float = QUERY_S
    ) -> None:
        self._settings, self._copies = settings, copies
        self._limits_s = (min(query_s, settings.lake.sql_timeout_s), settings.lake.sql_timeout_s)
        self.texts = TextIndex(self._limits_s[0])
        """The full-text index of the recorded calls."""
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._places = (threading.BoundedSemaphore(READERS), threading.BoundedSemaphore(1))
        self._idle: list[_Reader] = []
        self._running = set[_Reader]()
        self._unreadable: dict[str, str] = {}
        self._tables: dict[str, Delta] = {}
        self._committed: dict[str, tuple[int, float | None]] = {}
        self._looked_at = self._read_at = float("-inf")
        self._changes = self._told = 0
        self._refresher = threading.Thread()
        self._closed = False
        self._database = self._empty({name: table.schema for name, table in catalog().items()})

    @property
    def failed(self) -> dict[str, str]:
        """Tables whose newest version is not shown, with the reason."""
        waited_s = time.monotonic() - self._looked_at
        if self._refreshing.locked() and waited_s > WAIT_S:
            return {ALL: f"the lake has not been read to its end for {waited_s:.0f} s"}
        return dict(self._unreadable)

    def rows(
        self,
        query: str,
        parameters: Mapping[str, Any] | None = None,
        tables: Mapping[str, Any] | None = None,
        is_long: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the rows of a query as dictionaries.

        Args:
            parameters: values of `$name`.
            tables: name to Arrow table, for this query only.
            is_long: it may take `lake.sql_timeout_s`; one such query runs at a time.

        Raises:
            SqlError: the query fails, for example at a damaged file, or takes too long.
        """
        self._keep_fresh()
        with (
            self._reader(is_long) as reader,
            self._time_limit(reader.connection, self._limits_s[is_long]),
            translated_errors(),
            _with(reader.connection, tables or {}),
        ):
            cursor = reader.connection.execute(query, dict(parameters or {}))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def newest_commit_s(self) -> float | None:
        """Return when the newest snapshot of any table was written, in seconds since the epoch.

        None: there is no table, or its log cannot be read.
        """
        self._keep_fresh()
        with self._lock:
            shown = {name: found.version for name, found in self._database.shown.items()}
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
        self.texts.start(self._read)

    def find(self, search: str) -> tuple[list[pa.Table], float]:
        """Return the trajectories with each term of a search, and the indexed share of the calls.

        Raises:
            SqlError: it takes too long.
        """
        self._keep_fresh()
        return self.texts.find(search)

    def close(self) -> None:
        """End the running queries; later ones fail. Call it when the process stops."""
        self._closed = True
        with self._lock:
            for reader in self._running:
                reader.connection.interrupt()
        self._database.connection.interrupt()
        self.texts.stop()

    @contextmanager
    def _reader(self, is_long: bool) -> Iterator[_Reader]:
        """Lend a connection that sees the newest snapshots."""
        place = self._places[is_long]
        if not place.acquire(timeout=self._limits_s[0]):
            raise SqlError("other queries run already: try again when one has ended")
        try:
            with self._lock:
                if self._closed:
                    raise SqlError("the inspector is stopping")
                reader = self._idle.pop() if self._idle else _Reader(self._database)
                reader.follow()
                self._running.add(reader)
            try:
                yield reader
            finally:
                with self._lock:
                    self._running.discard(reader)
                    if reader.database is self._database:
                        self._idle.append(reader)
        finally:
            place.release()

    @contextmanager
    def _time_limit(self, connection: Any, limit_s: float) -> Iterator[None]:
        """Interrupt a query at its limit, and explain the error of an expensive one."""
        ended = threading.Event()

        def interrupt() -> None:
            ended.set()
            connection.interrupt()

        timer = threading.Timer(limit_s, interrupt)
        timer.daemon = True
        timer.start()
        try:
            yield
        except SqlError as e:
            if self._closed:
                raise SqlError("the inspector is stopping") from e
            if not ended.is_set():
                raise
            raise SqlError(
                f"the page took longer than {limit_s:g} s: filter by a run, or use `clawstream sql`"
            ) from e
        except MemoryError as e:
            raise SqlError(f"the query needs more than lake.sql_memory_mb: {e}") from e
        finally:
            timer.cancel()
            timer.join()  # it must not interrupt the next query

    def refresh(self) -> bool:
        """Move to the newest snapshots. Returns whether any table has changed since the last call.

        A table that cannot be read keeps its last snapshot and is tried again at the next call;
        `failed` names it.
        """
        self._read()
        with self._lock:
            told, self._told = self._told, self._changes
            return told != self._changes

    def _read(self) -> None:
        with self._refreshing:
            self._looked_at = time.monotonic()
            found = {}
            for name in catalog():
                with self._noting_failure(name):
                    if (dataset := self._newest(name)) is not None:
                        found[name] = dataset
            self._changes += self._show(found)
            self._read_at = self._looked_at

    def _keep_fresh(self) -> None:
        now = time.monotonic()
        waits, is_first = now - self._read_at >= WAIT_S, self._read_at == float("-inf")
        with self._lock:
            # A caller that waits needs a thread to wait for, also while another one reads.
            is_due = waits or now - self._looked_at >= FRESH_S
            if is_due and not self._refresher.is_alive():
                self._refresher = threading.Thread(target=self._read, name="lake", daemon=True)
                self._refresher.start()
        if waits:
            self._refresher.join(None if is_first else self._limits_s[0])

    def _empty(self, schemas: Mapping[str, pa.Schema]) -> _Database:
        return _Database(self._copies, schemas, self._settings.lake.sql_memory_mb)

    @contextmanager
    def _noting_failure(self, name: str) -> Iterator[None]:
        """Keep the error of a table in `failed`; log a new one."""
        try:
            with translated_errors():
                yield
            self._unreadable.pop(name, None)
        except (ForeseenError, DeltaError, MemoryError) as e:
            if self._unreadable.get(name) != str(e):
                logger().warning("lake_table_unreadable", table=name, error=str(e))
            self._unreadable[name] = str(e)

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
        shown = self._database.shown.get(name)
        if shown is not None and self._tables[name].version() == shown.version:
            return None
        return open_dataset(self._tables[name], name, options)

    def _show(self, found: dict[str, Any]) -> bool:
        """Let queries see newer datasets; return whether they see any."""
        shown_in = self._database
        if any(not d.schema.equals(shown_in.schemas[name]) for name, d in found.items()):
            options = self._settings.lake.storage_options
            for name, table in self._tables.items():
                with self._noting_failure(name):
                    found[name] = open_dataset(table, name, options)
            shown_in = self._empty(
                {**shown_in.schemas, **{name: dataset.schema for name, dataset in found.items()}}
            )
        for name, dataset in found.items():
            if self._closed:
                break
            with self._noting_failure(name):
                if name == CALLS:
                    self.texts.follow({f.path: f for f in dataset.get_fragments()})
                shown_in.show(name, self._tables[name].version(), dataset)
        if shown_in is not self._database:
            self._show_last(shown_in)
            with self._lock:
                self._database, self._idle = shown_in, []
        return any(name not in self._unreadable for name in found)

    def _show_last(self, made: _Database) -> None:
        """Show the last snapshots of the tables that are unreadable now, in a new database."""
        for name, (version, dataset, _) in self._database.shown.items():
            if name not in made.shown and dataset.schema.equals(made.schemas[name]):
                with suppress(ForeseenError, MemoryError), translated_errors():
                    made.show(name, version, dataset)


@contextmanager
def _with(connection: Any, tables: Mapping[str, Any]) -> Iterator[None]:
    """Let a query read further tables."""
    for name, table in tables.items():
        connection.register(name, table)
    try:
        yield
    finally:
        for name in tables:
            connection.unregister(name)
