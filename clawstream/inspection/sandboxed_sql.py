"""Run the queries of the inspector's users in the query sandbox."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from threading import BoundedSemaphore

from clawstream.query.result_format import rows_of
from clawstream.query.sandbox import answer
from inspector.queries.sql import ROWS, Result
from schemas.settings import Settings
from stream_jobs.errors import SqlError

AT_ONCE = 2
"""Queries that run at the same time: each may take `lake.sql_memory_mb`."""


def runner(settings: Settings) -> Callable[[str], Result]:
    """Return what runs a query, `inspector.queries.sql.RunSql`. It raises SqlError."""
    places = BoundedSemaphore(AT_ONCE)

    def run(query: str) -> Result:
        if not places.acquire(blocking=False):
            raise SqlError(f"{AT_ONCE} queries run already: try again when one has ended")
        try:
            with answer(settings, query) as result:
                rows = list(islice(rows_of(result), ROWS + 1))
                return Result(result.schema.names, rows[:ROWS], len(rows) > ROWS)
        finally:
            places.release()

    return run
