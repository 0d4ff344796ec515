"""Describe columns of views by the descriptions of their tables, as comments in DuckDB. Pure.

`clawstream.stream_jobs.lake.tables.catalog` describes the columns of tables. `views/*.sql`
describes columns that only a view has; other columns have the description of the table that the
view selects from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import pyarrow as pa

READS_COMMENTS = re.compile(r"duckdb_columns|comment", re.IGNORECASE)
"""Pattern of queries that may read comments: creating all of them takes 0.25 s."""

_MADE_OF = {
    "trajectories": ("candidates", "trajectories"),
    "curated": ("curation",),
    "findings": ("assessments",),
    "step_quality": ("candidates",),
    "readiness": ("candidates",),
    "step_readiness": ("candidates",),
    "lineage_versions": ("weights",),
    "lineage_steps": ("groups",),
    "lineage_tokens": ("steps",),
}
"""View to the tables that describe its other columns; by default the table of its name."""


def comment_of(field: pa.Field) -> str | None:
    """Return the description of a column or of a field inside one, or None."""
    found = (field.metadata or {}).get(b"comment")
    return found.decode() if found else None


def _described(relation: str, column: str, schemas: Mapping[str, pa.Schema]) -> str | None:
    """Return the description that a table gives to a column of a view or table, or None.

    Args:
        relation: a view, or a table's name followed by `_raw`.
        schemas: the columns of each table, with descriptions as metadata.
    """
    table = relation.removesuffix("_raw")
    for name in (table,) if relation != table else _MADE_OF.get(table, (table,)):
        at = schemas[name].get_field_index(column) if name in schemas else -1
        found = comment_of(schemas[name].field(at)) if at >= 0 else None
        if found is not None:
            return found
    return None


def table_comments(columns: Iterable[tuple[str, str]], schemas: Mapping[str, pa.Schema]) -> str:
    """Return SQL that sets the comments of columns, given as (relation, column)."""
    comments = (
        (relation, column, _described(relation, column, schemas)) for relation, column in columns
    )
    return "; ".join(
        f"COMMENT ON COLUMN {_quoted(relation)}.{_quoted(column)} IS '{_escaped(text)}'"
        for relation, column, text in comments
        if text is not None
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _escaped(text: str) -> str:
    return text.replace("'", "''")
