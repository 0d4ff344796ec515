"""Run the queries of the inspector's users in the query sandbox."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice

from clawstream.inspector.queries.sql import ROWS, Cancellation, Result
from clawstream.query.result_format import rows_of
from clawstream.query.sandbox import answer
from clawstream.query.sandbox_launch import QueryProcess, query_process
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import SqlError

AT_ONCE = 2
"""Queries that run at the same time: each may take `lake.sql_memory_mb`."""
LIMIT_S = 60.0
"""Longest time of a query of the page; it is at most `lake.sql_timeout_s`."""
_Started = tuple[ExitStack, QueryProcess]


class SandboxedSql:
    """Implements `clawstream.inspector.queries.sql.RunSql`: each query has a process of its own.

    The process of the next query is started early: its imports take longer than most queries. One
    thread starts all of them, because a process ends with the thread that started it.
    """

    def __init__(self, settings: Settings, limit_s: float = LIMIT_S) -> None:
        self._settings = settings
        self._limit_s = min(limit_s, settings.lake.sql_timeout_s)
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._starter, self._lock = ThreadPoolExecutor(1, "query"), threading.Lock()
        self._next: Future[_Started] | None = None

    def prepare(self) -> None:
        """Start the process of the next query, unless it waits already."""
        with self._lock:
            self._next = self._next or self._starter.submit(_start)

    def close(self) -> None:
        """End the process that waits for a query."""
        with self._lock:
            waiting, self._next = self._next, None
        if waiting is not None:
            waiting.result()[0].close()
        self._starter.shutdown()

    def __call__(self, query: str, cancellation: Cancellation) -> Result:
        """Run a query. Raises SqlError."""
        if not self._places.acquire(blocking=False):
            raise SqlError(f"{AT_ONCE} queries run already: try again when one has ended")
        try:
            with self._lock:
                started, self._next = self._next or self._starter.submit(_start), None
            stack, worker = started.result()
            with stack:
                return self._answer(query, worker, cancellation)
        finally:
            self._places.release()

    def _answer(self, query: str, worker: QueryProcess, cancellation: Cancellation) -> Result:
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            worker.process.kill()

        timer = threading.Timer(self._limit_s, end)
        timer.daemon = True
        timer.start()
        cancellation.ends(worker.process.kill)
        try:
            with answer(self._settings, query, worker=worker) as result:
                rows = list(islice(rows_of(result), ROWS + 1))
                return Result(result.schema.names, rows[:ROWS], len(rows) > ROWS)
        except SqlError as e:
            if cancellation.is_set:
                raise SqlError("the query was cancelled") from e
            if is_late.is_set():
                raise SqlError(
                    f"the query took longer than {self._limit_s:g} s, the limit of this page: "
                    "narrow it, or use `clawstream sql`"
                ) from e
            raise
        finally:
            timer.cancel()


def _start() -> _Started:
    stack = ExitStack()
    return stack, stack.enter_context(query_process())
