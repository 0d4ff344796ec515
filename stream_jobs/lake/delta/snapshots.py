"""Read former versions of the lake: its tables, their history, and named snapshots.

A snapshot is JSON, `{"lake", "at", "versions": {table: version}}`. A named one is stored beside the
tables as `_snapshots/<name>.json`: the files of its versions and the log since are not deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from clawstream.runtime.atomic_file import create_durably, fsync_path
from clawstream.runtime.times import parse_instant
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import LakeDamaged
from clawstream.stream_jobs.lake.delta.log import committed_at, filesystem
from clawstream.stream_jobs.lake.delta.table import (
    DeltaError,
    LakeError,
    LakeMissing,
    open_table,
    table_damage,
)
from clawstream.stream_jobs.lake.tables.catalog import catalog

Versions = Mapping[str, int | None]
"""Table to Delta version; None: the table did not exist, so it is empty."""
_DIRECTORY = "_snapshots"
_LISTED = ("table", "rows", "files", "bytes", "version", "newest_row", "damage")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class SnapshotError(LakeError):
    """A snapshot does not exist, is invalid, or cannot have that name."""


def tables(settings: Settings) -> list[dict[str, Any]]:
    """List the tables with their rows, files, bytes, version, newest log time and damage.

    Judges damage by the log and the sizes of the files; reads no data.
    """
    found = []
    for name in catalog():
        try:
            table = open_table(settings.lake_uri, name, settings.lake.storage_options)
            damage = table_damage(table, settings.lake.storage_options, whole=False)
        except LakeMissing:
            continue
        except LakeDamaged as e:
            found.append(dict.fromkeys(_LISTED) | {"table": name, "damage": e.damage})
            continue
        files = pa.table(table.get_add_actions(flatten=True))
        newest = None
        if files.num_rows and "max.kafka_timestamp" in files.column_names:
            newest = max(
                (t for t in files.column("max.kafka_timestamp").to_pylist() if t is not None),
                default=None,
            )
        found.append(
            {
                "table": name,
                "rows": sum(files.column("num_records").to_pylist()) if files.num_rows else 0,
                "files": files.num_rows,
                "bytes": sum(files.column("size_bytes").to_pylist()) if files.num_rows else 0,
                "version": table.version(),
                "newest_row": None
                if newest is None
                else newest.astimezone(UTC).isoformat(timespec="milliseconds"),
                "damage": damage,
            }
        )
    if not found:
        raise LakeMissing(
            f"no lake at {settings.lake_uri}: run `clawstream lake` or `clawstream up` first"
        )
    return found


def history(settings: Settings, name: str, limit: int) -> list[dict[str, Any]]:
    """List the newest commits of a table: version, time, operation, metrics.

    Raises:
        LakeMissing: There is no such table.
    """
    _check_table(name)
    entries = open_table(settings.lake_uri, name, settings.lake.storage_options).history(limit)
    return [
        {
            "version": e["version"],
            "at": datetime.fromtimestamp(e["timestamp"] / 1000, UTC).isoformat(
                timespec="milliseconds"
            ),
            "operation": e.get("operation"),
            "metrics": e.get("operationMetrics", {}),
        }
        for e in entries
    ]


def _check_table(name: str) -> None:
    if name not in catalog():
        raise LakeMissing(f"no table {name}; there are {', '.join(catalog())}")


def take_snapshot(settings: Settings, name: str | None = None) -> dict[str, Any]:
    """Return the versions of all tables now.

    Args:
        name: store the snapshot under this name; its files are kept until `delete_snapshot`.

    Raises:
        SnapshotError: the name is taken; users of that snapshot rely on its versions.
    """
    if name is not None and _exists(settings, _check_name(name)):
        raise _name_taken(name)
    found = _snapshot(settings, datetime.now(UTC))
    if name is not None:
        _store(settings, name, json.dumps(found).encode())
    return found


def _store(settings: Settings, name: str, data: bytes) -> None:
    """Write a named snapshot atomically.

    An object store cannot detect a second writer of the same name: the later one stays.

    Raises:
        SnapshotError: the name was taken meanwhile.
    """
    lake = _lake(settings)
    lake.create_dir(_DIRECTORY)
    if not isinstance(lake.base_fs, pafs.LocalFileSystem):
        with lake.open_output_stream(_file(name)) as out:
            out.write(data)
        return
    root = Path(lake.base_path)
    try:
        create_durably(root / _file(name), data)
    except FileExistsError as e:
        raise _name_taken(name) from e
    fsync_path(root)  # the directory of the first snapshot


def _name_taken(name: str) -> SnapshotError:
    return SnapshotError(
        f"there is a snapshot named {name}: choose another name, or "
        f"`clawstream tables snapshot {name} --delete` first"
    )


def named_snapshots(settings: Settings) -> dict[str, dict[str, Any] | SnapshotError]:
    """Return named snapshots by name; an unreadable one as its error."""
    found: dict[str, dict[str, Any] | SnapshotError] = {}
    for file in _lake(settings).get_file_info(pafs.FileSelector(_DIRECTORY, allow_not_found=True)):
        if file.is_file and file.extension == "json":
            name = file.base_name.removesuffix(".json")
            try:
                found[name] = _read(settings, name)
            except SnapshotError as e:
                found[name] = e
    return found


def delete_snapshot(settings: Settings, name: str) -> None:
    """Delete a named snapshot, readable or not; its files may then be deleted.

    Raises:
        SnapshotError: there is no such snapshot.
    """
    if not _exists(settings, _check_name(name)):
        raise SnapshotError(
            f"no named snapshot {name}; "
            f"there are {', '.join(sorted(named_snapshots(settings))) or 'none'}"
        )
    _lake(settings).delete_file(_file(name))


def protected_versions(settings: Settings, table: str) -> list[int]:
    """Return the versions of a table that named snapshots protect.

    Raises:
        SnapshotError: a snapshot cannot be read, so its versions are unknown.
    """
    kept = set()
    for name, found in named_snapshots(settings).items():
        if isinstance(found, SnapshotError):
            raise SnapshotError(
                f"nothing is deleted while {found}; "
                f"to discard it: `clawstream tables snapshot {name} --delete`"
            )
        if table in found["versions"]:
            kept.add(found["versions"][table])
    return sorted(kept)


def _lake(settings: Settings) -> Any:
    return filesystem(settings.lake_uri, settings.lake.storage_options)


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SnapshotError(
            f"{name!r} is no name for a snapshot: letters, digits, `.`, `_` and `-`, at most 64"
        )
    return name


def _file(name: str) -> str:
    return f"{_DIRECTORY}/{name}.json"


def _exists(settings: Settings, name: str) -> bool:
    return bool(_lake(settings).get_file_info(_file(name)).is_file)


def _read(settings: Settings, name: str) -> dict[str, Any]:
    with _lake(settings).open_input_stream(_file(name)) as stream:
        return _parse(stream.read(), f"named snapshot {name}")


def at(settings: Settings, moment: datetime) -> Versions:
    """Return the versions of all tables at a time.

    Raises:
        LakeMissing: the log of a table does not go back so far.
    """
    found = {}
    for name in catalog():
        try:
            found[name] = version_at(settings.lake_uri, name, settings.lake.storage_options, moment)
        except LakeMissing:
            if _table_exists(settings, name):
                raise
    if not found:
        raise LakeMissing(
            f"no lake at {settings.lake_uri}: run `clawstream lake` or `clawstream up` first"
        )
    return found


def _table_exists(settings: Settings, name: str) -> bool:
    try:
        open_table(settings.lake_uri, name, settings.lake.storage_options)
    except LakeMissing:
        return False
    return True


def version_at(uri: str, name: str, storage_options: Mapping[str, str], moment: datetime) -> int:
    """Return the newest version of a table at a time; 0, which is empty, for a younger table.

    Raises:
        LakeMissing: there is no table, or its log does not go back so far.
    """
    table = open_table(uri, name, storage_options)
    try:
        table.load_as_version(moment)
    except DeltaError as e:
        raise LakeMissing(f"table {name} can't be read as of {moment.isoformat()}: {e}") from e
    version = int(table.version())
    # The library's history has wrong times for old versions.
    committed = committed_at(uri, name, version, storage_options)
    if version and (committed is None or committed > moment):
        raise LakeMissing(
            f"table {name} can't be read as of {moment.isoformat()}: its log begins later; "
            "it is kept for lake.history_days"
        )
    return version


def resolve_versions(settings: Settings, word: str) -> Versions:
    """Return the version of each table in a state of the lake; None for one that did not exist.

    Raises: As `find_snapshot`.
    """
    versions = find_snapshot(settings, word)["versions"]
    return {name: versions.get(name) for name in catalog()}


def find_snapshot(settings: Settings, word: str) -> dict[str, Any]:
    """Return a state of the lake as a snapshot.

    Args:
        word: A named snapshot, or a time of `clawstream.runtime.times`.

    Raises:
        SnapshotError: Neither.
        LakeMissing: The log of a table does not go back so far.
    """
    if _NAME.fullmatch(word) and _exists(settings, word):
        return _read(settings, word)
    try:
        moment = parse_instant(word, datetime.now(UTC))
    except ValueError as e:
        raise SnapshotError(
            f"{word[:80]!r} is neither a named snapshot nor a time: {e}"[:400]
        ) from e
    return _snapshot(settings, moment)


def _snapshot(settings: Settings, moment: datetime) -> dict[str, Any]:
    versions = dict(at(settings, moment))
    return {"lake": settings.lake_uri, "at": moment.isoformat(), "versions": versions}


def _parse(data: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
        versions = {str(k): _version(v) for k, v in found["versions"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise SnapshotError(f"{where} is no snapshot: {type(e).__name__}: {e}") from e
    return {**found, "versions": versions}


def _version(value: Any) -> int:
    """Check a version of a snapshot. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is no version of a table")
    return value
