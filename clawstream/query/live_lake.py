"""Query a lake that is being written, from several threads, with small copies for fast lists.

A connection to the lake takes half a second and reads Delta snapshots of that moment. `LiveLake`
keeps one connection and moves it to newer snapshots: only tables with a new version are registered
again. A `Copy` is a table in memory with the few columns of a table that a list needs. It is kept
up to date from the files that are new; when files are gone (merged, expired), it is made anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow.dataset as ds

from clawstream.query.connection import (
    connect,
    connect_empty,
    open_dataset,
    translated_errors,
)
from runtime.logs import logger
from schemas.settings import Settings
from stream_jobs.errors import LakeDamaged
from stream_jobs.lake.delta.table import Delta, LakeMissing, open_table, refresh
from stream_jobs.lake.tables.catalog import catalog

FRESH_S = 1.0
"""A snapshot is looked for at most this often."""
WAIT_S = 30.0
"""A caller waits for newer snapshots only if the present ones are older; else they come behind."""


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
        self._lock, self._refreshing = threading.Lock(), threading.Lock()
        self._tables: dict[str, Delta] = {}
        self._files: dict[str, frozenset[str]] = {}
        self._schemas: dict[str, Any] = {}
        self._looked_at = float("-inf")
        self._connect()

    def rows(self, query: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return the rows of a query as dictionaries. parameters: values of `$name`.

        Raises:
            SqlError: the query fails, for example at a damaged file.
        """
        self._keep_fresh()
        with self._lock, translated_errors():
            cursor = self._connection.execute(query, dict(parameters or {}))
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def refresh(self) -> bool:
        """Move to the newest snapshots. Returns whether any table has changed."""
        with self._refreshing:
            self._looked_at = time.monotonic()
            changed = [name for name in catalog() if self._advance(name)]
            if changed:
                with self._lock:
                    self._register(changed)
            return bool(changed)

    def _keep_fresh(self) -> None:
        age = time.monotonic() - self._looked_at
        if age >= WAIT_S:
            self.refresh()
        elif age >= FRESH_S and not self._refreshing.locked():
            threading.Thread(target=self.refresh, name="lake", daemon=True).start()

    def _connect(self) -> None:
        try:
            self._connection = connect(self._settings)
        except LakeMissing:
            self._connection = connect_empty()
        for name, copy in self._copies.items():
            self._connection.register("new_rows", catalog()[copy.table].arrow([]))
            self._connection.execute(f"CREATE TEMP TABLE {name} AS {copy.select}")
        self._files.clear()
        self._schemas = {name: table.schema for name, table in catalog().items()}

    def _advance(self, name: str) -> bool:
        """Open the newest version of a table; return whether it is another one."""
        uri, options = self._settings.lake_uri, self._settings.lake.storage_options
        try:
            if name not in self._tables:
                self._tables[name] = open_table(uri, name, options)
                return True
            version = self._tables[name].version()
            refresh(self._tables[name], uri, name, options)
            return bool(self._tables[name].version() != version)
        except LakeMissing:
            return False
        except LakeDamaged as e:  # the last snapshot is still there
            logger().warning("lake_table_damaged", table=name, error=str(e))
            return False

    def _register(self, changed: list[str]) -> None:
        options = self._settings.lake.storage_options
        found = {name: open_dataset(self._tables[name], name, options) for name in changed}
        if any(not found[name].schema.equals(self._schemas[name]) for name in changed):
            self._connection.close()
            self._connect()  # views keep the columns that their table had
            self._schemas |= {name: dataset.schema for name, dataset in found.items()}
            found = {n: open_dataset(t, n, options) for n, t in self._tables.items()}
        for name, dataset in found.items():
            self._connection.register(f"{name}_raw", dataset)
            before = self._files.get(name, frozenset())
            fragments = {fragment.path: fragment for fragment in dataset.get_fragments()}
            self._files[name] = frozenset(fragments)
            new = [f for path, f in fragments.items() if path not in before]
            for made, copy in self._copies.items():
                if copy.table == name:
                    anew = not before <= fragments.keys()
                    self._copy(made, copy, dataset, list(fragments.values()) if anew else new, anew)

    def _copy(self, name: str, copy: Copy, dataset: Any, fragments: list[Any], anew: bool) -> None:
        if anew:
            self._connection.execute(f"DELETE FROM {name}")
        new = ds.FileSystemDataset(
            fragments, dataset.schema, dataset.format, filesystem=dataset.filesystem
        )
        self._connection.register("new_rows", new)
        self._connection.execute(f"INSERT INTO {name} {copy.select}")
        if copy.newest is not None:
            key, order = ", ".join(copy.newest[0]), copy.newest[1]
            self._connection.execute(
                f"""DELETE FROM {name} WHERE rowid NOT IN (
                    SELECT max_by(rowid, ({order}, rowid)) FROM {name} GROUP BY {key})"""
            )
