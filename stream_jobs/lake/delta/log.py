"""Read locations and committed offsets of the tables from their Delta logs.

Needs no Delta library. Format: https://github.com/delta-io/delta/blob/master/PROTOCOL.md,
"Delta Log Entries", "Checkpoints", "Transaction Identifiers".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from clawstream.stream_jobs.errors import LakeDamaged
from clawstream.stream_jobs.lake.dedupe import TopicIdPartition

_CHECKPOINT, _COMMIT = ".checkpoint.parquet", ".json"


def table_uri(uri: str, name: str) -> str:
    """Return the URI of a table of the lake."""
    return f"{uri.rstrip('/')}/{name}"


def filesystem(uri: str, storage_options: Mapping[str, str]) -> pafs.FileSystem:
    """Return a native file system whose root is `uri`.

    Args:
        storage_options: as the Delta library accepts them.
    """
    scheme, sep, rest = uri.partition("://")
    if not sep or scheme == "file":
        return pafs.SubTreeFileSystem(
            str(Path(rest if sep else uri).absolute()), pafs.LocalFileSystem()
        )
    if scheme in ("s3", "s3a"):
        options = {k.upper().removeprefix("AWS_"): v for k, v in storage_options.items()}
        named = {
            "access_key": options.get("ACCESS_KEY_ID"),
            "secret_key": options.get("SECRET_ACCESS_KEY"),
            "session_token": options.get("SESSION_TOKEN"),
            "region": options.get("REGION"),
            "endpoint_override": options.get("ENDPOINT_URL") or options.get("ENDPOINT"),
        }
        return pafs.SubTreeFileSystem(
            rest, pafs.S3FileSystem(**{k: v for k, v in named.items() if v})
        )
    remote, path = pafs.FileSystem.from_uri(uri)
    return pafs.SubTreeFileSystem(path, remote)


_AWAY = re.compile(
    r"Generic (?!LocalFileSystem)\w+ error|AWS Error(?! NO_SUCH)|google::cloud::Status|Azure Error"
    r"|operation lacked (the necessary privileges|valid authentication credentials)"
)
"""Text of an object store's errors, by the Delta library and by Arrow. Their types tell nothing."""


def is_store_away(error: Exception) -> bool:
    """Return whether an object store does not answer or refuses: no file is at fault."""
    return not isinstance(error, FileNotFoundError) and _AWAY.search(str(error)) is not None


def plain(error: Exception) -> str:
    """Return the message of an error on one line, without the colours and arrows of the library."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|\u21b3", "", str(error)).split())[:500]


def app_id(table: str, partition: TopicIdPartition) -> str:
    """Return the app id under which a table's commits store the offset of a partition."""
    return f"{table}:{partition[0]}:{partition[1]}"


def read_committed_offsets(
    uri: str, table: str, storage_options: Mapping[str, str]
) -> dict[TopicIdPartition, int]:
    """Return every offset that the table has committed; also of deleted topics.

    Returns {} for a missing table.

    Raises:
        LakeDamaged: a file of the log cannot be read.
    """
    found = {}
    for name, version in _transactions(table, filesystem(table_uri(uri, table), storage_options)):
        parts = name.split(":")
        if len(parts) == 3 and parts[0] == table and parts[2].isdecimal():
            found[parts[1], int(parts[2])] = version
    return found


def committed_at(
    uri: str, table: str, version: int, storage_options: Mapping[str, str]
) -> datetime | None:
    """Return the commit time of a version; None if its log entry was deleted."""
    log = filesystem(table_uri(uri, table), storage_options)
    try:
        with log.open_input_stream(f"_delta_log/{version:020d}{_COMMIT}") as stream:
            entries = [json.loads(line) for line in stream.read().splitlines()]
    except FileNotFoundError:
        return None
    created_ms = next(
        (e["commitInfo"].get("timestamp") for e in entries if "commitInfo" in e), None
    )
    return None if created_ms is None else datetime.fromtimestamp(created_ms / 1000, UTC)


@contextmanager
def _named(table: str, file: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, pa.ArrowException, OSError) as e:
        if is_store_away(e):
            raise
        raise LakeDamaged(table, f"{file} can't be read: {first_line(e)}") from e


def first_line(error: Exception) -> str:
    """Return the first line of an error message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _transactions(table: str, log: pafs.FileSystem) -> Iterator[tuple[str, int]]:
    """Yield (app id, version) of all `txn` actions in log order.

    Actions before the newest checkpoint come from the checkpoint.
    """
    listed = log.get_file_info(pafs.FileSelector("_delta_log", allow_not_found=True))
    names = sorted(f.base_name for f in listed if f.is_file)
    numbered = {
        int(n.partition(".")[0]): n
        for n in names
        if n.partition(".")[0].isdecimal() and n.endswith(_COMMIT)
    }
    checkpoints = [
        n for n in names if n.endswith(_CHECKPOINT) and n.removesuffix(_CHECKPOINT).isdecimal()
    ]
    start = -1
    if checkpoints:
        start = int(checkpoints[-1].removesuffix(_CHECKPOINT))
        path = f"_delta_log/{checkpoints[-1]}"
        with _named(table, path), log.open_input_file(path) as file:
            for txn in pq.read_table(file, columns=["txn"]).column("txn").drop_null().to_pylist():
                yield txn["appId"], txn["version"]
    for number, name in sorted(numbered.items()):
        if number > start:
            path = f"_delta_log/{name}"
            with _named(table, path), log.open_input_stream(path) as stream:
                for line in stream.read().splitlines():
                    if (txn := json.loads(line).get("txn")) is not None:
                        yield txn["appId"], txn["version"]
