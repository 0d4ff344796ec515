"""Care of the tables beside the writer: small files become large ones, rows and files that are too old go. Safe at any moment.

Never in the writer: it runs as a process of its own, `python -m stream_jobs.lake.delta.maintenance` with the settings as JSON on standard input,
started by the writer now and then, or by `clawstream tables`. What it does to a table is one commit each, beside those of the writer:

- merging moves rows and changes none: it collides with no append. Marks and claims are in the log, not in files;
- deleting rows collides with an append that began before it: the writer opens the table again, looks again and writes again;
- two at a time collide with each other: one gives up until next time.

Killed at any point, a table is as it was, and files that belong to no version are deleted by a later run.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa

from runtime.logs import configure, logger
from runtime.process.child import die_with_parent
from schemas.settings import Settings
from stream_jobs.errors import LakeDamaged
from stream_jobs.lake.delta.snapshots import SnapshotError, protected_versions
from stream_jobs.lake.delta.table import (
    FILE_BYTES,
    CommitCollided,
    Delta,
    LakeFull,
    LakeMissing,
    clean,
    compact,
    delete_before,
    open_table,
)
from stream_jobs.lake.tables.catalog import catalog

SMALL_FILES = 8
"""A table with fewer small files is left alone."""
_NICE = 10
_STOP_S = 5.0


class MaintenanceResult(NamedTuple):
    """What was done to a table."""

    table: str
    deleted_rows: int = 0
    merged_files: int = 0
    made_files: int = 0
    deleted_files: int = 0
    deferred: str | None = None
    """Why it was left to the next run: another commit came between, there was no room, or a named snapshot can't be read."""


def maintain(
    settings: Settings, names: Iterable[str] | None = None, now: datetime | None = None
) -> Iterator[MaintenanceResult]:
    """All that there is to do, table by table. A table that does not exist is passed over; one that collides waits until next time."""
    for name in names if names is not None else catalog():
        try:
            table = open_table(settings.lake_uri, name, settings.lake.storage_options)
        except LakeMissing:
            continue
        except LakeDamaged as e:
            yield MaintenanceResult(name, deferred=str(e))
            continue
        done = MaintenanceResult(name)
        try:
            done = done._replace(
                deleted_rows=_delete_old(settings, name, table, now or datetime.now(UTC))
            )
            if small_files(table) >= SMALL_FILES:
                merged, made = compact(table, name, settings.lake.storage_options)
                done = done._replace(merged_files=merged, made_files=made)
        except (CommitCollided, LakeFull, LakeDamaged) as e:
            done = done._replace(deferred=str(e))
        try:
            done = done._replace(deleted_files=vacuum(settings, name))
        except (CommitCollided, LakeFull, SnapshotError) as e:
            done = done._replace(deferred=done.deferred or str(e))
        yield done


def _delete_old(settings: Settings, name: str, table: Delta, now: datetime) -> int:
    """Rows that Kafka took longer ago than their table keeps them."""
    days = settings.lake.retention_days.get(name)
    if days is None:
        return 0
    oldest = now - timedelta(days=days)
    files = pa.table(table.get_add_actions(flatten=True))
    if "min.kafka_timestamp" in files.column_names:
        lows = files.column("min.kafka_timestamp")
        if not lows.null_count and all(low.as_py() >= oldest for low in lows):
            return 0  # nothing to do, and nothing to collide with
    return delete_before(table, "kafka_timestamp", oldest)


def small_files(table: Delta) -> int:
    """How many files are worth merging."""
    sizes = pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    return sum(size < FILE_BYTES // 2 for size in sizes)


def vacuum(settings: Settings, name: str) -> int:
    """Delete files that neither a version within `lake.history_days` nor a named snapshot needs. Returns how many.

    Raises SnapshotError while a named snapshot can't be read.
    """
    table = open_table(settings.lake_uri, name, settings.lake.storage_options)
    return clean(
        table,
        timedelta(days=settings.lake.history_days),
        protected_versions(settings, name),
        settings.lake.storage_options,
    )


class MaintenanceRunner:
    """Starts the process now and then, one at a time; of several writers the first does. Its failure is no failure of the writer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._next = (
            time.monotonic() + settings.lake.care_interval_s
            if settings.lake.writer == 0
            else math.inf
        )

    def poll(self) -> None:
        """Start it when it is time; note how the last one ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            if code:
                logger().warning(
                    "lake_maintenance_failed", exit_code=code, action="the next run tries again"
                )
            self._process = None
        if self._process is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._settings.lake.care_interval_s
            self._process = subprocess.Popen(
                die_with_parent([sys.executable, "-P", "-m", "stream_jobs.lake.delta.maintenance"]),
                stdin=subprocess.PIPE,
            )
            assert self._process.stdin is not None
            with self._process.stdin as stdin:  # not as arguments: those can be read by everyone
                stdin.write(self._settings.model_dump_json().encode())

    def stop(self) -> None:
        """End it where it is; nothing is lost by that."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main() -> None:
    """Once over all tables, with less right to the processor than those who wait for nothing."""
    settings = Settings.model_validate_json(sys.stdin.read())
    configure("lake-maintenance", settings.log_level)
    os.nice(_NICE)
    for done in maintain(settings):
        if any(done[1:]):
            logger().info("lake_maintained", **done._asdict())


if __name__ == "__main__":
    main()
