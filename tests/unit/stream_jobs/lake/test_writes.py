"""The lake's writes to its tables, without Kafka.

The tests cover committed offsets, deduplication windows, leases, compaction and values that no
column can hold.
"""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from clawstream.query.column_comments import comment_of
from clawstream.runtime.kafka import Fenced
from clawstream.schemas import records
from clawstream.schemas.settings import LakeSettings, Settings
from clawstream.stream_jobs.errors import LakeDamaged
from clawstream.stream_jobs.lake.delta.maintenance import maintain
from clawstream.stream_jobs.lake.delta.table import create
from clawstream.stream_jobs.lake.fencing import SINGLE_WRITER
from clawstream.stream_jobs.lake.main import Lake, LakeFenced, LakeMissing, dataset, open_table
from clawstream.stream_jobs.lake.recent_rows import oldest_of_newest
from clawstream.stream_jobs.lake.table_writer import COMMIT_AFTER_OFFSETS, TableWriter
from clawstream.stream_jobs.lake.tables.catalog import catalog
from clawstream.stream_jobs.lake.tables.table import ConsumedRecord, Row

SOURCE = ("T", 0)


def rows(first: int, *ids: str, **changes: Any) -> list[Row]:
    def reward(event_id: str) -> records.Reward:
        values: dict[str, Any] = {
            "event_id": event_id, "run_id": "r", "trajectory_key": "k", "source": "rule",
            "name": "f", "function_version": "1",
            "reward_revision": 0, "created_at": 1,
        }  # fmt: skip
        return records.Reward(**values | changes)

    table = catalog()["rewards"]
    placed = [
        ConsumedRecord(*SOURCE, first + i, 5_000 + first + i, {}, reward(e))
        for i, e in enumerate(ids)
    ]
    return [row for p in placed for row in table.rows_of(p)]


def ids(path: Path) -> list[str]:
    found = dataset(open_table(str(path), "rewards", {}), {}).to_table(columns=["event_id"])
    return sorted(found.column("event_id").to_pylist())


def claimed(path: Path, window: int = 100, **more: Any) -> Lake:
    lake = Lake(str(path), {}, window, **more)
    lake.acquire()
    return lake


def never(row: Row, why: str) -> None:
    raise AssertionError((row, why))


@pytest.mark.slow
def test_a_restart_reads_the_window_of_a_table_with_nested_columns(tmp_path: Path) -> None:
    """The Delta client returns no file statistics for columns after a struct column."""
    lake, table = claimed(tmp_path), catalog()["steps"]
    step = records.Step(
        step_id="k~1.0", run_id="r", trajectory_key="k", call_id="k~1", choice_index=0,
        protocol="p", model="m", status="ok", streamed=False, request_json=b"{}",
        response_json=b"{}", gateway_id="g", received_at=1, finished_at=2,
        usage=records.Usage(prompt_tokens=3),
    )  # fmt: skip
    new = table.rows_of(ConsumedRecord(*SOURCE, 0, 5_000, {}, step))
    assert lake.append("steps", new, {SOURCE: 1}, never) == 1
    (row,) = dataset(open_table(str(tmp_path), "steps", {}), {}).to_table().to_pylist()
    assert (row["usage"]["prompt_tokens"], row["kafka_offset"]) == (3, 0)
    again = claimed(tmp_path)
    sent_again = table.rows_of(ConsumedRecord(*SOURCE, 1, 6_000, {}, step))
    assert again.append("steps", sent_again, {SOURCE: 2}, never) == 0, "its id is in the window"


@pytest.mark.slow
def test_rows_below_the_mark_are_removed_whatever_the_batch(tmp_path: Path) -> None:
    lake = claimed(tmp_path)
    assert lake.committed_offsets("rewards", [SOURCE, ("T", 1)]) == {}
    assert lake.append("rewards", rows(0, "a", "b", "c"), {SOURCE: 3}, never) == 3
    again = claimed(tmp_path)
    assert again.committed_offsets("rewards", [SOURCE, ("T", 1)]) == {SOURCE: 3}
    assert again.append("rewards", rows(1, "x", "y", "d", "e"), {SOURCE: 5}, never) == 2
    assert again.append("rewards", rows(0, "z"), {SOURCE: 5}, never) == 0
    assert ids(tmp_path) == ["a", "b", "c", "d", "e"]


@pytest.mark.slow
def test_the_newer_writer_wins_although_rows_of_the_first_table_are_unreadable(
    tmp_path: Path,
) -> None:
    """The lease of the first table holds for the others, whether or not its window can be read."""
    table = catalog()["steps"]
    row: list[Any] = [None] * len(table.columns)
    row[-4:] = ("T", 0, 7, 5_000)
    assert claimed(tmp_path).append("steps", [tuple(row)], {SOURCE: 8}, never) == 1
    for file in (tmp_path / "steps").rglob("*.parquet"):
        file.unlink()
    newer = Lake(str(tmp_path), {}, 100)

    class Older(Lake):
        def _set_damaged(self, name: str, error: LakeDamaged) -> None:
            super()._set_damaged(name, error)
            newer.acquire()

    with pytest.raises(LakeFenced):
        Older(str(tmp_path), {}, 100).acquire()
    assert newer.append("rewards", rows(0, "a"), {SOURCE: 1}, never) == 1


@pytest.mark.slow
def test_a_writer_starts_again_behind_rows_of_every_table(tmp_path: Path) -> None:
    """A writer finds the newest rows by file statistics.

    deltalake omits the statistics of columns after a struct column.
    """
    lake = claimed(tmp_path)
    for name, table in catalog().items():
        row: list[Any] = [None] * len(table.columns)
        place = {
            "kafka_topic_id": "T",
            "kafka_partition": 0,
            "kafka_offset": 7,
            "kafka_timestamp": 5_000,
        }
        for column, value in place.items():
            row[table.index[column]] = value
        assert lake.append(name, [tuple(row)], {SOURCE: 8}, never) == 1, name
    again = claimed(tmp_path)
    for name in catalog():
        files = pa.table(open_table(str(tmp_path), name, {}).get_add_actions(flatten=True))
        assert {"min.kafka_timestamp", "max.kafka_timestamp"} <= set(files.column_names), name
        assert again.committed_offsets(name, [SOURCE]) == {SOURCE: 8}


def in_other_words(schema: pa.Schema) -> pa.Schema:
    """Return the schema with other comments, also inside structs."""

    def field(f: pa.Field) -> pa.Field:
        return pa.field(f.name, kind(f.type), metadata={"comment": "In other words."})

    def kind(t: pa.DataType) -> pa.DataType:
        if pa.types.is_list(t):
            return pa.list_(kind(t.value_type))
        return pa.struct([field(f) for f in t]) if pa.types.is_struct(t) else t

    return pa.schema([field(f) for f in schema])


@pytest.mark.slow
def test_a_lake_of_a_release_with_other_comments_is_written(tmp_path: Path) -> None:
    """The lake keeps its comments; a missing column is added with the current comment."""
    for name, table in catalog().items():
        columns = [f for f in table.schema if f.name != "by"]
        create(
            str(tmp_path),
            name,
            in_other_words(pa.schema(columns)),
            table.stats,
            timedelta(days=2),
            {},
        )
    lake = claimed(tmp_path)
    for name, table in catalog().items():
        place = {
            "kafka_topic_id": "T",
            "kafka_partition": 0,
            "kafka_offset": 7,
            "kafka_timestamp": 5_000,
        }
        row = tuple(place.get(c.field.name) for c in table.columns)
        assert lake.append(name, [row], {SOURCE: 8}, never) == 1, name
    comments = {
        f.name: f.metadata["comment"]
        for f in open_table(str(tmp_path), "rewards", {}).schema().fields
    }
    assert comments["source"] == "In other words."
    assert comments["by"] == comment_of(catalog()["rewards"].schema.field("by"))


def of_source(table: str, topic: str, first: int, count: int) -> list[Row]:
    """Return rows of a topic for a table that identifies its rows by id or by offset alone."""

    def event(number: int) -> Any:
        if table == "rewards":
            return records.Reward(
                event_id=f"{topic}{number}", run_id="r", trajectory_key="k", source="rule",
                name="f", function_version="1", reward_revision=0, created_at=1,
            )  # fmt: skip
        return records.Late(
            run_id="r",
            channel="train",
            trajectory_id=f"{topic}{number}",
            revision=1,
            missed_batch_seq=0,
            input_to=0,
        )

    placed = [
        ConsumedRecord(topic, 0, n, 5_000 + n, {}, event(n)) for n in range(first, first + count)
    ]
    return [row for p in placed for row in catalog()[table].rows_of(p)]


@pytest.mark.slow
@pytest.mark.parametrize("table", ["rewards", "late_revisions"])
def test_marks_only_rise_when_reading_begins_below_them(tmp_path: Path, table: str) -> None:
    """Another table of the topic may need an earlier start.

    Rows that are read again stay below the committed offset, also when another source advances.
    """
    lake = claimed(tmp_path, window=5)
    assert lake.append(table, of_source(table, "A", 0, 100), {("A", 0): 100}, never) == 100
    again = claimed(tmp_path, window=5)
    sources = [("A", 0), ("B", 0)]
    assert again.committed_offsets(table, sources) == {("A", 0): 100}
    both = of_source(table, "A", 0, 50) + of_source(table, "B", 0, 3)
    assert again.append(table, both, {("A", 0): 50, ("B", 0): 3}, never) == 3
    assert not again.commit_due(table, {("A", 0): 50, ("B", 0): 3})
    assert (
        again.append(table, of_source(table, "A", 50, 49), {("A", 0): 99, ("B", 0): 3}, never) == 0
    )
    assert again.committed_offsets(table, sources) == {("A", 0): 100, ("B", 0): 3}
    assert (
        again.append(table, of_source(table, "A", 99, 3), {("A", 0): 102, ("B", 0): 3}, never) == 2
    )
    assert again.committed_offsets(table, sources) == {("A", 0): 102, ("B", 0): 3}
    assert dataset(open_table(str(tmp_path), table, {}), {}).count_rows() == 105


@pytest.mark.slow
def test_the_window_comes_back_with_the_newest_rows_only(tmp_path: Path) -> None:
    lake = claimed(tmp_path)
    for i in range(10):
        lake.append("rewards", rows(i, f"e{i}"), {SOURCE: i + 1}, never)
    again = claimed(tmp_path, window=3)
    assert again.append("rewards", rows(10, "e9", "e7", "e6", "e0"), {SOURCE: 14}, never) == 2
    files = pa.table(open_table(str(tmp_path), "rewards", {}).get_add_actions(flatten=True))
    assert oldest_of_newest(files, 3).as_py().microsecond == 9_000
    assert oldest_of_newest(files, 1000) is None
    assert oldest_of_newest(files.slice(0, 0), 3) is None
    assert oldest_of_newest(files.drop_columns(["min.kafka_timestamp"]), 3) is None


@pytest.mark.slow
def test_marks_of_quiet_tables_stay_within_a_quarter_of_the_window(tmp_path: Path) -> None:
    """The bound is for all sources together.

    A committed offset that is half a window behind would be too late for redelivered records.
    """
    lake = claimed(tmp_path, window=100)
    lake.append("rewards", [], {SOURCE: 7, ("T", 1): 7}, never, commit_offsets=True)
    assert not lake.commit_due("rewards", {SOURCE: 20, ("T", 1): 19})
    assert lake.commit_due("rewards", {SOURCE: 20, ("T", 1): 20})


@pytest.mark.slow
def test_marks_of_tables_without_rows_follow_by_empty_commits(tmp_path: Path) -> None:
    lake = claimed(tmp_path, window=200_000)
    assert lake.append("rewards", [], {SOURCE: 7}, never) == 0
    assert lake.committed_offsets("rewards", [SOURCE]) == {}
    assert lake.commit_due("rewards", {SOURCE: 7})  # the first commit is due at once
    assert not lake.commit_due("rewards", {SOURCE: 0})
    assert lake.append("rewards", [], {SOURCE: 7}, never, commit_offsets=True) == 0
    assert lake.committed_offsets("rewards", [SOURCE]) == {SOURCE: 7}
    assert not lake.commit_due("rewards", {SOURCE: 6 + COMMIT_AFTER_OFFSETS})
    assert lake.commit_due("rewards", {SOURCE: 7 + COMMIT_AFTER_OFFSETS})
    version = open_table(str(tmp_path), "rewards", {}).version()
    lake.append("rewards", [], {SOURCE: 7}, never, commit_offsets=True)
    assert open_table(str(tmp_path), "rewards", {}).version() == version


@pytest.mark.slow
def test_a_newer_claim_fences_the_older_writer(tmp_path: Path) -> None:
    older = claimed(tmp_path)
    newer = claimed(tmp_path)
    with pytest.raises(LakeFenced, match="took over from 1") as caught:
        older.append("rewards", rows(0, "a"), {SOURCE: 1}, never)
    assert isinstance(caught.value, Fenced)
    assert newer.append("rewards", rows(0, "a"), {SOURCE: 1}, never) == 1
    steps, rewards = (
        TableWriter(str(tmp_path), {}, catalog()[name], 100, SINGLE_WRITER)
        for name in ("steps", "rewards")
    )
    lease = steps.acquire(None, lambda app: None)
    newest = claimed(tmp_path)
    with pytest.raises(LakeFenced, match="while it was starting"):
        rewards.acquire(lease, lambda app: None)
    assert newest.append("rewards", rows(1, "b"), {SOURCE: 2}, never) == 1


@pytest.mark.slow
def test_a_value_that_no_column_can_hold_is_dead_lettered_alone(tmp_path: Path) -> None:
    lake = claimed(tmp_path)
    dead_lettered: list[tuple[int, str]] = []
    bad = rows(1, "bad", created_at=2**70)
    added = lake.append(
        "rewards",
        [*rows(0, "a"), *bad, *rows(2, "c")],
        {SOURCE: 3},
        lambda row, why: dead_lettered.append((row[-2], why)),
    )
    assert (added, ids(tmp_path)) == (2, ["a", "c"])
    assert len(dead_lettered) == 1
    assert dead_lettered[0][0] == 1
    assert "table rewards: OverflowError" in dead_lettered[0][1]
    assert lake.append("rewards", bad, {SOURCE: 3}, never) == 0


@pytest.mark.slow
def test_care_keeps_rows_marks_and_columns_of_both_ages(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, lake=LakeSettings(uri=str(tmp_path)))
    old = pa.table({"event_id": ["old"], "run_id": ["r"], "kafka_topic_id": ["T"]})
    write_deltalake(str(tmp_path / "rewards"), old)
    lake = claimed(tmp_path)
    for i in range(12):
        lake.append("rewards", rows(i, f"e{i:02}"), {SOURCE: i + 1}, never)
        if i == 9:
            (done,) = [d for d in maintain(settings) if any(d[1:])]
            assert (done.table, done.merged_files, done.made_files, done.deferred) == (
                "rewards",
                11,
                1,
                None,
            )
    assert len(open_table(str(tmp_path), "rewards", {}).file_uris()) == 3
    assert ids(tmp_path) == [*(f"e{i:02}" for i in range(12)), "old"]
    again = claimed(tmp_path)
    assert again.committed_offsets("rewards", [SOURCE]) == {SOURCE: 12}
    assert again.append("rewards", rows(12, "e03", "new", "old"), {SOURCE: 15}, never) == 1


@pytest.mark.slow
def test_what_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(LakeMissing, match="no table steps at /"):
        open_table(str(tmp_path), "steps", {})
    claimed(tmp_path)
    with pytest.raises(LakeMissing, match="has no version 7"):
        open_table(str(tmp_path), "steps", {}, 7)


@pytest.mark.slow
def test_a_commit_that_landed_with_an_error_behind_it_is_known_when_its_rows_are_sent_again(
    tmp_path: Path,
) -> None:
    """A full disk allows the commit and fails the checkpoint after it.

    The deduplication window must contain the committed rows.
    """
    lake = claimed(tmp_path)
    for version in range(2, 45):
        (tmp_path / "rewards" / "_delta_log" / f"{version:020d}.checkpoint.parquet").mkdir()
    landed = None
    for i in range(45):
        try:
            lake.append("rewards", rows(i, f"e{i}"), {SOURCE: i + 1}, never)
        except Exception:  # noqa: BLE001 - any error of the Delta library
            landed = i
            break
    assert landed is not None and f"e{landed}" in ids(tmp_path)
    for version in range(2, 45):
        (tmp_path / "rewards" / "_delta_log" / f"{version:020d}.checkpoint.parquet").rmdir()
    assert lake.append("rewards", rows(landed, f"e{landed}"), {SOURCE: landed + 1}, never) == 0
    assert (
        lake.append("rewards", rows(landed + 1, f"e{landed}", "new"), {SOURCE: landed + 3}, never)
        == 1
    )
    assert len(ids(tmp_path)) == len(set(ids(tmp_path))) == landed + 2


@pytest.mark.slow
def test_a_table_that_was_deleted_is_made_anew_and_its_writer_goes_on(tmp_path: Path) -> None:
    """The leases of the other tables count, whose epochs are higher than that of a new table."""
    former = [claimed(tmp_path) for _ in range(2)][-1]
    shutil.rmtree(tmp_path / "steps")
    lake = claimed(tmp_path)
    assert lake.append("rewards", rows(0, "a"), {SOURCE: 1}, never) == 1
    with pytest.raises(LakeFenced):
        former.append("rewards", rows(1, "b"), {SOURCE: 2}, never)
