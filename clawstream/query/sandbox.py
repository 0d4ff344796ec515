"""Asks a query in a process of its own, `clawstream.query.sandbox_process`, and reads the answer as it comes.

The process is ended when it takes longer than `lake.sql_timeout_s`, when the caller stops reading, and with the caller. Time in
which the caller does something else, such as waiting for a reader of its own output, is not counted.
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
"""How long a process that has closed its answer may take to end."""


class _Pipe(io.RawIOBase):
    """The reading end of a pipe, for which a reader waits so long in all. Raises SqlError after that."""

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


class Answer:
    """The record batches of an answer, each read when it is asked for.

    schema: of the batches; without fields when the statement has no result.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], said: IO[bytes], settings: Settings
    ) -> None:
        assert process.stdout is not None
        self._process, self._said, self._lake = process, said, settings.lake
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
        failure = self._failure()  # a stream that ends between two batches looks whole
        if failure is not None:
            raise failure

    def _failure(self) -> SqlError | None:
        """Why the answer ended early; None: it is whole. Its process has closed it and ends."""
        told = self._said.read()
        if told:
            return SqlError(json.loads(told)["message"])
        code = self._process.wait(_END_S)
        if code == -signal.SIGXCPU:
            return SqlError(_too_slow(self._lake.sql_timeout_s))
        if code:
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            return SqlError(f"the process of the query ended with {how}: {too_large(self._lake)}")
        return None


def too_large(lake: LakeSettings) -> str:
    """What to say of a query that needs more memory than there is for it."""
    return f"the query needs more than lake.sql_memory_mb={lake.sql_memory_mb}: narrow it, or allow more"


def _too_slow(timeout_s: float) -> str:
    return f"the query took longer than lake.sql_timeout_s={timeout_s:g}: narrow it, or allow more"


def run_sql(settings: Settings, query: str, fmt: Format = "table", at: str | None = None) -> str:
    """Answer one query as text. Arguments and errors: of `write_sql`."""
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
    """Write the answer to a query while it comes.

    Args:
        at: a named snapshot, a file with a snapshot, or a time; all tables are read as they were then.
        worker: one that was started before and was not used yet.

    Raises:
        SqlError: the query is wrong, asks for what a query may not do, takes too much memory or time, or the lake can't be read.
    """
    with answer(settings, query, at, worker) as reader:
        write(out, reader.schema, reader, fmt)


@contextmanager
def answer(
    settings: Settings, query: str, at: str | None = None, worker: QueryProcess | None = None
) -> Iterator[Answer]:
    """The answer to a query; its process ends with the context. Raises SqlError here or while it is read.

    worker: one that was started before and was not used yet.
    """
    with worker or QueryProcess() as process:
        process.send_request(
            {"settings": settings.model_dump(mode="json"), "query": query, "at": at}
        )
        yield Answer(process.process, process.errors, settings)
