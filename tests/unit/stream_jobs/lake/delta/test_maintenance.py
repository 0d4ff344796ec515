"""Maintenance beside a writer, versions and snapshots, retention, a full disk.

The tests use real Delta tables and no Kafka.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import typer
from deltalake import DeltaTable

from clawstream.cli.lake.tables import app
from clawstream.ops.replay.lake_source import snapshot_versions
from clawstream.query.connection import connect
from clawstream.query.sandbox import run_sql
from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import expanded
from clawstream.schemas.codec.single_object import shipped
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.lake.delta.maintenance import (
    MaintenanceRunner,
    compact,
    maintain,
    vacuum,
)
from clawstream.stream_jobs.lake.delta.snapshots import (
    SnapshotError,
    at,
    delete_snapshot,
    history,
    named_snapshots,
    protected_versions,
    resolve_versions,
    tables,
    take_snapshot,
)
from clawstream.stream_jobs.lake.delta.table import LakeMissing, SchemaRefused, open_table
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row
from clawstream.stream_jobs.lake.writer import Lake

SOURCE = ("T", 0)
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def rows(lake: Lake, first: int, *ids: str, at_ms: int = 5_000, **changes: Any) -> list[Row]:
    """Return rewards with these ids, from offset `first`, with the Kafka timestamp `at_ms`."""

    def reward(event_id: str) -> records.Reward:
        values: dict[str, Any] = {
            "event_id": event_id, "run_id": "r", "trajectory_key": "k", "source": "rule",
            "name": "f", "function_version": "1",
            "reward_revision": 0, "created_at": 1,
        }  # fmt: skip
        return records.Reward(**values | changes)

    table = lake.tables["rewards"]
    return [
        row
        for i, e in enumerate(ids)
        for row in table.rows_of(ConsumedRecord(*SOURCE, first + i, at_ms, {}, reward(e)))
    ]


def never(row: Row, why: str) -> None:
    raise AssertionError((row, why))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def lake(settings: Settings) -> Lake:
    lake = Lake(settings.lake_uri, {}, 100)
    lake.acquire()
    return lake


def put(lake: Lake, first: int, *ids: str, **more: Any) -> int:
    return lake.append(
        "rewards", rows(lake, first, *ids, **more), {SOURCE: first + len(ids)}, never
    )


def ids(settings: Settings, **versions: int) -> list[str]:
    found = (
        connect(settings, versions)
        .execute("select event_id from rewards_raw order by 1")
        .fetchall()
    )
    return [row[0] for row in found]


def days(number: float) -> int:
    """Return the epoch milliseconds of this many days before NOW."""
    return int((NOW - timedelta(days=number)).timestamp() * 1000)


@pytest.mark.slow
def test_rows_that_are_too_old_go_and_neither_marks_nor_ids_suffer(
    settings: Settings, lake: Lake
) -> None:
    keeping = settings.model_copy(update={"lake": LakeSettings(retention_days={"rewards": 90})})
    put(lake, 0, "a", "b", at_ms=days(100))
    put(lake, 2, "c", at_ms=days(91))
    put(lake, 3, "d", at_ms=days(89))
    # So one file has rows that go beside rows that stay.
    compact(open_table(keeping.lake_uri, "rewards", {}), "rewards", {})
    held = rows(lake, 4, "e", at_ms=days(1))
    done = {d.table: d.deleted_rows for d in maintain(keeping, now=NOW)}
    assert done["rewards"] == 3
    assert sum(done.values()) == 3
    # The writer had the table open: its commit conflicts with the deletion and is retried on the
    # newer version.
    assert lake.append("rewards", held, {SOURCE: 5}, never) == 1
    assert ids(settings) == ["d", "e"]
    chosen = run_sql(
        settings, "SELECT event_id AS e FROM rewards_raw WHERE e IN ('a', 'd', 'e')", "csv"
    )
    assert sorted(str(chosen).split()) == ["d", "e", "e"]  # with the name of the column
    assert put(lake, 3, "d", "e") == 0
    again = Lake(settings.lake_uri, {}, 100)
    again.acquire()
    assert again.committed_offsets("rewards", [SOURCE]) == {SOURCE: 5}
    assert put(again, 5, "e", "d", "f", at_ms=days(1)) == 1
    assert not any(d.deleted_rows for d in maintain(keeping, now=NOW))


@pytest.mark.slow
def test_a_commit_that_a_deletion_overtakes_is_repeated(
    settings: Settings, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion happens between the writer's read of the table and its commit."""
    put(lake, 0, "a", at_ms=days(100))
    put(lake, 1, "b", at_ms=days(1))
    keeping = settings.model_copy(update={"lake": LakeSettings(retention_days={"rewards": 90})})
    writer = lake._writers["rewards"]
    prepare = writer._prepare
    seen: list[int] = []

    def overtaken(*args: Any) -> Any:
        if not seen:
            seen.extend(d.deleted_rows for d in maintain(keeping, ["rewards"], NOW))
        return prepare(*args)

    monkeypatch.setattr(writer, "_prepare", overtaken)
    assert put(lake, 2, "c") == 1
    assert seen == [1]
    assert ids(settings) == ["b", "c"]


@pytest.mark.slow
def test_a_new_column_reaches_the_table_while_its_writer_runs(
    settings: Settings, lake: Lake
) -> None:
    schema = expanded(shipped("Reward"))
    schema["fields"] = [
        *schema["fields"],
        {"name": "team", "type": ["null", "string"], "default": None, "doc": "Who."},
    ]
    put(lake, 0, "before")
    waiting = rows(lake, 1, "waited")
    former = lake.tables["rewards"]
    assert lake.add_columns(former.evolved(schema))
    table = lake.tables["rewards"]
    wide = [table.upgraded(row, former) for row in waiting]
    named = (*wide[0][: table.index["team"]], "red", *wide[0][table.index["team"] + 1 :])
    named = (
        *named[: table.index["event_id"]],
        "after",
        *named[table.index["event_id"] + 1 : -2],
        2,
        5_000,
    )
    assert lake.append("rewards", [*wide, named], {SOURCE: 3}, never) == 2
    query = "select event_id, team from rewards_raw order by kafka_offset"
    assert connect(settings).execute(query).fetchall() == [
        ("before", None),
        ("waited", None),
        ("after", "red"),
    ]
    # A restarted older release, whose rows have fewer columns: views and its appends still work.
    older = Lake(settings.lake_uri, {}, 100)
    older.acquire()
    assert put(older, 3, "older") == 1
    assert len(connect(settings).execute(query).fetchall()) == 4
    assert connect(settings).execute(
        "select count(*) from rewards_raw where team = 'red'"
    ).fetchall() == [(1,)]
    comments = {
        f.name: f.metadata for f in DeltaTable(f"{settings.lake_uri}/rewards").schema().fields
    }
    assert comments["team"] == {"comment": "Who."}
    assert all(m.get("comment") for m in comments.values())
    # The compacted file has the column too.
    assert any(d.merged_files for d in maintain(settings.model_copy(), ["rewards"])) is False
    assert len(connect(settings).execute(query).fetchall()) == 4


@pytest.mark.slow
def test_columns_that_do_not_fit_are_refused_and_the_lake_goes_on(
    settings: Settings, lake: Lake
) -> None:
    table = lake.tables["rewards"]
    for kind, fits in (("string", True), ("double", False)):
        schema = expanded(shipped("Reward"))
        schema["fields"] = [
            *schema["fields"],
            {"name": "team", "type": ["null", kind], "default": None, "doc": "Who."},
        ]
        assert lake.add_columns(table.evolved(schema)) is fits
    schema["fields"] = [
        *schema["fields"][:-1],
        {"name": "Team", "type": ["null", "string"], "default": None, "doc": "Who."},
    ]
    assert not lake.add_columns(table.evolved(schema))
    assert put(lake, 0, "a") == 1
    assert lake.tables["rewards"].schema.field("team").type == "string"


@pytest.mark.slow
def test_what_is_no_fault_of_the_columns_is_no_refusal(settings: Settings, lake: Lake) -> None:
    """The writer must restart: otherwise it would write rows without the new columns."""
    schema = expanded(shipped("Reward"))
    schema["fields"] = [
        *schema["fields"],
        {"name": "team", "type": ["null", "string"], "default": None, "doc": "Who."},
    ]
    put(lake, 0, "a")
    log = Path(settings.lake_uri) / "rewards" / "_delta_log"
    log.rename(log.with_name("away"))
    log.write_text("no directory")
    with pytest.raises(Exception, match=r"(?i)not a directory|File exists|os error") as caught:
        lake.add_columns(lake.tables["rewards"].evolved(schema))
    assert not isinstance(caught.value, SchemaRefused)
    log.unlink()
    log.with_name("away").rename(log)
    assert lake.add_columns(lake.tables["rewards"].evolved(schema))


@pytest.mark.slow
def test_versions_snapshots_and_what_vacuum_leaves(
    settings: Settings, lake: Lake, tmp_path: Path
) -> None:
    put(lake, 0, "a")
    snapshot = take_snapshot(settings, name="first")
    then = datetime.fromisoformat(snapshot["at"])
    clock = tmp_path / "clock"
    clock.touch()
    # Versions have file timestamps, which are coarse.
    while datetime.fromtimestamp(clock.stat().st_mtime, UTC) <= then:
        clock.touch()
    for i in range(1, 12):
        put(lake, i, f"b{i}")
    twelve = take_snapshot(settings)
    now: dict[str, Any] = twelve["versions"]
    count = "select count(*) as n from rewards_raw"

    def counted(at: str) -> int:
        (row,) = connect(settings, resolve_versions(settings, at)).execute(count).fetchall()
        return int(row[0])

    assert run_sql(settings, count, "csv", at="first") == "n\n1"
    assert [counted(at) for at in (then.isoformat(), twelve["at"], "1999-01-01")] == [1, 12, 0]
    (shown,) = [t for t in tables(settings) if t["table"] == "rewards"]
    assert (shown["rows"], shown["files"], shown["version"]) == (12, 12, now["rewards"])
    assert shown["newest_row"] == "1970-01-01T00:00:05.000+00:00"
    assert [h["version"] for h in history(settings, "rewards", 2)] == [
        now["rewards"],
        now["rewards"] - 1,
    ]

    (done,) = maintain(settings, ["rewards"])
    assert (done.merged_files, done.made_files, done.deleted_files) == (12, 1, 0)
    gone = settings.model_copy(update={"lake": LakeSettings(history_days=1e-9)})
    assert vacuum(gone, "rewards") == 11  # the snapshot keeps one file
    assert counted("first") == 1
    with pytest.raises(
        LakeMissing,
        match="version 13 of table rewards can't be read any more: 11 of its files are deleted",
    ):
        counted(twelve["at"])
    assert protected_versions(settings, "rewards") == [snapshot["versions"]["rewards"]]
    delete_snapshot(settings, "first")
    assert named_snapshots(settings) == {}
    assert vacuum(gone, "rewards") == 1
    assert len(ids(settings)) == 12
    assert put(lake, 12, "c") == 1


@pytest.mark.slow
def test_snapshots_that_are_none(settings: Settings, lake: Lake, tmp_path: Path) -> None:
    kept = Path(settings.lake_uri) / "_snapshots"
    kept.mkdir()
    (kept / "x.json").write_text('{"versions": [1]}')
    with pytest.raises(SnapshotError, match="named snapshot x is no snapshot"):
        resolve_versions(settings, "x")
    for version in (-1, 1 << 70, 1.5, "1", True):
        (kept / "x.json").write_text(json.dumps({"versions": {"rewards": version}}))
        with pytest.raises(SnapshotError, match=r"x is no snapshot.*is no version of a table"):
            resolve_versions(settings, "x")
    (kept / "x.json").unlink()
    for word in ("nope", "x" * 300, "9" * 30, str(tmp_path), "99999999999999d"):
        with pytest.raises(SnapshotError, match="is neither a named snapshot nor a time"):
            resolve_versions(settings, word)
    with pytest.raises(SnapshotError, match="no named snapshot nope; there are none"):
        delete_snapshot(settings, "nope")
    with pytest.raises(SnapshotError, match="is no name for a snapshot"):
        take_snapshot(settings, name="../x")
    with pytest.raises(LakeMissing, match="no lake at"):
        at(Settings(data_dir=tmp_path / "other"), NOW)


@pytest.mark.slow
def test_a_broken_pin_stops_only_what_deletes(settings: Settings, lake: Lake) -> None:
    for i in range(9):
        put(lake, i, f"e{i}")
    good = take_snapshot(settings, name="good")
    kept = Path(settings.lake_uri) / "_snapshots"
    assert [f.name for f in kept.iterdir()] == ["good.json"]
    (kept / "half.json").write_text('{"lake":')
    gone = settings.model_copy(update={"lake": LakeSettings(history_days=1e-9)})
    (done,) = maintain(gone, ["rewards"])
    assert (done.merged_files, done.deleted_files) == (9, 0)
    assert done.deferred is not None
    assert "nothing is deleted while named snapshot half is no snapshot" in done.deferred
    with pytest.raises(SnapshotError, match="clawstream tables snapshot half --delete"):
        vacuum(gone, "rewards")
    assert resolve_versions(settings, "good") == good["versions"]
    with pytest.raises(SnapshotError, match="named snapshot half is no snapshot"):
        resolve_versions(settings, "half")
    assert {
        name: isinstance(found, SnapshotError) for name, found in named_snapshots(settings).items()
    } == {
        "good": False,
        "half": True,
    }
    delete_snapshot(settings, "good")
    delete_snapshot(settings, "half")
    assert named_snapshots(settings) == {}
    assert vacuum(gone, "rewards") == 9


@pytest.mark.slow
def test_a_kept_pin_is_never_replaced(settings: Settings, lake: Lake) -> None:
    first = take_snapshot(settings, name="paper")
    put(lake, 0, "a")
    with pytest.raises(
        SnapshotError,
        match=(
            "there is a snapshot named paper: choose another name, or `clawstream tables "
            "snapshot paper --delete`"
        ),
    ):
        take_snapshot(settings, name="paper")
    assert resolve_versions(settings, "paper") == first["versions"]
    delete_snapshot(settings, "paper")
    assert take_snapshot(settings, name="paper")["versions"] != first["versions"]


@pytest.mark.slow
def test_of_pins_kept_at_once_under_one_name_one_stays(settings: Settings, lake: Lake) -> None:
    """All of them find the name unused. The draft of a killed process is not a snapshot."""
    together = threading.Barrier(4)

    def kept(_: int) -> dict[str, Any] | SnapshotError:
        together.wait()
        try:
            return take_snapshot(settings, name="paper")
        except SnapshotError as e:
            return e

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(kept, range(4)))
    (winner,) = [f for f in found if isinstance(f, dict)]
    assert all(
        "there is a snapshot named paper: choose another name" in str(f)
        for f in found
        if isinstance(f, SnapshotError)
    )
    (Path(settings.lake_uri) / "_snapshots" / ".paper.json.1.ab").write_text('{"la')
    assert named_snapshots(settings) == {"paper": winner}


@pytest.mark.slow
def test_a_table_that_a_pin_lacks_is_empty(settings: Settings, lake: Lake) -> None:
    """An older release took the snapshot before the table existed."""
    put(lake, 0, "a")
    old = take_snapshot(settings)
    del old["versions"]["rewards"]
    old["versions"]["of_a_newer_release"] = 3
    kept = Path(settings.lake_uri) / "_snapshots"
    kept.mkdir()
    (kept / "old.json").write_text(json.dumps(old))
    count = "select (select count(*) from rewards), (select count(*) from steps)"
    assert connect(settings, resolve_versions(settings, "old")).execute(count).fetchall() == [
        (0, 0)
    ]
    assert resolve_versions(settings, "old").keys() == catalog().keys()
    assert "rewards" not in snapshot_versions(settings, resolve_versions(settings, "old"))
    assert "rewards" in snapshot_versions(settings, {})
    with pytest.raises(LakeMissing, match="had no table steps then"):
        snapshot_versions(settings, {"steps": None})


def test_retention_must_outlast_the_spool() -> None:
    with pytest.raises(
        ValueError, match=r"lake.retention_days.steps=1 must exceed gateway.spool_max_age_s=86400"
    ):
        Settings.model_validate(
            {"lake": {"retention_days": {"steps": 1}}, "gateway": {"spool_max_age_s": 86400},
                "jobs": {"closed_horizon_s": 90000}}
        )  # fmt: skip
    assert issubclass(SettingsError, Exception)


@pytest.mark.slow
def test_the_process_cares_and_is_started_when_it_is_time(settings: Settings, lake: Lake) -> None:
    for i in range(9):
        put(lake, i, f"e{i}")
    keeper = MaintenanceRunner(
        settings.model_copy(update={"lake": LakeSettings(care_interval_s=1e-6)})
    )
    while keeper._process is None:  # on a fast machine the interval may not have passed yet
        keeper.poll()
    assert keeper._process.wait(300) == 0
    assert len(open_table(settings.lake_uri, "rewards", {}).file_uris()) == 1
    assert len(ids(settings)) == 9
    keeper.poll()
    keeper.stop()
    assert put(lake, 9, "e9") == 1


def test_a_process_that_ends_before_it_reads_does_not_stop_the_writer(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    more_than_a_pipe_holds = {"token": "x" * (1 << 20)}
    given = LakeSettings(care_interval_s=1e-6, storage_options=more_than_a_pipe_holds)
    keeper = MaintenanceRunner(settings.model_copy(update={"lake": given}))
    while keeper._process is None:
        keeper.poll()
    keeper.stop()
    assert keeper._process.returncode == 1


FULL = """
import os, subprocess, sys, threading
from pathlib import Path
sys.path[:0] = [sys.argv[2], str(Path(sys.argv[2]).parents[3])]
from test_maintenance import put, ids, rows, never, SOURCE
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.main import _follow, _when_writable
from clawstream.stream_jobs.lake.metrics import LakeMetrics
from clawstream.schemas.codec.avro_schema import expanded
from clawstream.stream_jobs.lake.delta.maintenance import MaintenanceRunner
from clawstream.schemas.codec.single_object import shipped
from clawstream.stream_jobs.lake.writer import Lake
from clawstream.ops.replay.lake_source import snapshot_versions


class Poll:
    # Of a feed what following takes, with one thing to read.

    full, rows, polls, looks = False, {}, 0, 0

    def __init__(self, poll):
        self._poll = poll

    def refresh_topics(self):
        self.looks += 1
        return True

    def poll(self):
        self.polls += 1
        self._poll()

    def commit(self):
        pass


room = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(room)], check=True)
settings = Settings(data_dir=room)
lake, stop = Lake(settings.lake_uri, {}, 100), threading.Event()
filler = room / "filler"
filler.write_bytes(os.urandom(4096 * 995))
threading.Timer(1.5, filler.unlink).start()  # there is no room even for the tables at first
assert _when_writable(lake, lake.acquire, stop, started=False)
filler.write_bytes(os.urandom(4096 * 600))
threading.Timer(1.5, filler.unlink).start()
for n in range(40):  # 40 KB each that can't be compressed
    batch = [rows(lake, n * 4 + i, f"e{n}.{i}", reason=os.urandom(5_000).hex()) for i in range(4)]
    flat = [row for one in batch for row in one]
    assert _when_writable(lake, lambda: \
    lake.append("rewards", flat, {SOURCE: n * 4 + 4}, never), stop)
assert ids(settings) == sorted(f"e{n}.{i}" for n in range(40) for i in range(4))
filler.write_bytes(os.urandom(4096 * 900)[: os.statvfs(room).f_bavail * 4096])
stop.set()
assert not _when_writable(lake, lambda: \
lake.append("rewards", rows(lake, 160, "z", reason="x" * 9), {SOURCE: 161}, never), stop)
former, schema = lake.tables["rewards"], expanded(shipped("Reward"))
schema["fields"] = [*schema["fields"], \
{"name": "team", "type": ["null", "string"], "default": None, "doc": "Who."}]
consumer = Poll(lambda: lake.add_columns(former.evolved(schema)))
stop.clear()
threading.Timer(1.5, stop.set).start()
_follow(lake, consumer, LakeMetrics(), MaintenanceRunner(settings), 1e9, stop)  \
# waits, and returns without a flush of what was half read
assert (consumer.polls, consumer.looks) == (1, 1)
filler.unlink()
assert lake.add_columns(former.evolved(schema))
lake._writers["rewards"].table = lake.tables["rewards"] = former
assert len(ids(settings)) == 160
assert put(lake, 160, "z") == 1
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_is_said_and_costs_nothing(tmp_path: Path) -> None:
    """The disk is full before the tables exist, while rows are written, and at the end.

    The test uses a file system of 4 MB in its own mount namespace.
    """
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[5],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(
        "free disk space; the writer then continues by itself"
    ) >= 3


@pytest.mark.slow
def test_a_checkpoint_replaces_the_log_before_it(settings: Settings, lake: Lake) -> None:
    for i in range(3):
        put(lake, i, f"e{i}")
    table = open_table(settings.lake_uri, "rewards", {})
    table.create_checkpoint()
    log = Path(settings.lake_uri) / "rewards" / "_delta_log"
    for commit in range(table.version()):
        (log / f"{commit:020}.json").unlink()
    assert ids(settings) == ["e0", "e1", "e2"]
    newer = Lake(settings.lake_uri, {}, 100)
    newer.acquire()
    assert put(newer, 0, "e0", "e1", "e2", "e3") == 1  # offsets are in the checkpoint too


def test_every_tables_command_takes_settings() -> None:
    group = typer.main.get_group(app)
    assert len(group.commands) >= 5
    for name, one in group.commands.items():
        (words,) = (p.metavar for p in one.params if "a.b=c" in str(p.metavar))
        assert words, name


def test_merged_files_have_small_row_groups(tmp_path: Path) -> None:
    """A reader of one row decompresses a row group of it."""
    settings = Settings(data_dir=tmp_path)
    lake = Lake(settings.lake_uri, {}, 1000)
    lake.acquire()
    for first in range(0, 8 * 700, 700):
        some = rows(lake, first, *(f"e{first + i}" for i in range(700)))
        lake.append("rewards", some, {SOURCE: first + 700}, reject=lambda *_: None)
    list(maintain(settings, ["rewards"]))
    (merged,) = open_table(settings.lake_uri, "rewards", {}).file_uris()
    footer = pq.ParquetFile(merged).metadata
    groups = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
    assert groups == [4096, 8 * 700 - 4096]
