"""Prints the reference of the lake's columns: `python -m clawstream.query.column_reference > docs/lake-columns.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from clawstream.query.connection import connect_empty
from clawstream.query.view_columns import VIEW_COLUMNS, comment_of, described
from stream_jobs.lake.tables.catalog import KAFKA_COLUMNS, catalog

_INTRODUCTION = """# Columns of the lake

Made from the code by `python -m clawstream.query.column_reference > docs/lake-columns.md`: do not edit it. [The lake](lake.md) says what a row
of each table is and how to query it; DuckDB shows the same descriptions in `duckdb_columns()`.

Types are DuckDB's; times are UTC, in microseconds. `a.b` is field `b` of the struct `a`, `a[].b` that of each struct in the list `a`.
Every column can be null: a row that was written before the column existed has null there.
"""

_NAMES = {
    pa.string(): "VARCHAR",
    pa.binary(): "BLOB",
    pa.bool_(): "BOOLEAN",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.decimal128(38, 0): "HUGEINT",  # a sum of BIGINT
}


_EXTENDED = frozenset({"steps", "rewards", "curation"})
"""Views that have the columns of their table and others."""


class Described(NamedTuple):
    """A column, or a field inside one, by its path. description: None: it has none."""

    path: str
    kind: str
    description: str | None


def of_tables() -> dict[str, list[Described]]:
    """The columns of each table with the fields inside them, but for the place, which all have."""
    place = {c.field.name for c in KAFKA_COLUMNS}
    return {
        name: [d for field in table.schema if field.name not in place for d in _described(field)]
        for name, table in catalog().items()
    }


def of_views() -> dict[str, list[Described]]:
    """The columns of each view; of one that extends its table, those that the table lacks or that mean something else."""
    schemas = {name: table.schema for name, table in catalog().items()}
    connection = connect_empty()
    found = {}
    for view, own in VIEW_COLUMNS.items():
        columns: pa.Schema = connection.sql(f"SELECT * FROM {view} LIMIT 0").to_arrow_table().schema
        found[view] = [
            Described(field.name, _name(field.type), described(view, field.name, schemas))
            for field in columns
            if view not in _EXTENDED or field.name in own
        ]
    return found


def reference() -> str:
    """The page."""
    return "\n".join(_page()).rstrip()


def _page() -> Iterator[str]:
    yield _INTRODUCTION
    yield "## Tables\n\nThe table as it was written is `<table>_raw` in SQL. Each ends with where its record lies on Kafka:\n"
    yield from _rows(d for column in KAFKA_COLUMNS for d in _described(column.field))
    for name, columns in of_tables().items():
        yield f"### {name}\n"
        yield from _rows(columns)
    yield "## Views\n\nThe other tables have a view with their name and their columns. These views say more or something else:\n"
    for name, columns in of_views().items():
        yield f"### View {name}\n" + (
            "\nBesides the columns of the table:\n" if name in _EXTENDED else ""
        )
        yield from _rows(columns)


def _rows(columns: Iterable[Described]) -> Iterator[str]:
    yield "| column | type | description |\n| --- | --- | --- |"
    for path, kind, description in columns:
        yield f"| `{path}` | {kind} | {(description or '').replace('|', '&#124;')} |"
    yield ""


def _described(field: pa.Field, prefix: str = "") -> Iterator[Described]:
    path, kind = f"{prefix}{field.name}", field.type
    yield Described(path, _name(kind), comment_of(field))
    while pa.types.is_list(kind):
        path, kind = f"{path}[]", kind.value_type
    if pa.types.is_struct(kind):
        for inner in kind:
            yield from _described(inner, f"{path}.")


def _name(kind: pa.DataType) -> str:
    """A type as DuckDB says it, structs without their fields."""
    if pa.types.is_list(kind):
        return f"{_name(kind.value_type)}[]"
    if pa.types.is_map(kind):
        return f"MAP({_name(kind.key_type)}, {_name(kind.item_type)})"
    if pa.types.is_struct(kind):
        return "STRUCT"
    return "TIMESTAMP" if pa.types.is_timestamp(kind) else _NAMES[kind]


if __name__ == "__main__":
    print(reference())
