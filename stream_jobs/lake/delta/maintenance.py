"""Merge small files and delete old rows and files, beside the running writer.

Runs as a process of its own, `python -m clawstream.stream_jobs.lake.delta.maintenance` with the
settings as JSON on standard input. The writer starts it at an interval, `clawstream tables` at
once. Each operation is one commit to a table, beside the commits of the writer:

- merging files changes no row and collides with no append; offsets and leases are in the log, not
  in the data files;
- deleting rows collides with an append on an older snapshot: the writer reopens the table, checks
  again and writes again;
- two maintenance processes collide: one gives up until the next run.

A process killed at any point leaves the table unchanged; a later run deletes files that belong to
no version.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from clawstream.runtime.logs import configure, logger
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import LakeAway, LakeDamaged
from clawstream.stream_jobs.lake.delta.log import plain
from clawstream.stream_jobs.lake.delta.snapshots import SnapshotError, protected_versions
from clawstream.stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    DeltaError,
    LakeFull,
    LakeMissing,
    dataset,
    delete_rows,
    files_of,
    history_properties,
    open_table,
    reading,
    storage_errors,
    table_damage,
    writer_properties,
)
from clawstream.stream_jobs.lake.tables.catalog import catalog

FILE_BYTES = 128 << 20
"""Target size of merged files, in bytes."""
SMALL_FILES = 8
"""A table with fewer small files is not compacted."""
_NICE = 10
_STOP_S = 5.0


class MaintenanceResult(NamedTuple):
    """The result of the maintenance of one table."""

    table: str
    deleted_rows: int = 0
    merged_files: int = 0
    made_files: int = 0
    deleted_files: int = 0
    deferred: str | None = None
    """Why work was left to the next run: a collision, a full disk, or an unreadable snapshot."""


def maintain(
    settings: Settings, names: Iterable[str] | None = None, now: datetime | None = None
) -> Iterator[MaintenanceResult]:
    """Maintain tables one by one.

    Defers work that collides with other commits.

    Args:
        names: Tables; default: all that exist.

    Raises:
        LakeMissing: A table of `names` does not exist.
    """
    for name in names if names is not None else catalog():
        try:
            table = open_table(settings.lake_uri, name, settings.lake.storage_options)
        except LakeMissing:
            if names is not None:
                raise
            continue
        except (LakeDamaged, LakeAway) as e:
            yield MaintenanceResult(name, deferred=plain(e))
            continue
        done = MaintenanceResult(name)
        try:
            done = done._replace(
                deleted_rows=_delete_expired(settings, name, table, now or datetime.now(UTC))
            )
            if small_files(table) >= SMALL_FILES:
                merged, made = compact(table, name, settings.lake.storage_options)
                done = done._replace(merged_files=merged, made_files=made)
        except (CommitCollided, LakeFull, LakeAway, LakeDamaged) as e:
            done = done._replace(deferred=plain(e))
        try:
            done = done._replace(deleted_files=vacuum(settings, name))
        except (CommitCollided, LakeFull, LakeAway, SnapshotError) as e:
            done = done._replace(deferred=done.deferred or plain(e))
        yield done


def _delete_expired(settings: Settings, name: str, table: Delta, now: datetime) -> int:
    """Delete rows whose log timestamp is older than `lake.retention_days`; return their number.

    A concurrent commit on an older snapshot collides and is repeated by its writer.
    """
    days = settings.lake.retention_days.get(name)
    if days is None:
        return 0
    oldest = now - timedelta(days=days)
    with reading(table, name, settings.lake.storage_options):
        rows = dataset(table, settings.lake.storage_options).count_rows(
            filter=pc.field("kafka_timestamp") < oldest
        )
    if rows:  # else a commit could collide for nothing
        stamp = oldest.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        delete_rows(table, f"kafka_timestamp < '{stamp}'")
    return int(rows)


def small_files(table: Delta) -> int:
    """Return the number of files that are small enough to merge."""
    sizes = pa.table(table.get_add_actions(flatten=True)).column("size_bytes").to_pylist()
    return sum(size < FILE_BYTES // 2 for size in sizes)


def compact(table: Delta, name: str, storage_options: Mapping[str, str]) -> tuple[int, int]:
    """Merge small files, beside the commits of a writer.

    Returns:
        Number of files removed and added.

    Raises:
        CommitCollided: rows were deleted meanwhile.
        LakeDamaged: a file cannot be read.
        LakeFull: the storage is full.
    """
    try:
        with storage_errors(table.table_uri):
            done = table.optimize.compact(
                target_size=FILE_BYTES,
                max_concurrent_tasks=1,
                writer_properties=writer_properties(pa.schema(table.schema())),
            )
    except CommitCollided:
        raise
    except DeltaError as e:
        damage = table_damage(table, storage_options)
        if damage is None:
            raise
        raise LakeDamaged(name, damage) from e
    return done["numFilesRemoved"], done["numFilesAdded"]


def vacuum(settings: Settings, name: str) -> int:
    """Delete data files and log entries that nothing needs.

    Keeps files of versions within `lake.history_days` and of named snapshots. If there is a named
    snapshot, keeps the log too.

    Returns:
        The number of deleted data files.

    Raises:
        SnapshotError: a named snapshot cannot be read.
    """
    options, history = settings.lake.storage_options, timedelta(days=settings.lake.history_days)
    table = open_table(settings.lake_uri, name, options)
    keep = protected_versions(settings, name)
    _set_history(table, history)
    before = files_of(table, options)
    hours = int(history.total_seconds() // 3600)
    with storage_errors(table.table_uri):
        deleted = table.vacuum(
            retention_hours=hours,
            dry_run=False,
            enforce_retention_duration=False,
            full=hours > 0,  # also files of no version, unless one may be in writing now
            keep_versions=keep or None,
        )
        if not keep:
            table.cleanup_metadata()
    return len(before & set(deleted))  # the library also names files deleted long ago


def _set_history(table: Delta, history: timedelta) -> None:
    wanted = history_properties(history)
    now = table.metadata().configuration
    if any(now.get(name) != value for name, value in wanted.items()):
        with storage_errors(table.table_uri):
            table.alter.set_table_properties(wanted)


class MaintenanceRunner:
    """Start the maintenance process at an interval, one at a time; only from writer 0.

    A failed maintenance process does not stop the writer.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._next = (
            time.monotonic() + settings.lake.care_interval_s
            if settings.lake.writer == 0
            else math.inf
        )

    def poll(self) -> None:
        """Start the process when it is due; log how the previous one ended."""
        if self._process is not None and (code := self._process.poll()) is not None:
            if code:
                logger().warning(
                    "lake_maintenance_failed", exit_code=code, action="the next run tries again"
                )
            self._process = None
        if self._process is None and time.monotonic() >= self._next:
            self._next = time.monotonic() + self._settings.lake.care_interval_s
            self._process = subprocess.Popen(
                die_with_parent(
                    [sys.executable, "-P", "-m", "clawstream.stream_jobs.lake.delta.maintenance"]
                ),
                stdin=subprocess.PIPE,
            )
            assert self._process.stdin is not None
            # Arguments are visible to every user. The process may have ended already.
            with suppress(BrokenPipeError), self._process.stdin as stdin:
                stdin.write(self._settings.model_dump_json().encode())

    def stop(self) -> None:
        """Terminate the process, which is safe at any point."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def main() -> None:
    """Maintain all tables once, at low CPU priority."""
    settings = Settings.model_validate_json(sys.stdin.read())
    configure("lake-maintenance", settings.log_level)
    os.nice(_NICE)
    for done in maintain(settings):
        if any(done[1:]):
            logger().info("lake_maintained", **done._asdict())


if __name__ == "__main__":
    main()
