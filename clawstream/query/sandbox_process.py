"""Run one query: `python -m clawstream.query.sandbox_process STATUS_FD`.

Started by `clawstream.query.sandbox_launch`. DuckDB's own settings deny all files and the network
(`clawstream.query.connection.connect`). They do not bound memory and time: one function call may
allocate beyond `memory_limit` and ignore interrupts. So the operating system limits the address
space of this process, forbids file writes, and ends it by SIGALRM when its time is over; it ends
with the process that started it (`clawstream.runtime.process.child`). Time in which the result
waits for its reader does not count.

1. The request is JSON on standard input, not arguments: those are visible to every user, and it may
   hold credentials. It may come long after the start, because the caller starts this process first
   so that both import their libraries at the same time.
2. The process opens tables and creates views, then sets its limits, and only then reads the query.
3. The result goes to standard output as an Arrow stream, one batch at a time, as it is read.
4. An error goes to STATUS_FD as JSON, `{"message"}`. No error and exit code 0: the result is
   complete.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import BinaryIO

import pyarrow as pa

from clawstream.query.column_comments import READS_COMMENTS
from clawstream.query.connection import batches_of, connect, table_at_fault
from clawstream.query.memory_limit import too_large
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import LakeDamaged, LakeError, SqlError
from clawstream.stream_jobs.lake.delta.log import plain
from clawstream.stream_jobs.lake.delta.snapshots import resolve_versions
from clawstream.stream_jobs.lake.delta.table import open_table, table_damage

BATCH_ROWS = 1024
_MESSAGE_BYTES = 16_000
"""A message always fits the pipe, so writing it never blocks."""


def main() -> None:
    """Run the request on standard input."""
    asked = sys.stdin.read()
    if not asked:
        return  # the caller ended before it had a query
    request = json.loads(asked)
    out = os.fdopen(os.dup(1), "wb")
    # Output of libraries must not mix with the result.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        _answer(Settings.model_validate(request["settings"]), request["query"], request["at"], out)
    except BrokenPipeError:
        pass  # the caller stopped reading
    except (SqlError, LakeError) as e:
        message = str(e)[:_MESSAGE_BYTES]
        os.write(int(sys.argv[1]), json.dumps({"message": message}).encode())
    os._exit(0)  # threads of libraries that wait for memory would not end


def _answer(settings: Settings, query: str, at: str | None, out: BinaryIO) -> None:
    """Run a query. Raises SqlError or LakeError for all that went wrong: the caller reports it."""
    try:
        _query(settings, query, at, out)
    except (SqlError, LakeError, BrokenPipeError):
        raise
    except MemoryError as e:
        raise SqlError(too_large(settings.lake)) from e
    except Exception as e:
        raise SqlError(f"{type(e).__name__}: {plain(e)}") from e


def _query(settings: Settings, query: str, at: str | None, out: BinaryIO) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, settings.lake.sql_timeout_s)
    versions = None if at is None else resolve_versions(settings, at)
    connection = connect(settings, versions, with_comments=READS_COMMENTS.search(query) is not None)
    limit(settings.lake)
    os.dup2(1, 2)  # nor messages of libraries that run out of memory
    try:
        schema, batches = batches_of(connection, query, BATCH_ROWS)
        with pa.ipc.new_stream(out, schema) as stream:
            for batch in batches:
                left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
                stream.write_batch(batch)
                out.flush()
                signal.setitimer(signal.ITIMER_REAL, left_s)
            signal.setitimer(signal.ITIMER_REAL, 0)
        out.flush()
    except SqlError as e:
        table = table_at_fault(e)
        if table is not None:
            _raise_damaged(settings.lake_uri, table, settings.lake.storage_options)
        raise


def _raise_damaged(uri: str, table: str, storage_options: Mapping[str, str]) -> None:
    """Raise LakeDamaged if a file cannot be read: not every error names it."""
    damage = table_damage(open_table(uri, table, storage_options), storage_options)
    if damage is not None:
        raise LakeDamaged(table, damage)


def limit(lake: LakeSettings) -> None:
    """Limit address space beyond today's, file writes and core dumps for good."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    memory = now + lake.sql_memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for never in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(never, (0, 0))


if __name__ == "__main__":
    main()
