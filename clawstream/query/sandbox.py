"""Run a query in a process of its own, `clawstream.query.sandbox_process`, and stream its result.

The process ends when it exceeds `lake.sql_timeout_s`, when the caller stops reading, and with the
caller. Time in which the caller does something else, such as waiting for its own output, does not
count.
"""

from __future__ import annotations

import io
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import pyarrow as pa

from clawstream.query.result_format import Format, write
from clawstream.query.sandbox_launch import QueryProcess
from schemas.settings import LakeSettings, Settings
from stream_jobs.errors import SqlError

_END_S = 5.0
"""Seconds that a process may take to end after it closed its result."""


class _Pipe(io.RawIOBase):
    """The reading end of a pipe with a total wait limit. Raises SqlError beyond it."""

    def __init__(self, fd: int, timeout_s: float) -> None:
        self._fd, self._timeout_s, self._left_s = fd, timeout_s, timeout_s
        self._selector = selectors.DefaultSelector()
        self._selector.register(fd, selectors.EVENT_READ)

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        since = time.monotonic()
        ready = self._selector.select(max(0.0, self._left_s))
        self._left_s -= time.monotonic() - since
        if not ready:
            raise SqlError(_too_slow(self._timeout_s))
        data = os.read(self._fd, len(into))
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._selector.close()
        super().close()


class QueryResult:
    """The record batches of a result, each read on demand.

    schema: of the batches; without fields if the statement has no result.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], errors: IO[bytes], settings: Settings
    ) -> None:
        assert process.stdout is not None
        self._process, self._errors, self._lake = process, errors, settings.lake
        pipe = io.BufferedReader(_Pipe(process.stdout.fileno(), settings.lake.sql_timeout_s))
        try:
            self._reader = pa.ipc.open_stream(pa.PythonFile(pipe, mode="r"))
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
        message = self._errors.read()
        if message:
            return SqlError(json.loads(message)["message"])
        code = self._process.wait(_END_S)
        if code == -signal.SIGXCPU:
            return SqlError(_too_slow(self._lake.sql_timeout_s))
        if code:
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            return SqlError(f"the process of the query ended with {how}: {too_large(self._lake)}")
        return None


def too_large(lake: LakeSettings) -> str:
    """Return the error message of a query that needs more memory than its limit."""
    return (
        f"the query needs more than lake.sql_memory_mb={lake.sql_memory_mb}: "
        "narrow it, or raise the limit"
    )


def _too_slow(timeout_s: float) -> str:
    return f"the query took longer than lake.sql_timeout_s={timeout_s:g}: narrow it, or raise it"


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
        at: a named snapshot, a snapshot file, or a time, as of which all tables are read.
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
    with worker or QueryProcess() as process:
        process.send_request(
            {"settings": settings.model_dump(mode="json"), "query": query, "at": at}
        )
        yield QueryResult(process.process, process.errors, settings)
