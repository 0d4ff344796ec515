"""Queries of users: the interface that runs them, the schema, and a chart of the result."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any, NamedTuple, Protocol

from clawstream.inspector.queries.lake import COPIES, Lake, Row

ROWS = 500
"""Rows of a result that are shown."""
CELL_CHARS = 2000


class Result(NamedTuple):
    """The first rows of a result. more: there are others."""

    names: Sequence[str]
    rows: Sequence[Sequence[Any]]
    more: bool


class Cancellation:
    """Ends a query from another thread. is_set: its reader has left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None
        self.is_set = False

    def set(self) -> None:
        """End the query, now or when it begins."""
        with self._lock:
            self.is_set = True
            self._end()

    def ends(self, end: Callable[[], None]) -> None:
        """Call this function when the query is cancelled, also if it is already."""
        with self._lock:
            self._end = end
            if self.is_set:
                end()


class RunSql(Protocol):
    """Runs queries, each in a process of its own, with limits."""

    def prepare(self) -> None:
        """Do now what can be done before the next query is known."""

    def __call__(self, query: str, cancellation: Cancellation) -> Result:
        """Run a query. It raises a ForeseenError that says what is wrong with the query."""


def schema_of(lake: Lake) -> dict[str, list[Row]]:
    """Return the columns of each view: `name`, `type` and `comment`."""
    found = lake.rows(
        """SELECT table_name, column_name AS name, data_type AS type, comment
        FROM duckdb_columns() WHERE NOT internal AND NOT ends_with(table_name, '_raw')
            AND NOT ends_with(table_name, '_damaged') AND table_name NOT IN $copies
        ORDER BY table_name, column_index""",
        {"copies": [*COPIES, "new_rows"]},
    )
    views: dict[str, list[Row]] = {}
    for row in found:
        views.setdefault(row["table_name"], []).append(row)
    return views


def cell(value: Any) -> str:
    """Return a value as text: nested ones are JSON, bytes are hexadecimal."""
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, list | dict):
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    else:
        text = str(_plain(value))
    return text if len(text) <= CELL_CHARS else f"{text[:CELL_CHARS]}…"


def _plain(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else str(value)


def chart_of(result: Result) -> str | None:
    """Return the chart of a result as JSON: the first column is x, other columns of numbers are y.

    Returns:
        `{"time", "x", "series": {name: values}}`; times are seconds since the epoch. None: the
        first column has neither times nor numbers, no other one has numbers, or there is one row.
    """
    columns = list(zip(*result.rows, strict=True))
    if len(result.rows) < 2 or not columns or not _is_axis(columns[0]):
        return None
    order = sorted(range(len(result.rows)), key=lambda i: _number(columns[0][i]) or 0.0)
    series = {
        name: [_number(column[i]) for i in order]
        for name, column in zip(result.names[1:], columns[1:], strict=True)
        if _has_numbers(column)
    }
    if not series:
        return None
    x = [_number(columns[0][i]) for i in order]
    return json.dumps({"time": isinstance(columns[0][0], date), "x": x, "series": series})


def _is_axis(column: Sequence[Any]) -> bool:
    times = all(isinstance(value, date) for value in column)
    return times or (_has_numbers(column) and all(_number(v) is not None for v in column))


def numbers_of(result: Result) -> list[bool]:
    """Return which columns have numbers, which are aligned on the right."""
    columns = zip(*result.rows, strict=True)
    return [_has_numbers(column) for column in columns] or [False] * len(result.names)


def _has_numbers(column: Sequence[Any]) -> bool:
    known = [value for value in column if value is not None]
    numbers = (
        isinstance(value, int | float | Decimal) and not isinstance(value, bool) for value in known
    )
    return bool(known) and all(numbers)


def _number(value: Any) -> float | None:
    """Return a value of a chart; None for what has no place in it."""
    if isinstance(value, date):
        moment = value if isinstance(value, datetime) else datetime(*value.timetuple()[:3])
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return float(value) if value is not None and isfinite(value) else None
