"""Takes a damaged table back to its newest version that can be read, so that the writer reads from the topics what came after it.

The steps of `repair`, each of which leaves a table that a next run repairs from there:

1. Files of the log that can't be read are moved aside, to `<lake>/_damaged/<table>/`. A checkpoint is only a summary of commits; in
   the place of a commit comes an empty one, for versions must follow each other.
2. The target is the newest version before each commit that was lost and before each commit that added a data file which can't be
   read, all of whose own files can be read.
3. One commit on top of the newest version restores the target: its files, and its marks (the Delta `txn` actions), which say up to
   which offset of each partition the rows are there. So rows and marks go back together, and nothing comes twice or is left out.
   Former versions and snapshots stay as they are.
4. That commit repeats the writers' app ids, so one that is under way collides with it, and raises app id `repair`. A writer that
   runs sees this at its next commit to the table or within half a minute, and reads the table's topics again from its marks.

Records between the marks of the target and today's that Kafka has no more are lost to the table. Then nothing is restored unless
that is accepted; if it is, the marks are those where the topics begin.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from runtime.kafka import Cluster
from schemas.settings import Settings
from stream_jobs.errors import LakeError
from stream_jobs.lake.dedupe import TopicIdPartition
from stream_jobs.lake.delta.damage import (
    LOG,
    FileDamage,
    adders_of,
    commit_path,
    damaged_files,
    damaged_log_files,
)
from stream_jobs.lake.delta.log import app_id, filesystem, read_committed_offsets, table_uri
from stream_jobs.lake.delta.snapshots import SnapshotError, named_snapshots
from stream_jobs.lake.delta.table import (
    CommitCollided,
    Delta,
    LakeMissing,
    open_table,
    restore,
    sizes,
)
from stream_jobs.lake.fencing import REPAIR, writer_id
from stream_jobs.lake.tables.catalog import catalog, tables_of

DAMAGED_DIR = "_damaged"
_ATTEMPTS = 5


class RepairRefused(LakeError):
    """The table was not taken back. The message says what is in the way."""


class Rewind(NamedTuple):
    """A partition whose mark goes back from `was`: offsets from `to` on are read again; those below `low` Kafka has no more."""

    source: TopicIdPartition
    topic: str
    was: int
    to: int
    low: int

    @property
    def lost(self) -> int:
        """Offsets that can't be read again."""
        return max(0, self.low - self.to)


class RepairResult(NamedTuple):
    """What was found and done. restored: the version whose files and marks the table has now; None: nothing had to be taken back."""

    table: str
    damage: tuple[str, ...]
    restored: int | None = None
    rows: int = 0
    rewinds: tuple[Rewind, ...] = ()
    snapshots: tuple[str, ...] = ()


def check(settings: Settings, name: str) -> tuple[str, ...]:
    """What can't be read of a table's log, or of its newest version. Reads all of its files, changes nothing."""
    fs = _files_of(settings, name)
    flaws = damaged_log_files(fs)
    if not flaws:
        flaws = list(
            damaged_files(
                fs, sizes(open_table(settings.lake_uri, name, settings.lake.storage_options))
            )
        )
    return tuple(map(str, flaws))


def repair(
    settings: Settings, name: str, cluster: Cluster, accept_loss: bool = False
) -> RepairResult:
    """Take a damaged table back. The writer may run.

    Raises RepairRefused when no version can be read, or when records that Kafka has no more would be lost and `accept_loss` is not
    given; LakeMissing when there is no table.
    """
    fs = _files_of(settings, name)
    if fs.get_file_info(LOG).type == pafs.FileType.NotFound:
        raise LakeMissing(f"no table {name} at {table_uri(settings.lake_uri, name)}")
    broken = damaged_log_files(fs)
    if not _has_beginning(fs, {flaw.file for flaw in broken}):
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
        f"no version of table {name} can be read whole: stop all writers, move {table_uri(settings.lake_uri, name)} away and start "
        "them: the table is made anew from the topics, as far back as those reach"
    )


def _has_beginning(fs: pafs.FileSystem, broken: set[str]) -> bool:
    """Whether the log has a checkpoint, or the commit that made the table, that can be read."""
    files = (f.base_name for f in fs.get_file_info(pafs.FileSelector(LOG)))
    begins = {f"{LOG}/{name}" for name in files if name.endswith(".checkpoint.parquet")}
    if fs.get_file_info(commit_path(0)).is_file:
        begins.add(commit_path(0))
    return bool(begins - broken)


def _files_of(settings: Settings, name: str) -> pafs.FileSystem:
    if name not in catalog():
        raise LakeMissing(f"no table {name}; there are {', '.join(catalog())}")
    return filesystem(table_uri(settings.lake_uri, name), settings.lake.storage_options)


def _repair_log(
    settings: Settings, name: str, fs: pafs.FileSystem, broken: list[FileDamage]
) -> None:
    """Step 1. An empty commit says that it is one: what it stands for is found by it when the repair goes on after a crash."""
    if not broken:
        return
    lake = filesystem(settings.lake_uri, settings.lake.storage_options)
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    lake.create_dir(f"{DAMAGED_DIR}/{name}/{stamp}")
    for flaw in broken:
        copy = f"{DAMAGED_DIR}/{name}/{stamp}/{flaw.file.rpartition('/')[2]}"
        if fs.get_file_info(flaw.file).is_file:
            pafs.copy_files(
                f"{name}/{flaw.file}", copy, source_filesystem=lake, destination_filesystem=lake
            )
        if not flaw.is_checkpoint:
            now = int(time.time() * 1000)
            entry = {
                "commitInfo": {
                    "timestamp": now,
                    "operation": _LOST,
                    "operationParameters": {},
                    "engineInfo": "clawstream",
                }
            }
            _replace(fs, flaw.file, json.dumps(entry).encode())
            continue
        fs.delete_file(flaw.file)
        if fs.get_file_info(f"{LOG}/_last_checkpoint").is_file:
            fs.delete_file(f"{LOG}/_last_checkpoint")


_LOST = "CLAWSTREAM LOST COMMIT"


def _replace(fs: pafs.FileSystem, path: str, data: bytes) -> None:
    """The whole file or none of it, also after a crash."""
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
    """Steps 2 to 4. Raises CommitCollided."""
    options = settings.lake.storage_options
    table = open_table(settings.lake_uri, name, options)
    newest = int(table.version())
    target, flaws = _target(settings, name, fs, table)
    told = tuple(dict.fromkeys([*map(str, broken), *map(str, flaws)]))
    if target == newest:
        return RepairResult(name, told)
    then = open_table(settings.lake_uri, name, options, target)
    now = read_committed_offsets(settings.lake_uri, name, options)
    back = _rewinds(
        settings,
        name,
        cluster,
        now,
        {s: then.transaction_version(app_id(name, s)) or 0 for s in now},
    )
    lost = [b for b in back if b.lost]
    if lost and not accept_loss:
        where = ", ".join(f"{b.lost} of {b.topic}-{b.source[1]} from offset {b.to}" for b in lost)
        raise RepairRefused(
            f"table {name} would go back to version {target}, but Kafka has no more what came after it: {where}. "
            "Restore the files from a backup, or give these records up with --accept-loss"
        )
    marks = {app_id(name, b.source): max(b.to, b.low) for b in back}
    writers = {
        a: v for a in map(writer_id, range(999)) if (v := table.transaction_version(a)) is not None
    }
    repairs = {REPAIR: (table.transaction_version(REPAIR) or 0) + 1}
    rows = _rows(table) - _rows(then)
    restore(table, target, {**marks, **writers, **repairs})
    return RepairResult(
        name, told, target, rows, tuple(back), _snapshots_behind(settings, name, broken)
    )


def _rewinds(
    settings: Settings,
    name: str,
    cluster: Cluster,
    now: Mapping[TopicIdPartition, int],
    then: Mapping[TopicIdPartition, int],
) -> list[Rewind]:
    """The partitions whose marks go back, or whose topic begins behind the mark. A topic that is no more begins where the mark was."""
    topics = [t for t in cluster.topics() if name in tables_of(settings.kafka.topics, t)]
    names = {topic_id: topic for topic, topic_id in cluster.topic_ids(topics).items()}
    found = []
    for source in sorted(now):
        topic = names.get(source[0])
        low = now[source] if topic is None else cluster.watermarks(topic, [source[1]])[source[1]][0]
        if then[source] < max(now[source], low):
            found.append(
                Rewind(
                    source, topic or f"deleted topic {source[0]}", now[source], then[source], low
                )
            )
    return found


def _target(
    settings: Settings, name: str, fs: pafs.FileSystem, table: Delta
) -> tuple[int, list[FileDamage]]:
    """Step 2: the version to restore, today's when nothing has to be; and the data files that can't be read."""
    options = settings.lake.storage_options
    target, found = int(table.version()), dict[str, FileDamage]()
    good: set[str] = set()
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
        files = {path: size for path, size in sizes(at).items() if path not in good}
        flaws = {flaw.file: flaw for flaw in damaged_files(fs, files)}
        good |= files.keys() - flaws.keys()
        if not flaws:
            return target, list(found.values())
        found |= flaws
        added = adders_of(fs, frozenset(flaws))
        target = min((added.get(path, 0) for path in flaws), default=0) - 1


def _lost_commits(fs: pafs.FileSystem, table: Delta) -> list[int]:
    """Versions in whose place is an empty commit, unless a later version was restored from before them."""
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
    """Named snapshots of versions that lack what a lost commit had."""
    first = min(
        (flaw.version for flaw in broken if flaw.version is not None and not flaw.is_checkpoint),
        default=None,
    )
    if first is None:
        return ()
    kept = {
        snapshot: found["versions"].get(name)
        for snapshot, found in named_snapshots(settings).items()
        if not isinstance(found, SnapshotError)
    }
    return tuple(
        snapshot
        for snapshot, version in sorted(kept.items())
        if version is not None and version >= first
    )
