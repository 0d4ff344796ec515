"""Restore a damaged table to its newest readable version.

The writer then reads the later records from the topics again. The steps of `repair`, each of which
leaves a table from which another run can continue:

1. Unreadable files of the log are moved to `<lake>/_damaged/<table>/`. A checkpoint only summarizes
   commits. A commit is replaced by an empty one, because versions must be consecutive.
2. The target is the newest version, all of whose data files can be read, that is older than each
   lost commit and each commit that added an unreadable data file.
3. One commit on top of the newest version restores the target: its files and its committed offsets
   (Delta `txn` actions). Rows and offsets go back together, so no record is lost or duplicated.
   Former versions and snapshots stay as they are.
4. That commit repeats the app ids of the writers, so a concurrent append collides with it, and it
   raises app id `repair`. A running writer sees this at its next commit to the table or within half
   a minute, and reads the topics of the table again from its offsets.

Records between the offsets of the target and the current ones that Kafka no longer has are lost to
the table. The repair refuses this unless the caller accepts it; the offsets are then those at which
the topics begin.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from clawstream.runtime.kafka import Cluster
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import LakeError
from clawstream.stream_jobs.lake.dedupe import TopicIdPartition
from clawstream.stream_jobs.lake.delta.damage import (
    LOG,
    FileDamage,
    adders_of,
    commit_path,
    damaged_files,
    damaged_log_files,
)
from clawstream.stream_jobs.lake.delta.log import (
    app_id,
    filesystem,
    read_committed_offsets,
    table_uri,
)
from clawstream.stream_jobs.lake.delta.snapshots import SnapshotError, named_snapshots
from clawstream.stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    LakeMissing,
    open_table,
    restore,
    sizes,
)
from clawstream.stream_jobs.lake.fencing import REPAIR, writer_id
from clawstream.stream_jobs.lake.tables.catalog import catalog, tables_of

DAMAGED_DIR = "_damaged"
_ATTEMPTS = 5


class RepairRefused(LakeError):
    """The table was not restored. The message says why."""


class Rewind(NamedTuple):
    """A partition whose committed offset goes back.

    Offsets from `target` up to `former` are read again; Kafka no longer has those below `low`.
    """

    partition: TopicIdPartition
    topic: str
    former: int
    target: int
    low: int

    @property
    def lost(self) -> int:
        """Number of offsets that cannot be read again."""
        return max(0, self.low - self.target)


class RepairResult(NamedTuple):
    """The result of a repair.

    restored: version whose files and offsets the table has now; None: nothing was restored.
    rows: number of rows that the writer reads again.
    """

    table: str
    damage: tuple[str, ...]
    restored: int | None = None
    rows: int = 0
    rewinds: tuple[Rewind, ...] = ()
    snapshots: tuple[str, ...] = ()


def check(settings: Settings, name: str) -> tuple[str, ...]:
    """Return the unreadable files of a table's log, or of its newest version.

    Reads all of its files and changes nothing.
    """
    fs = _table_files(settings, name)
    damaged = damaged_log_files(fs)
    if not damaged:
        damaged = list(
            damaged_files(
                fs, sizes(open_table(settings.lake_uri, name, settings.lake.storage_options))
            )
        )
    return tuple(map(str, damaged))


def repair(
    settings: Settings, name: str, cluster: Cluster, accept_loss: bool = False
) -> RepairResult:
    """Restore a damaged table. The writer may run.

    Raises:
        RepairRefused: no version can be read, or records that Kafka no longer has would be lost
            without `accept_loss`.
        LakeMissing: there is no such table.
    """
    fs = _table_files(settings, name)
    if fs.get_file_info(LOG).type == pafs.FileType.NotFound:
        raise LakeMissing(f"no table {name} at {table_uri(settings.lake_uri, name)}")
    broken = damaged_log_files(fs)
    if not _has_beginning(fs, {file_damage.file for file_damage in broken}):
        raise _unrecoverable(settings, name)
    _repair_log(settings, name, fs, broken)
    for _ in range(_ATTEMPTS):
        try:
            return _restore(settings, name, fs, cluster, broken, accept_loss)
        except CommitCollided:
            time.sleep(0.1)
    raise RepairRefused(f"table {name}: {_ATTEMPTS} commits of the writer came between: try again")


def _unrecoverable(settings: Settings, name: str) -> RepairRefused:
    return RepairRefused(
        f"no version of table {name} can be read completely: stop all writers, move "
        f"{table_uri(settings.lake_uri, name)} away and start them: the table is recreated from "
        "the topics, as far back as they reach"
    )


def _has_beginning(fs: pafs.FileSystem, broken: set[str]) -> bool:
    """Return whether the log has a readable checkpoint or first commit."""
    files = (f.base_name for f in fs.get_file_info(pafs.FileSelector(LOG)))
    begins = {f"{LOG}/{name}" for name in files if name.endswith(".checkpoint.parquet")}
    if fs.get_file_info(commit_path(0)).is_file:
        begins.add(commit_path(0))
    return bool(begins - broken)


def _table_files(settings: Settings, name: str) -> pafs.FileSystem:
    if name not in catalog():
        raise LakeMissing(f"no table {name}; there are {', '.join(catalog())}")
    return filesystem(table_uri(settings.lake_uri, name), settings.lake.storage_options)


def _repair_log(
    settings: Settings, name: str, fs: pafs.FileSystem, broken: list[FileDamage]
) -> None:
    """Do step 1: move unreadable files away.

    The operation of an empty commit marks it, so that a repair after a crash recognizes it.
    """
    if not broken:
        return
    lake = filesystem(settings.lake_uri, settings.lake.storage_options)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    lake.create_dir(f"{DAMAGED_DIR}/{name}/{stamp}")
    for file_damage in broken:
        copy = f"{DAMAGED_DIR}/{name}/{stamp}/{file_damage.file.rpartition('/')[2]}"
        if fs.get_file_info(file_damage.file).is_file:
            pafs.copy_files(f"{name}/{file_damage.file}", copy, lake, lake)
        if not file_damage.is_checkpoint:
            info = {
                "timestamp": int(time.time() * 1000), "operation": _LOST,
                "operationParameters": {}, "engineInfo": "clawstream",
            }  # fmt: skip
            _replace(fs, file_damage.file, json.dumps({"commitInfo": info}).encode())
            continue
        fs.delete_file(file_damage.file)
        if fs.get_file_info(f"{LOG}/_last_checkpoint").is_file:
            fs.delete_file(f"{LOG}/_last_checkpoint")


_LOST = "CLAWSTREAM LOST COMMIT"


def _replace(fs: pafs.FileSystem, path: str, data: bytes) -> None:
    """Replace a file atomically, also if the process is killed."""
    with fs.open_output_stream(f"{path}.new") as out:
        out.write(data)
    fs.move(f"{path}.new", path)


def _restore(
    settings: Settings,
    name: str,
    fs: pafs.FileSystem,
    cluster: Cluster,
    broken: list[FileDamage],
    accept_loss: bool,
) -> RepairResult:
    """Do steps 2 to 4. Raises CommitCollided."""
    options = settings.lake.storage_options
    table = open_table(settings.lake_uri, name, options)
    newest = int(table.version())
    target, damaged = _target(settings, name, fs, table)
    damage = tuple(dict.fromkeys([*map(str, broken), *map(str, damaged)]))
    if target == newest:
        return RepairResult(name, damage)
    then = open_table(settings.lake_uri, name, options, target)
    now = read_committed_offsets(settings.lake_uri, name, options)
    then_offsets = {p: then.transaction_version(app_id(name, p)) or 0 for p in now}
    rewinds = _rewinds(settings, name, cluster, now, then_offsets)
    lost = [b for b in rewinds if b.lost]
    if lost and not accept_loss:
        where = ", ".join(
            f"{b.lost} of {b.topic}-{b.partition[1]} from offset {b.target}" for b in lost
        )
        raise RepairRefused(
            f"table {name} would go back to version {target}, but Kafka no longer has later "
            f"records: {where}. Restore the files from a backup, or give these "
            "records up with --accept-loss"
        )
    offsets = {app_id(name, b.partition): max(b.target, b.low) for b in rewinds}
    writers = {
        a: v for a in map(writer_id, range(999)) if (v := table.transaction_version(a)) is not None
    }
    repairs = {REPAIR: (table.transaction_version(REPAIR) or 0) + 1}
    rows = _rows(table) - _rows(then)
    restore(table, target, {**offsets, **writers, **repairs})
    return RepairResult(
        name, damage, target, rows, tuple(rewinds), _snapshots_behind(settings, name, broken)
    )


def _rewinds(
    settings: Settings,
    name: str,
    cluster: Cluster,
    now: Mapping[TopicIdPartition, int],
    then: Mapping[TopicIdPartition, int],
) -> list[Rewind]:
    """Return the partitions whose offset goes back or whose topic begins after it.

    A deleted topic counts as beginning at its committed offset.
    """
    topics = [t for t in cluster.topics() if name in tables_of(settings.kafka.topics, t)]
    names = {topic_id: topic for topic, topic_id in cluster.topic_ids(topics).items()}
    found = []
    for partition in sorted(now):
        topic = names.get(partition[0])
        former, target = now[partition], then[partition]
        number = partition[1]
        low = former if topic is None else cluster.watermarks(topic, [number])[number][0]
        if target < max(former, low):
            name_of_topic = topic or f"deleted topic {partition[0]}"
            found.append(Rewind(partition, name_of_topic, former, target, low))
    return found


def _target(
    settings: Settings, name: str, fs: pafs.FileSystem, table: Delta
) -> tuple[int, list[FileDamage]]:
    """Do step 2: return the version to restore and the unreadable data files."""
    options = settings.lake.storage_options
    target, found = int(table.version()), dict[str, FileDamage]()
    readable: set[str] = set()
    lost = _lost_commits(fs, table)
    if lost:
        target = min(lost) - 1
    while True:
        try:
            at = open_table(settings.lake_uri, name, options, target) if target >= 0 else None
        except LakeError:
            at = None
        if at is None:
            raise _unrecoverable(settings, name)
        files = {path: size for path, size in sizes(at).items() if path not in readable}
        damaged = {file_damage.file: file_damage for file_damage in damaged_files(fs, files)}
        readable |= files.keys() - damaged.keys()
        if not damaged:
            return target, list(found.values())
        found |= damaged
        added = adders_of(fs, frozenset(damaged))
        target = min((added.get(path, 0) for path in damaged), default=0) - 1


def _lost_commits(fs: pafs.FileSystem, table: Delta) -> list[int]:
    """Return versions replaced by an empty commit since the newest restore."""
    lost: list[int] = []
    for version in range(int(table.version()), -1, -1):
        path = commit_path(version)
        if not fs.get_file_info(path).is_file:
            break
        with fs.open_input_stream(path) as stream:
            entries = [json.loads(line) for line in stream.read().splitlines()]
        operation = next(
            (e["commitInfo"].get("operation") for e in entries if "commitInfo" in e), None
        )
        if operation == "RESTORE":
            break
        if operation == _LOST:
            lost.append(version)
    return lost


def _rows(table: Delta) -> int:
    files = pa.table(table.get_add_actions(flatten=True))
    return sum(files.column("num_records").to_pylist()) if files.num_rows else 0


def _snapshots_behind(settings: Settings, name: str, broken: list[FileDamage]) -> tuple[str, ...]:
    """Return named snapshots whose versions lack rows of lost commits."""
    lost = [f.version for f in broken if f.version is not None and not f.is_checkpoint]
    return tuple(
        snapshot
        for snapshot, found in sorted(named_snapshots(settings).items())
        if lost
        and not isinstance(found, SnapshotError)
        and found["versions"].get(name, -1) >= min(lost)
    )
