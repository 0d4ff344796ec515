"""A table with an unreadable file.

Other tables continue, the error names the file, and a repair restores the table without duplicate
rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import duckdb
import pytest

from clawstream.query.connection import connect
from clawstream.query.sandbox import run_sql
from clawstream.runtime.kafka import Cluster
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import LakeDamaged, SqlError
from clawstream.stream_jobs.lake.delta.log import app_id
from clawstream.stream_jobs.lake.delta.maintenance import maintain
from clawstream.stream_jobs.lake.delta.repair import RepairRefused, check, repair
from clawstream.stream_jobs.lake.delta.snapshots import tables, take_snapshot
from clawstream.stream_jobs.lake.delta.table import CommitCollided, commit, dataset, open_table
from clawstream.stream_jobs.lake.positions import offsets_in_lake, positions
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row
from clawstream.stream_jobs.lake.writer import Lake

SOURCE = ("T", 0)
COMMITS, EACH = 25, 4


class OneTopic:
    """The part of Kafka that `repair` and `status --positions` use.

    It has a topic `claw.rewards` of one partition with the offsets [low, 100).
    """

    def __init__(self, low: int = 0) -> None:
        self.low = low

    def topics(self) -> Mapping[str, int]:
        return {"claw.rewards": 1}

    def topic_ids(self, names: Sequence[str]) -> Mapping[str, str]:
        return {"claw.rewards": "T"} if "claw.rewards" in names else {}

    def watermarks(
        self, topic: str, partitions: Sequence[int] | None = None
    ) -> Mapping[int, tuple[int, int]]:
        return {0: (self.low, 100)}


KAFKA = cast(Cluster, OneTopic())


def rewards(first: int, last: int) -> list[Row]:
    table = catalog()["rewards"]
    made = [
        records.Reward(
            event_id=f"e{n}", run_id="r", trajectory_key=f"k{n}", source="rule", name="f",
            function_version="1", value=float(n), reward_revision=0, created_at=n,
        )
        for n in range(first, last)
    ]  # fmt: skip
    return [
        row
        for n, r in enumerate(made, first)
        for row in table.rows_of(ConsumedRecord(*SOURCE, n, n, {}, r))
    ]


def feed(lake: Lake, table: str = "rewards", until: int = 100) -> int:
    """Read from the table's committed offset and append in batches of `EACH`, as a writer does."""
    mark = lake.committed_offsets(table, [SOURCE]).get(SOURCE, 0)
    return sum(
        lake.append(
            table, rewards(n, min(n + EACH, until)), {SOURCE: min(n + EACH, until)}, lambda *_: None
        )
        for n in range(mark, until, EACH)
    )


def claimed(settings: Settings) -> Lake:
    lake = Lake(settings.lake_uri, {}, 1000)
    lake.acquire()
    return lake


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lake with 100 rewards in 25 commits and one checkpoint."""
    path = tmp_path_factory.mktemp("whole")
    assert feed(claimed(Settings(data_dir=path))) == 100
    assert len(list((path / "lake" / "rewards" / "_delta_log").glob("*.checkpoint.parquet"))) == 1
    return path


@pytest.fixture
def settings(whole: Path, tmp_path: Path) -> Settings:
    shutil.copytree(whole / "lake", tmp_path / "lake")
    return Settings(data_dir=tmp_path)


def flipped(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def last_commit(table: Path) -> Path:
    return max((table / "_delta_log").glob("*.json"))


def data_file(table: Path) -> Path:
    """Return the oldest data file."""
    return min(table.glob("*.parquet"), key=lambda p: p.stat().st_mtime_ns)


def truncated_commit(table: Path) -> Path:
    path = last_commit(table)
    path.write_bytes(path.read_bytes()[:200])
    return path


def garbled_commit(table: Path) -> Path:
    path = last_commit(table)
    path.write_bytes(b"\x00\xff no JSON")
    return path


def missing_commit(table: Path) -> Path:
    path = sorted((table / "_delta_log").glob("*.json"))[-3]
    path.unlink()
    return path


def damaged_checkpoint(table: Path) -> Path:
    (path,) = (table / "_delta_log").glob("*.checkpoint.parquet")
    path.write_bytes(path.read_bytes()[:100])
    return path


def missing_data(table: Path) -> Path:
    path = data_file(table)
    path.unlink()
    return path


def flipped_data(table: Path) -> Path:
    path = data_file(table)
    flipped(path, -6)  # inverts a byte of the footer length
    return path


Damage = Callable[[Path], Path]
DAMAGES: tuple[tuple[Damage, int], ...] = (
    (truncated_commit, 96), (garbled_commit, 96), (missing_commit, 88), (damaged_checkpoint, 100),
    (missing_data, 0), (flipped_data, 0),
)  # fmt: skip
"""Damage to the number of the 100 rewards that the repaired table still has."""


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "left"), DAMAGES, ids=lambda v: getattr(v, "__name__", str(v)))
def test_the_others_go_on_and_the_repaired_table_has_each_row_once(
    settings: Settings, damage: Damage, left: int
) -> None:
    file = damage(settings.data_dir / "lake" / "rewards").name
    lake = claimed(settings)
    assert lake.damaged.keys() == {"rewards"} and file in str(lake.damaged["rewards"])
    assert "run `clawstream tables repair rewards`" in str(lake.damaged["rewards"])
    assert (
        feed(lake) == 0
        and lake.committed_offsets("rewards", [SOURCE]) == {}
        and not lake.commit_due("rewards", {SOURCE: 10**6})
    )
    for name in catalog().keys() - {"rewards"}:
        assert lake.append(name, [], {SOURCE: 7}, lambda *_: None, commit_offsets=True) == 0
        assert lake.committed_offsets(name, [SOURCE]) == {SOURCE: 7}, name
    assert not lake.recover()

    assert file in "".join(check(settings, "rewards"))
    # Only a read detects damage in a file of the expected length.
    seen = [] if damage is flipped_data else ["rewards"]
    assert [t["table"] for t in tables(settings) if t["damage"] is not None] == seen
    errors = [p.error for p in positions(settings, KAFKA) if p.error is not None]
    assert len(errors) == len(seen) and all(
        f"table rewards of the lake is damaged: {file}" in f.replace("_delta_log/", "")
        for f in errors
    )
    assert all(c.deferred is None for c in maintain(settings) if c.table != "rewards")
    sql = connect(settings)
    assert [
        sql.execute(f"SELECT count(*) FROM {name}_raw").fetchall()
        for name in ("steps", "candidates")
    ] == [[(0,)]] * 2
    with pytest.raises(duckdb.Error, match="rewards"):
        sql.execute("SELECT count(*), sum(value) FROM rewards").fetchall()

    done = repair(settings, "rewards", KAFKA)
    assert file in "".join(done.damage) and check(settings, "rewards") == ()
    assert lake.recover() and not lake.damaged
    kept = dataset(open_table(settings.lake_uri, "rewards", {}), {}).count_rows()
    assert kept >= left and lake.committed_offsets("rewards", [SOURCE]) == {SOURCE: kept}
    assert feed(lake) == 100 - kept
    assert connect(settings).execute(
        "SELECT count(*), count(DISTINCT event_id) FROM rewards_raw"
    ).fetchall() == [(100, 100)]
    assert feed(claimed(settings)) == 0


@pytest.mark.slow
def test_a_query_names_the_table_and_the_file(settings: Settings) -> None:
    file = flipped_data(settings.data_dir / "lake" / "rewards").name
    with pytest.raises(
        SqlError, match=f"table rewards of the lake is damaged: {file} .*tables repair rewards"
    ):
        run_sql(settings, "SELECT sum(value) FROM rewards")
    assert run_sql(settings, "SELECT count(*) AS n FROM steps", "csv") == "n\n0"
    garbled = garbled_commit(settings.data_dir / "lake" / "rewards").name
    with pytest.raises(
        SqlError, match=f"table rewards of the lake is damaged: _delta_log/{garbled} "
    ):
        run_sql(settings, "SELECT count(*) FROM rewards_raw")


@pytest.mark.slow
def test_a_repair_while_the_writer_runs_is_noticed_at_its_next_commit(settings: Settings) -> None:
    lake = claimed(settings)
    assert lake.append("rewards", rewards(100, 104), {SOURCE: 104}, lambda *_: None) == 4
    under_way = open_table(settings.lake_uri, "rewards", {})
    missing_data(settings.data_dir / "lake" / "rewards")
    done = repair(settings, "rewards", KAFKA)
    with pytest.raises(CommitCollided):
        empty = catalog()["rewards"].arrow([])
        commit(under_way, empty, {"writer": 2, app_id("rewards", SOURCE): 108})
    assert lake.append("rewards", rewards(104, 108), {SOURCE: 108}, lambda *_: None) == 0
    assert lake.recover()
    assert feed(lake, until=108) == done.rows + 4
    assert connect(settings).execute(
        "SELECT count(*), count(DISTINCT event_id) FROM rewards_raw"
    ).fetchall() == [(108, 108)]


@pytest.mark.slow
def test_a_writer_without_new_rows_notices_a_repair_too(settings: Settings) -> None:
    lake = claimed(settings)
    lake.check_repairs()
    assert not lake.damaged
    missing_data(settings.data_dir / "lake" / "rewards")
    repair(settings, "rewards", KAFKA)
    lake.check_repairs()
    assert lake.damaged.keys() == {"rewards"} and lake.recover() and not lake.damaged


@pytest.mark.slow
def test_a_table_that_breaks_while_the_writer_runs_is_set_aside(settings: Settings) -> None:
    lake = claimed(settings)
    other = open_table(settings.lake_uri, "rewards", {})
    commit(other, catalog()["rewards"].arrow([]), {"other": 1})
    garbled_commit(settings.data_dir / "lake" / "rewards")
    assert lake.append("rewards", rewards(100, 104), {SOURCE: 104}, lambda *_: None) == 0
    assert lake.damaged.keys() == {"rewards"}


@pytest.mark.slow
def test_a_table_that_stays_damaged_gets_no_commits(settings: Settings) -> None:
    newest = max(
        (Path(settings.lake_uri) / "rewards").glob("*.parquet"), key=lambda p: p.stat().st_mtime_ns
    )
    newest.rename(newest.with_suffix(".away"))
    lake = claimed(settings)
    before = open_table(settings.lake_uri, "rewards", {}).version()
    for _ in range(10):
        assert not lake.recover()
        assert lake.damaged.keys() == {"rewards"}
    assert open_table(settings.lake_uri, "rewards", {}).version() == before
    newest.with_suffix(".away").rename(newest)
    assert lake.recover() and not lake.damaged
    assert open_table(settings.lake_uri, "rewards", {}).version() == before + 1
    assert feed(lake) == 0


def test_what_kafka_has_no_more_is_given_up_only_when_that_is_said(settings: Settings) -> None:
    missing_data(settings.data_dir / "lake" / "rewards")
    late = cast(Cluster, OneTopic(low=60))
    with pytest.raises(
        RepairRefused,
        match=r"Kafka no longer has later records: 60 of claw\.rewards-0 from offset 0",
    ):
        repair(settings, "rewards", late)
    assert check(settings, "rewards") != ()
    done = repair(settings, "rewards", late, accept_loss=True)
    assert [(b.former, b.target, b.low, b.lost) for b in done.rewinds] == [(100, 0, 60, 60)]
    lake = claimed(settings)
    assert lake.committed_offsets("rewards", [SOURCE]) == {SOURCE: 60} and feed(lake) == 40


@pytest.mark.slow
def test_a_lost_commit_and_snapshots(settings: Settings) -> None:
    take_snapshot(settings, name="now")
    path = garbled_commit(settings.data_dir / "lake" / "rewards")
    assert repair(settings, "rewards", KAFKA).snapshots == ("now",)
    aside = list((settings.data_dir / "lake" / "_damaged" / "rewards").rglob(path.name))
    assert [p.read_bytes() for p in aside] == [b"\x00\xff no JSON"]
    assert repair(settings, "rewards", KAFKA).restored is None, "there is nothing to do any more"


@pytest.mark.slow
def test_a_topic_keeps_what_a_damaged_table_may_have_to_read_again(settings: Settings) -> None:
    lake = claimed(settings)
    for name in ("curation", "assessments"):
        lake.append(name, [], {SOURCE: 50}, lambda *_: None, commit_offsets=True)
    assert offsets_in_lake(settings, KAFKA) == {("claw.rewards", 0): 50}
    garbled_commit(settings.data_dir / "lake" / "rewards")
    assert offsets_in_lake(settings, KAFKA) == {}


@pytest.mark.slow
def test_nothing_that_can_be_read(settings: Settings) -> None:
    log = settings.data_dir / "lake" / "rewards" / "_delta_log"
    for path in log.glob("*"):
        path.write_bytes(b"?")
    with pytest.raises(
        RepairRefused,
        match=r"no version of table rewards can be read completely: stop all writers, move .* away",
    ):
        repair(settings, "rewards", KAFKA)
    assert {path.read_bytes() for path in log.glob("*")} == {b"?"}
    with pytest.raises(LakeDamaged, match="damaged: _delta_log/0"):
        open_table(settings.lake_uri, "rewards", {})
