"""Several lake writers on one lake, without Kafka.

The tests cover partition shares, leases under changing numbers of writers, committed offsets,
deduplication windows and columns.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from clawstream.schemas import records
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.lake.delta.maintenance import MaintenanceRunner
from clawstream.stream_jobs.lake.fencing import (
    LAYOUT,
    SINGLE_WRITER,
    Lease,
    PartitionShare,
    acquire_lease,
)
from clawstream.stream_jobs.lake.main import Lake, LakeFenced, dataset, open_table
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row

TABLE = "rewards"


def test_the_shares_of_n_writers_are_all_partitions_once() -> None:
    for writers in range(1, 6):
        for count in range(8):
            shares = [PartitionShare(w, writers).partitions(count) for w in range(writers)]
            assert sorted(p for share in shares for p in share) == list(range(count))
    assert list(SINGLE_WRITER.partitions(3)) == [0, 1, 2]
    assert list(PartitionShare(1, 2).partitions(1)) == []


def test_a_writer_is_one_of_the_writers() -> None:
    assert (LakeSettings().writers, LakeSettings().writer) == (1, 0)
    assert LakeSettings(writers=3, writer=2).writer == 2
    for wrong in (
        {"writer": 1},
        {"writers": 2, "writer": 2},
        {"writers": 0},
        {"writers": 1000},
        {"writer": -1},
    ):
        with pytest.raises(ValidationError):
            LakeSettings(**wrong)


def test_only_the_first_writer_cares(tmp_path: Path) -> None:
    for writer in (0, 1):
        lake = LakeSettings(writers=2, writer=writer, care_interval_s=1e-9)
        maintenance = MaintenanceRunner(Settings(data_dir=tmp_path, lake=lake))
        # Both intervals pass even on a fast machine.
        due = time.monotonic() + 1e-6
        while time.monotonic() < due:
            pass
        maintenance.poll()
        assert (maintenance._process is not None) == (writer == 0)
        maintenance.stop()


class Started:
    """A writer that acquires the leases of the tables; a table maps application id to version."""

    def __init__(self, share: PartitionShare) -> None:
        self.share, self.hold, self.at = share, None, 0
        self.fenced = False

    lease: Lease | None

    def next_table(self, tables: list[dict[str, int]]) -> None:
        if self.fenced or self.at == len(tables):
            return
        try:
            self.hold, raised = acquire_lease(self.share, self.hold, tables[self.at].get)
        except LakeFenced:
            self.fenced = True
            return
        tables[self.at] |= raised
        self.at += 1

    def may_write(self, table: dict[str, int]) -> bool:
        assert self.hold is not None
        return not self.fenced and table.get(self.share.app_id) == self.hold.epoch


SHARES = st.integers(1, 4).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n)))


@given(
    shares=st.lists(SHARES, min_size=1, max_size=7), order=st.lists(st.integers(0, 6), max_size=40)
)
def test_no_partition_ever_has_two_writers(shares: list[tuple[int, int]], order: list[int]) -> None:
    """Writers of any layouts acquire the tables in any interleaving; some stop halfway."""
    # Two tables of a lake with one writer, and a new table.
    tables = [
        {"writer": 3},
        {"writer": 3},
        dict[str, int](),
    ]
    writers = [Started(PartitionShare(*share)) for share in shares]
    for index in order:
        if index < len(writers):
            writers[index].next_table(tables)
        for at, table in enumerate(tables):
            holders = [w for w in writers if w.at > at and w.may_write(table)]
            for partition in range(12):
                assert sum(partition in w.share.partitions(12) for w in holders) <= 1
    newest = Started(PartitionShare(0, 2))
    for _ in tables:
        newest.next_table(tables)
    assert all(newest.may_write(table) for table in tables)
    for table in tables:
        assert not any(w.at == 3 and w.share.writers != 2 and w.may_write(table) for w in writers)


@given(shares=st.lists(SHARES, min_size=2, max_size=5))
def test_the_newest_layout_can_always_write(shares: list[tuple[int, int]]) -> None:
    """Writers acquire their leases one after the other.

    A writer of the last layout that was not replaced continues; all others are fenced.
    """
    tables: list[dict[str, int]] = [{}, {}]
    writers = [Started(PartitionShare(*share)) for share in shares]
    for writer in writers:
        for _ in tables:
            writer.next_table(tables)
    last_change = max(
        (i for i in range(1, len(shares)) if shares[i][1] != shares[i - 1][1]), default=0
    )
    for index, writer in enumerate(writers):
        live = index >= last_change and shares[index] not in shares[index + 1 :]
        assert [writer.may_write(t) for t in tables] == [live, live]


def test_a_lake_of_one_writer_knows_no_layout() -> None:
    """The tables of a single writer are compatible with releases that had only one writer."""
    lease, raised = acquire_lease(SINGLE_WRITER, None, {"writer": 7}.get)
    assert raised == {"writer": 8}
    assert acquire_lease(SINGLE_WRITER, lease, {"writer": 7}.get)[1] == {"writer": 8}
    assert acquire_lease(PartitionShare(1, 2), None, {"writer": 7}.get)[1] == {
        "writer": 8,
        LAYOUT: 1002,
        "writer:1": 1,
    }


# -- on real tables


def rows(partition: int, first: int, *ids: str) -> list[Row]:
    def reward(event_id: str) -> records.Reward:
        return records.Reward(
            event_id=event_id, run_id="r", trajectory_key="k", source="rule", name="f",
            function_version="1", reward_revision=0, created_at=1,
        )  # fmt: skip

    placed = [
        ConsumedRecord("T", partition, first + i, 5_000 + first + i, {}, reward(e))
        for i, e in enumerate(ids)
    ]
    return [row for p in placed for row in catalog()[TABLE].rows_of(p)]


def claimed(path: Path, writer: int = 0, writers: int = 1, window: int = 100) -> Lake:
    lake = Lake(str(path), {}, window, share=PartitionShare(writer, writers))
    lake.acquire()
    return lake


def never(row: Row, why: str) -> None:
    raise AssertionError((row, why))


def put(lake: Lake, partition: int, first: int, *ids: str) -> int:
    return lake.append(
        TABLE, rows(partition, first, *ids), {("T", partition): first + len(ids)}, never
    )


def ids(path: Path) -> list[str]:
    found = dataset(open_table(str(path), TABLE, {}), {}).to_table(columns=["event_id"])
    return sorted(found.column("event_id").to_pylist())


@pytest.mark.slow
def test_two_writers_do_not_meet_and_a_change_of_their_number_fences_all_of_before(
    tmp_path: Path,
) -> None:
    alone = claimed(tmp_path)
    assert put(alone, 0, 0, "a0") + put(alone, 1, 0, "b0") == 2
    odd = claimed(tmp_path, 1, 2)
    with pytest.raises(LakeFenced, match="took over from 1"):
        put(alone, 0, 1, "a1")
    even = claimed(tmp_path, 0, 2)
    assert odd.committed_offsets(TABLE, [("T", 1)]) == {("T", 1): 1}
    version = open_table(str(tmp_path), TABLE, {}).version()
    for i in range(1, 5):  # each writes on a snapshot without the other's last commit
        assert put(even, 0, i, f"a{i}") + put(odd, 1, i, f"b{i}") == 2
    assert open_table(str(tmp_path), TABLE, {}).version() == version + 8
    odd_again = claimed(tmp_path, 1, 2)
    with pytest.raises(LakeFenced):
        put(odd, 1, 5, "b5")
    assert put(even, 0, 5, "a5") + put(odd_again, 1, 5, "b5") == 2
    sole = claimed(tmp_path)
    for writer, partition in ((even, 0), (odd_again, 1)):
        with pytest.raises(LakeFenced):
            put(writer, partition, 6, "late")
    # Rows below the committed offset are in the table, whichever writer wrote them.
    assert put(sole, 0, 4, "x", "y", "a6") == 1
    assert ids(tmp_path) == sorted([*(f"a{i}" for i in range(7)), *(f"b{i}" for i in range(6))])


@pytest.mark.slow
def test_a_commit_in_flight_at_a_change_of_layout_is_refused(tmp_path: Path) -> None:
    """The older writer reads the table before the new lease and commits after it."""
    alone = claimed(tmp_path)
    put(alone, 0, 0, "a0")
    writer = alone._writers[TABLE]
    real = writer._prepare

    def late(*args: Any) -> Any:
        writer._prepare = real  # type: ignore[method-assign]
        even = claimed(tmp_path, 0, 2)
        put(even, 0, 1, "a1")
        return real(*args)

    writer._prepare = late  # type: ignore
    with pytest.raises(LakeFenced):
        put(alone, 0, 1, "a1", "a2")
    assert ids(tmp_path) == ["a0", "a1"]


@pytest.mark.slow
def test_a_claim_wins_against_a_writer_that_commits_all_the_while(tmp_path: Path) -> None:
    alone = claimed(tmp_path)
    begun, fenced, last = threading.Event(), threading.Event(), 0

    def busy() -> None:
        nonlocal last
        with pytest.raises(LakeFenced):
            while True:  # commits at the maximum rate, because the commits are empty
                for name in ("steps", "trajectories"):
                    alone.append(name, [], {("T", 0): last + 1}, never, commit_offsets=True)
                last += 1
                begun.set()
        fenced.set()

    writer = threading.Thread(target=busy, daemon=True)
    writer.start()
    assert begun.wait(300)
    even = claimed(tmp_path, 0, 2)
    assert fenced.wait(300)
    writer.join()
    assert even.committed_offsets("trajectories", [("T", 0)]) == {("T", 0): last}
    assert last > 0


@pytest.mark.slow
def test_a_window_holds_the_newest_of_its_own_share_however_many_others_lie_between(
    tmp_path: Path,
) -> None:
    alone = claimed(tmp_path, window=5)
    put(alone, 1, 0, *(f"own{i}" for i in range(9)))
    for i in range(40):
        put(alone, 0, 100 + 10 * i, *(f"other{i}.{j}" for j in range(10)))
    odd = claimed(tmp_path, 1, 2, window=5)
    # The window has the newest five ids; older ids are forgotten.
    assert put(odd, 1, 9, "own4", "own8", "own3", "new") == 2
    idle = claimed(tmp_path, 2, 3, window=5)
    # Each key belongs to one partition, so the writer ignores ids of other partitions.
    assert put(idle, 2, 0, "own8") == 1


@pytest.mark.slow
def test_marks_of_quiet_tables_of_all_writers_together_stay_within_a_quarter_of_the_window(
    tmp_path: Path,
) -> None:
    lake = claimed(tmp_path, 1, 2)
    lake.append(TABLE, [], {("T", 1): 7}, never, commit_offsets=True)
    assert not lake.commit_due(TABLE, {("T", 1): 19})
    assert lake.commit_due(TABLE, {("T", 1): 20})


@pytest.mark.slow
def test_columns_that_two_writers_add_are_there_once(tmp_path: Path) -> None:
    even, odd = claimed(tmp_path, 0, 2), claimed(tmp_path, 1, 2)
    put(odd, 1, 0, "b0")
    schema: dict[str, Any] = {
        "type": "record", "name": "Reward", "namespace": "clawstream",
        "fields": [{"name": "event_id", "type": "string"},
            {"name": "shade", "type": ["null", "string"], "default": None}],
    }  # fmt: skip
    wider = catalog()[TABLE].evolved(schema)
    assert wider.schema.names != catalog()[TABLE].schema.names
    assert even.add_columns(wider)
    assert put(odd, 1, 1, "b1") == 1  # fewer columns, on the older snapshot
    assert odd.add_columns(wider)
    assert odd.tables[TABLE] is wider
    assert (
        open_table(str(tmp_path), TABLE, {}).to_pyarrow_dataset().schema.names.count("shade") == 1
    )
    assert ids(tmp_path) == ["b0", "b1"]


@pytest.mark.slow
def test_writers_that_start_at_once_make_the_lake_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=first_rows, args=(tmp_path, writer)) for writer in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert ids(tmp_path) == [f"w{w}.{i}" for w in range(3) for i in range(5)]


def first_rows(path: Path, writer: int) -> None:
    lake = claimed(path, writer, 3)
    for i in range(5):
        put(lake, writer, i, f"w{writer}.{i}")
