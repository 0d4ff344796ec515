"""Query the lake in SQL with an embedded DuckDB. The only module that imports duckdb.

`<table>_raw` is a table as it was written (append-only, every revision, times with zone). The plain
names are views with times in UTC, defined in `views/*.sql` where their columns differ from those of
the table. More views there cover quality, readiness and lineage.

A connection can read nothing else: no files, no network, no settings. The process around it bounds
memory and time (`clawstream.query.sandbox`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from clawstream.query.column_comments import table_comments
from clawstream.query.views.verdicts import (
    readiness_json,
    refusals_json,
    unmet_step_conditions_json,
)
from clawstream.schemas.ids import GATEWAY_ASSIGNED_KEY
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import LakeDamaged, SqlError
from clawstream.stream_jobs.lake.delta.table import (
    Delta,
    LakeMissing,
    check_files,
    dataset,
    open_table,
)
from clawstream.stream_jobs.lake.tables.arrow_columns import TIME, merged
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import Table

THREADS = min(8, os.cpu_count() or 1)
"""Each thread takes address space, which is limited."""
_VIEWS = files("clawstream.query") / "views"
_AT_CONNECT = {
    "temp_directory": "",  # the default, `.tmp` in the working directory, is accessible to SQL
    "threads": str(THREADS),
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false",
    "allow_persistent_secrets": "false",
    "python_enable_replacements": "false",
}
_AT_LAST = (
    "SET allow_extension_repositories = 'forbidden'",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)
"""In this order, after the views exist: each statement removes what the previous ones needed."""


def connect(
    settings: Settings,
    versions: Mapping[str, int | None] | None = None,
    with_comments: bool = False,
) -> Any:
    """Connect to the lake. Its cursors see the views, but not the tables: each registers its own.

    Args:
        versions: table to Delta version, to read tables as of then; None: empty.
        with_comments: give `duckdb_columns()` the descriptions of columns, which takes 0.25 s more.

    Raises:
        LakeMissing: there is no lake, or no such table or version.
    """
    versions = dict(versions or {})
    unknown = versions.keys() - catalog().keys()
    if unknown:
        raise LakeMissing(
            f"no table {', '.join(sorted(unknown))}; there are {', '.join(catalog())}"
        )
    absent = {name for name, version in versions.items() if version is None}
    damaged: dict[str, LakeDamaged] = {}
    tables: dict[str, Any] = {}
    for name in catalog():
        try:
            tables[name] = None if name in absent else _open(settings, name, versions.get(name))
        except LakeDamaged as e:
            damaged[name] = e
    if not damaged and all(t is None for t in tables.values()):
        raise LakeMissing(
            f"no lake at {settings.lake_uri}: run `clawstream lake` or `clawstream up` first"
        )
    found = {n: catalog()[n].schema if t is None else t for n, t in tables.items()}
    return _with_views(found, damaged, settings.lake.sql_memory_mb, with_comments)


def connect_empty(
    schemas: Mapping[str, pa.Schema] | None = None,
    memory_mb: int = LakeSettings().sql_memory_mb,
) -> Any:
    """Connect to an empty lake, whose cursors see its tables, too: they may register others.

    Args:
        schemas: table to its columns; None: those of this release.
        memory_mb: memory of all cursors.
    """
    columns = {name: table.schema for name, table in catalog().items()} | dict(schemas or {})
    return _with_views(columns, {}, memory_mb, with_comments=True)


def _with_views(
    tables: Mapping[str, Any],
    damaged: Mapping[str, LakeDamaged],
    memory_mb: int,
    with_comments: bool,
) -> Any:
    """Create a locked connection with views and tables: datasets, or schemas of empty tables."""
    memory = {"memory_limit": f"{memory_mb}MiB"}
    connection = duckdb.connect(":memory:", config=_AT_CONNECT | memory)
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    for name, found in tables.items():
        if isinstance(found, pa.Schema):
            connection.register("empty", found.empty_table())
            connection.execute(f"CREATE TABLE {name}_raw AS FROM empty")
            connection.unregister("empty")
        else:
            connection.register(f"{name}_raw", found)
    for name, why in damaged.items():
        _register_damaged(connection, name, why)
    definitions, comments = _statements(connection)
    assigned = f"regexp_full_match(key, '{GATEWAY_ASSIGNED_KEY.pattern}')"
    connection.execute(f"CREATE MACRO is_gateway_assigned(key) AS {assigned}")
    for function in (readiness_json, unmet_step_conditions_json, refusals_json):
        connection.create_function(
            function.__name__, function, ["VARCHAR", "VARCHAR", "BIGINT"], "VARCHAR",
            null_handling="special",
        )  # fmt: skip
    for statement in definitions:
        connection.execute(statement)
    for name, table in catalog().items():
        connection.execute(f"CREATE VIEW IF NOT EXISTS {name} AS {_utc(table)}")
    if with_comments:
        schemas = {name: catalog()[name].schema for name in damaged} | {
            name: found if isinstance(found, pa.Schema) else found.schema
            for name, found in tables.items()
        }
        connection.execute(table_comments(_columns(connection), schemas))
        for statement in comments:
            connection.execute(statement)
    for setting in _AT_LAST:
        connection.execute(setting)
    return connection


def _columns(connection: Any) -> list[tuple[str, str]]:
    """Return (view, column) of all views."""
    found: list[tuple[str, str]] = connection.execute(
        "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal"
    ).fetchall()
    return found


def _register_damaged(connection: Any, name: str, why: LakeDamaged) -> None:
    """Register a damaged table: only queries that need a row of it fail, with the reason."""
    schema = catalog()[name].schema
    connection.register(f"{name}_damaged", pa.Table.from_pylist([{}], schema=schema))
    message = str(why).replace("'", "''")
    fails = f"CASE WHEN kafka_offset IS NULL THEN error('{message}')::BOOLEAN ELSE true END"
    connection.execute(f"CREATE TEMP VIEW {name}_raw AS SELECT * FROM {name}_damaged WHERE {fails}")


def _open(settings: Settings, name: str, version: int | None) -> Any | None:
    """Open a table as a dataset; None if an older release created the lake without it."""
    options = settings.lake.storage_options
    try:
        table = open_table(settings.lake_uri, name, options, version)
        if version is not None:
            check_files(table, name, options)
        return open_dataset(table, name, options)
    except LakeMissing:
        if version is not None:
            raise
        return None


def open_dataset(table: Delta, name: str, storage_options: Mapping[str, str]) -> Any:
    """Return a table as a dataset with all columns of this release: it may be an older one's."""
    found = dataset(table, storage_options)
    return _with_schema(found, merged(found.schema, catalog()[name].schema))


def _with_schema(found: Any, schema: pa.Schema) -> Any:
    """Add columns and fields of structs to a dataset, null where a file lacks them."""
    try:
        return found.replace_schema(schema)
    except pa.ArrowTypeError:  # takes more columns only; a file's own schema need not fit
        fragments = list(found.get_fragments())
        return ds.FileSystemDataset(
            fragments, schema=schema, format=found.format, filesystem=found.filesystem
        )


def _statements(connection: Any) -> tuple[list[Any], list[Any]]:
    """Return the statements of `views/*.sql`: definitions, and comments on columns."""
    names = ("tables", "quality", "lineage", "funnel")  # later views use earlier ones
    texts = [(_VIEWS / f"{name}.sql").read_text() for name in names]
    found = [s for text in texts for s in connection.extract_statements(text)]
    comments = [s for s in found if s.type == duckdb.StatementType.ALTER]
    return [s for s in found if s not in comments], comments


def _utc(table: Table) -> str:
    """Select a table with times as plain UTC timestamps, which every client can show."""
    times = ", ".join(f"as_utc({f.name}) AS {f.name}" for f in table.schema if f.type == TIME)
    return f"SELECT * REPLACE ({times}) FROM {table.name}_raw"


def batches_of(
    connection: Any, query: str, rows: int
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Run a query and return its result as record batches of `rows` rows.

    A statement without a result has a schema without fields.

    Raises:
        SqlError, MemoryError: also while the iterator is read.
    """
    with translated_errors():
        relation = connection.sql(query)
        if relation is None:
            return pa.schema([]), iter(())
        reader = relation.to_arrow_reader(rows)
        return reader.schema, _batches(reader)


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    with translated_errors():
        yield from reader


def rows_of(connection: Any, query: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return all rows of a query. Raises SqlError."""
    with translated_errors():
        found: list[tuple[Any, ...]] = connection.execute(query, dict(parameters)).fetchall()
    return found


def table_at_fault(error: SqlError) -> str | None:
    """Return the table whose files could not be read; None for another error."""
    found = re.search(r"registered as '(\w+)_raw' failed", str(error))
    return found[1] if found is not None else None


@contextmanager
def translated_errors() -> Iterator[None]:
    """Raise SqlError for errors of a query, MemoryError for exceeded memory."""
    try:
        yield
    except duckdb.OutOfMemoryException as e:
        raise MemoryError(str(e)) from e
    except (duckdb.Error, pa.ArrowException, OSError) as e:
        raise SqlError(str(e)) from e
