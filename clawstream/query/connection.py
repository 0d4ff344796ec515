"""Query the lake in SQL with an embedded DuckDB. The only module that imports duckdb.

`<table>_raw` is a table as it was written (append-only, every revision, times with zone). The plain
names are views with times in UTC; these have other columns than their table:

    trajectories  one row per closed trajectory: its newest candidate revision with its reward,
                  joined with the metadata of the payload
    steps         with the trajectory they ended in, their index in it, and their marks (late,
                  duplicate, retried)
    rewards       the valid one per target, source and name: the highest revision, of equal ones the
                  first on the log
    curation      with the trajectory id, also if only the key or a step was given; null until the
                  trajectory of a step is known

Quality: `assessments` (the newest of each trajectory) and `clawstream.query.quality_views`. Lineage
(`clawstream.query.lineage_views`): `lineage_versions`, `lineage_steps`, `lineage_tokens`.

A connection can read nothing else: no files, no network, no settings. The process around it bounds
memory and time (`clawstream.query.sandbox`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from clawstream.query import lineage_views, quality_views
from clawstream.query.view_columns import statements
from schemas.ids import UNNAMED_KEY
from schemas.settings import LakeSettings, Settings
from stream_jobs.errors import LakeDamaged, SqlError
from stream_jobs.lake.delta.table import LakeMissing, check_files, dataset, open_table
from stream_jobs.lake.tables.arrow_columns import TIME, merged
from stream_jobs.lake.tables.catalog import Table, catalog

THREADS = min(8, os.cpu_count() or 1)
"""Each thread takes address space, which is limited."""
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
    """Connect to the lake. Use the connection itself: its cursors do not see the tables.

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
    return _with_views(tables, damaged, settings.lake.sql_memory_mb, with_comments)


def connect_empty() -> Any:
    """Connect to an empty lake: tables and views with the columns of this release."""
    return _with_views(
        dict.fromkeys(catalog()), {}, LakeSettings().sql_memory_mb, with_comments=True
    )


def _with_views(
    tables: Mapping[str, Any],
    damaged: Mapping[str, LakeDamaged],
    memory_mb: int,
    with_comments: bool,
) -> Any:
    """Create a locked connection with views and tables, given as datasets (None: empty)."""
    memory = {"memory_limit": f"{memory_mb}MiB"}
    connection = duckdb.connect(":memory:", config=_AT_CONNECT | memory)
    connection.execute("SET TimeZone = 'UTC'")
    for name, found in tables.items():
        connection.register(
            f"{name}_raw", found if found is not None else catalog()[name].arrow([])
        )
    for name, why in damaged.items():
        _register_damaged(connection, name, why)
    for name, table in catalog().items():
        connection.execute(f"CREATE TEMP VIEW {name} AS {_VIEWS.get(name) or _utc(table)}")
    for name, query in (*lineage_views.VIEWS.items(), *quality_views.VIEWS.items()):
        connection.execute(f"CREATE TEMP VIEW {name} AS {query}")
    if with_comments:
        schemas = {
            name: t.schema if (t := tables.get(name)) is not None else catalog()[name].schema
            for name in catalog()
        }
        connection.execute(statements(_columns(connection), schemas))
    for statement in _AT_LAST:
        connection.execute(statement)
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
        found = dataset(table, options)
        return _with_schema(
            found, merged(found.schema, catalog()[name].schema)
        )  # it may be older than the views
    except LakeMissing:
        if version is not None:
            raise
        return None


def _with_schema(found: Any, schema: pa.Schema) -> Any:
    """Add columns and fields of structs to a dataset, null where a file lacks them."""
    try:
        return found.replace_schema(schema)
    except pa.ArrowTypeError:  # takes more columns only; a file's own schema need not fit
        fragments = list(found.get_fragments())
        return ds.FileSystemDataset(
            fragments, schema=schema, format=found.format, filesystem=found.filesystem
        )


def _times(names: Iterable[str], prefix: str = "") -> str:
    return ", ".join(f"timezone('UTC', {prefix}{n}) AS {n}" for n in names)


def _utc(table: Table) -> str:
    """Select a table with times as plain UTC timestamps, which every client can show."""
    names = [f.name for f in table.schema if f.type == TIME]
    return f"SELECT * REPLACE ({_times(names)}) FROM {table.name}_raw"


def _targets(table: str) -> str:
    """Return CTEs that resolve the targets of rewards or curations.

    Columns: `of_trajectory`, `of_step`, and `may_be` until the trajectory is known. For a key that
    the gateway assigned, the step determines the trajectory; that key as trajectory id means the
    whole trajectory.
    """
    return f"""
        step_locations AS (
            SELECT run_id, step_id, max_by(trajectory_id, kafka_timestamp) AS trajectory_id FROM (
                SELECT run_id, unnest(steps).step_id AS step_id, trajectory_id, kafka_timestamp
                    FROM trajectories_raw
                UNION ALL SELECT run_id, step_id, trajectory_id, kafka_timestamp FROM step_marks_raw
            ) GROUP BY ALL
        ), keyed AS (
            SELECT *, regexp_full_match(trajectory_key, '{UNNAMED_KEY.pattern}') AS unnamed,
                   coalesce(trajectory_id, trajectory_key) = trajectory_key AS by_key
                       FROM {table}_raw
        ), targets AS (
            SELECT s.* EXCLUDE (unnamed, by_key),
                   CASE WHEN s.unnamed AND s.by_key THEN p.trajectory_id
                        ELSE coalesce(s.trajectory_id, s.trajectory_key) END AS of_trajectory,
                   CASE WHEN s.unnamed AND s.trajectory_id = s.trajectory_key
                       AND p.trajectory_id IS NOT NULL THEN NULL
                        ELSE s.step_id END AS of_step,
                   coalesce(of_trajectory, s.trajectory_id) AS may_be
            FROM keyed s LEFT JOIN step_locations p ON p.run_id = s.run_id AND p.step_id = s.step_id
        )"""


_TARGET_COLUMNS = (
    "EXCLUDE (of_trajectory, of_step, may_be) "
    "REPLACE (of_trajectory AS trajectory_id, of_step AS step_id, "
)

_VIEWS = {
    "trajectories": f"""
        WITH latest AS ({quality_views.LATEST}
        ), payload AS (
            SELECT kafka_topic_id, run_id, trajectory_id, any_value(metadata_json) AS metadata_json,
                   any_value(reason) AS reason, flatten(list(steps ORDER BY part)) AS steps
            FROM trajectories_raw GROUP BY ALL
        )
        SELECT c.run_id, c.trajectory_id, c.trajectory_key, c.group_id, c.group_size, c.round,
            c.channel, c.outcome, p.reason,
               list_sum([r.value FOR r IN c.rewards IF r.step_id IS NULL]) AS reward,
               c.oldest_sync_index,
               list_min([s.oldest_version FOR s IN p.steps IF s.trainable
                         AND starts_with(s.oldest_version,
                             c.run_id || '/' || c.oldest_sync_index || '.')]) AS weight_version,
               c.newest_sync_index,
               len(c.steps)::INTEGER AS steps, c.prompt_tokens, c.trainable_tokens, c.trainable,
               c.reason AS untrainable_reason, c.quality, c.tags, c.revision, c.rewards,
                   p.metadata_json,
               p.steps AS step_details,
               {_times(("opened_at", "closed_at", "kafka_timestamp"), "c.")}, c.kafka_topic_id
        FROM latest c LEFT JOIN payload p ON p.kafka_topic_id = c.payload_topic_id
             AND p.run_id = c.run_id AND p.trajectory_id = c.trajectory_id""",
    "steps": f"""
        WITH inside AS (
            SELECT kafka_timestamp, run_id, trajectory_id, unnest(steps) AS step
                FROM trajectories_raw
        ), closed AS (
            SELECT * FROM inside
            QUALIFY row_number() OVER (PARTITION BY run_id, step.step_id
                ORDER BY kafka_timestamp DESC) = 1
        ), later AS (
            SELECT run_id, step_id, any_value(trajectory_id) AS trajectory_id, list(DISTINCT mark
                ORDER BY mark) AS marks
            FROM step_marks_raw GROUP BY ALL
        )
        SELECT s.* REPLACE ({_times(("received_at", "finished_at", "kafka_timestamp"), "s.")}),
               coalesce(c.trajectory_id, l.trajectory_id) AS trajectory_id, c.step.index
                   AS step_index,
               c.step.parent AS parent_index, c.step.drift AS drift, c.step.trainable AS trainable,
               c.step.untrainable_reason AS untrainable_reason,
               list_sort(list_distinct(list_concat(c.step.marks, l.marks))) AS marks
        FROM steps_raw s LEFT JOIN closed c ON c.run_id = s.run_id AND c.step.step_id = s.step_id
             LEFT JOIN later l ON l.run_id = s.run_id AND l.step_id = s.step_id""",
    "rewards": f"""
        WITH {_targets("rewards")}
        SELECT * {_TARGET_COLUMNS}{_times(("created_at", "kafka_timestamp"))})
        FROM targets
        QUALIFY row_number() OVER (
            PARTITION BY run_id, trajectory_key, may_be, of_step, source, name
            ORDER BY reward_revision DESC, targets.kafka_timestamp, kafka_offset) = 1""",
    "curation": f"""
        WITH {_targets("curation")}
        SELECT * {_TARGET_COLUMNS}{_times(("created_at", "kafka_timestamp"))}) FROM targets""",
    "assessments": quality_views.ASSESSMENTS,
}  # fmt: skip


def batches_of(
    connection: Any, query: str, rows: int
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Run a query and return its result as record batches of `rows` rows.

    A statement without a result has a schema without fields.

    Raises:
        SqlError, MemoryError: also while the iterator is read.
    """
    with _translated_errors():
        relation = connection.sql(query)
        if relation is None:
            return pa.schema([]), iter(())
        reader = relation.to_arrow_reader(rows)
        return reader.schema, _batches(reader)


def _batches(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    with _translated_errors():
        yield from reader


def rows_of(connection: Any, query: str, parameters: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return all rows of a query. Raises SqlError."""
    with _translated_errors():
        found: list[tuple[Any, ...]] = connection.execute(query, dict(parameters)).fetchall()
    return found


def table_at_fault(error: SqlError) -> str | None:
    """Return the table whose files could not be read; None for another error."""
    found = re.search(r"registered as '(\w+)_raw' failed", str(error))
    return found[1] if found is not None else None


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except duckdb.OutOfMemoryException as e:
        raise MemoryError(str(e)) from e
    except (duckdb.Error, pa.ArrowException, OSError) as e:
        raise SqlError(str(e)) from e
