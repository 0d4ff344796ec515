"""The process that answers one query: `python -m clawstream.query.sandbox_process STATUS_FD`, started by `clawstream.query.sandbox_launch`.

DuckDB's own settings close every file and the network (`clawstream.query.connection.connect`). They do not bound memory and time: one
function call may allocate beyond `memory_limit` and hear no interrupt. So the operating system does: this process may take so
much address space and processor time, may write no file, and ends with the process that started it (`runtime.process.child`).

1. The request comes as JSON on standard input: not as arguments, which everyone can read, and it may hold credentials.
   It may come long after the start: who asks starts this process first, so that both import their libraries at the same time.
2. Tables are opened and views are made. From then on the limits hold, and only then the query is looked at.
3. The answer goes to standard output as an Arrow stream, a batch at a time, as fast as it is read.
4. An error goes to STATUS_FD as JSON, `{"message"}`; nothing there and exit code 0: the answer is whole.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from typing import BinaryIO

import pyarrow as pa

from clawstream.query.connection import THREADS, batches_of, connect, table_at_fault
from clawstream.query.sandbox import too_large
from clawstream.query.view_columns import ASKS
from schemas.settings import LakeSettings, Settings
from stream_jobs.errors import LakeDamaged, LakeError, SqlError
from stream_jobs.lake.delta.snapshots import resolve_versions
from stream_jobs.lake.delta.table import open_table, table_damage

BATCH_ROWS = 1024
_MESSAGE_BYTES = 16_000
"""A message always fits the pipe, so that writing it never waits."""


def main() -> None:
    """Answer the request on standard input."""
    asked = sys.stdin.read()
    if not asked:
        return  # the one who started it has ended before it had a query
    request = json.loads(asked)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(
        os.open(os.devnull, os.O_WRONLY), 1
    )  # whatever a library prints is no part of the answer
    try:
        _answer(Settings.model_validate(request["settings"]), request["query"], request["at"], out)
    except BrokenPipeError:
        pass  # nobody reads any more
    except (SqlError, LakeError) as e:
        os.write(int(sys.argv[1]), json.dumps({"message": str(e)[:_MESSAGE_BYTES]}).encode())
    os._exit(0)  # threads of libraries that wait for memory would not end


def _answer(settings: Settings, query: str, at: str | None, out: BinaryIO) -> None:
    versions = None if at is None else resolve_versions(settings, at)
    connection = connect(settings, versions, with_comments=ASKS.search(query) is not None)
    limit(settings.lake)
    os.dup2(1, 2)  # nor are a library's last words when its memory ends
    try:
        schema, batches = batches_of(connection, query, BATCH_ROWS)
        with pa.ipc.new_stream(out, schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
        out.flush()
    except MemoryError as e:
        raise SqlError(too_large(settings.lake)) from e
    except SqlError as e:
        table = table_at_fault(e)
        if table is not None:
            _raise_damaged(settings.lake_uri, table, settings.lake.storage_options)
        raise


def _raise_damaged(uri: str, table: str, storage_options: Mapping[str, str]) -> None:
    """Raise LakeDamaged with the file that can't be read, if there is one: not every error names it."""
    flaw = table_damage(open_table(uri, table, storage_options), storage_options)
    if flaw is not None:
        raise LakeDamaged(table, flaw)


def limit(lake: LakeSettings) -> None:
    """Bound this process for good: address space beyond today's, processor time, files written, core dumps."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    memory, seconds = now + lake.sql_memory_mb * 2**20, math.ceil(lake.sql_timeout_s * THREADS) + 1
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    for never in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(never, (0, 0))


if __name__ == "__main__":
    main()
