"""Run a query in a process of its own, `clawstream.query.sandbox_process`, and stream its result.

The process ends when it exceeds its memory or time, when the caller stops reading, and with the
caller.
"""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import BinaryIO

import pyarrow as pa

from clawstream.query.memory_limit import too_large
from clawstream.query.result_format import Format, write
from clawstream.query.sandbox_launch import QueryProcess, query_process
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import SqlError

_END_S = 5.0
"""Seconds that a process may take to end after it closed its result."""


class QueryResult:
    """The record batches of a result, each read on demand.

    schema: of the batches; without fields if the statement has no result.
    """

    def __init__(self, worker: QueryProcess, lake: LakeSettings) -> None:
        self._worker, self._lake = worker, lake
        try:
            self._reader = pa.ipc.open_stream(worker.process.stdout)
        except (pa.ArrowException, OSError) as e:
            raise self._failure() or e from e
        self.schema: pa.Schema = self._reader.schema

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._reader
        except (pa.ArrowException, OSError) as e:
            raise self._failure() or e from e
        failure = self._failure()  # a stream that ends between two batches looks complete
        if failure is not None:
            raise failure

    def _failure(self) -> SqlError | None:
        """Return why the result ended early; None if it is complete."""
        message = self._worker.errors.read()
        if message:
            return SqlError(json.loads(message)["message"])
        code = self._worker.process.wait(_END_S)
        if code == -signal.SIGALRM:
            limit = f"lake.sql_timeout_s={self._lake.sql_timeout_s:g}"
            return SqlError(f"the query took longer than {limit}: narrow it, or raise it")
        if code < 0:  # libraries that run out of memory abort
            how = signal.Signals(-code).name
            return SqlError(f"the process of the query ended with {how}: {too_large(self._lake)}")
        if code:
            return SqlError(
                f"the process of the query ended with code {code}: standard error says why"
            )
        return None


def run_sql(settings: Settings, query: str, fmt: Format = "table", at: str | None = None) -> str:
    """Run one query and return its result as text. Arguments and errors: see `write_sql`."""
    out = io.BytesIO()
    write_sql(settings, query, out, fmt, at)
    return out.getvalue().decode().removesuffix("\n")


def write_sql(
    settings: Settings,
    query: str,
    out: BinaryIO,
    fmt: Format = "table",
    at: str | None = None,
    worker: QueryProcess | None = None,
) -> None:
    """Write the result of a query as it arrives.

    Args:
        at: state of the lake for `clawstream.stream_jobs.lake.delta.snapshots.resolve_versions`;
        None: the
            newest.
        worker: a process that was started before and not used yet.

    Raises:
        SqlError: the query is wrong or not permitted, exceeds memory or time, or the lake cannot be
            read.
    """
    with answer(settings, query, at, worker) as reader:
        write(out, reader.schema, reader, fmt)


@contextmanager
def answer(
    settings: Settings, query: str, at: str | None = None, worker: QueryProcess | None = None
) -> Iterator[QueryResult]:
    """Run a query; its process ends with the context.

    Raises:
        SqlError: as in `write_sql`; also while the result is read.
    """
    with nullcontext(worker) if worker is not None else query_process() as process:
        process.send(
            json.dumps({"settings": settings.model_dump(mode="json"), "query": query, "at": at})
        )
        yield QueryResult(process, settings.lake)
