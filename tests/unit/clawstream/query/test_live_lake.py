"""A lake that is being written: what a failed refresh leaves, and what a later one repairs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from support.admit import cand
from support.export_lake import turn
from support.small_lake import SmallLake

from clawstream.inspector.queries.lake import Copied
from clawstream.query.live_lake import ALL, READERS, WAIT_S, LiveLake
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import SqlError
from clawstream.stream_jobs.lake.delta.maintenance import SMALL_FILES, maintain
from clawstream.stream_jobs.lake.erasure import Erasure

CALLS = Copied("steps", "SELECT step_id FROM new_rows")
pytestmark = pytest.mark.slow


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def written(settings: Settings) -> SmallLake:
    lake = SmallLake(settings)
    lake.put("steps", "SS", turn("a", 0, [1], [2]))
    return lake


def ids(lake: LiveLake, table: str) -> list[str]:
    return [row["step_id"] for row in lake.rows(f"SELECT step_id FROM {table} ORDER BY 1")]


def test_rows_of_a_file_that_was_unreadable_for_a_moment_come_with_the_next_refresh(
    settings: Settings, written: SmallLake
) -> None:
    lake = LiveLake(settings, {"made": CALLS})
    assert lake.refresh() and not lake.refresh()
    known = set(Path(settings.lake_uri, "steps").rglob("*.parquet"))
    written.put("steps", "SS", turn("b", 0, [1], [2]))
    (new,) = set(Path(settings.lake_uri, "steps").rglob("*.parquet")) - known
    away = new.rename(new.with_suffix(".away"))
    assert not lake.refresh()
    assert list(lake.failed) == ["steps"]
    assert ids(lake, "made") == ids(lake, "steps_raw") == ["a~0.0"]
    away.rename(new)
    assert lake.refresh() and not lake.failed
    assert ids(lake, "made") == ids(lake, "steps_raw") == ["a~0.0", "b~0.0"]


def test_the_index_of_texts_follows_appends_merged_files_and_erasure(
    settings: Settings, written: SmallLake
) -> None:
    lake = LiveLake(settings, {})

    def found(search: str) -> tuple[set[str], float]:
        lake.refresh()
        lake.texts.catch_up()
        (table,), indexed = lake.find(search)
        return set(table.column("trajectory_key").to_pylist()), indexed

    assert found("2") == ({"a"}, 1.0)
    for number in range(SMALL_FILES):
        written.put("steps", "SS", *(turn(f"{k}{number}", 0, [1], [70 + number]) for k in "bc"))
    assert found("73") == ({"b3", "c3"}, 1.0)
    Erasure(settings, [("run", "b3")]).run()
    assert found("73") == ({"c3"}, 1.0)
    assert [done.made_files for done in maintain(settings, ["steps"])] == [1]
    assert found("73") == ({"c3"}, 1.0) and found("74") == ({"b4", "c4"}, 1.0)
    lake.close()


ENDLESS = "SELECT count(*) AS n FROM range(1000000000) a, range(1000000000) b WHERE a <> b"


def test_a_query_ends_at_the_time_limit_and_when_the_process_stops(settings: Settings) -> None:
    lake = LiveLake(settings, {}, query_s=0.05)
    with pytest.raises(SqlError, match=r"longer than 0\.05 s"):
        lake.rows(ENDLESS)
    assert lake.rows("SELECT 1 AS one") == [{"one": 1}]
    lake = LiveLake(settings, {})
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lake.rows, ENDLESS, is_long=True)
        while not running.done():
            lake.close()
        with pytest.raises(SqlError):
            running.result()
    with pytest.raises(SqlError, match="stopping"):
        lake.rows("SELECT 1 AS one")


def test_a_long_query_holds_up_neither_pages_nor_refreshes(
    settings: Settings, written: SmallLake
) -> None:
    lake = LiveLake(settings, {"made": CALLS}, query_s=60.0)
    with ThreadPoolExecutor(READERS) as pool:
        running = [pool.submit(lake.rows, ENDLESS) for _ in range(READERS - 1)]
        assert ids(lake, "made") == ["a~0.0"]
        written.put("steps", "SS", turn("b", 0, [1], [2]))
        assert lake.refresh()
        assert ids(lake, "made") == ids(lake, "steps_raw") == ["a~0.0", "b~0.0"]
        while not all(query.done() for query in running):
            lake.close()


def test_tables_appear_while_queries_run(settings: Settings, written: SmallLake) -> None:
    lake, done = LiveLake(settings, {"made": CALLS}), Event()

    def look() -> None:
        while not done.is_set():
            ids(lake, "made")

    with ThreadPoolExecutor(READERS) as pool:
        looking = [pool.submit(look) for _ in range(READERS)]
        for name, record in (("candidates", cand("a")), ("steps", turn("b", 0, [1], [2]))):
            written.put(name, "CC", record)
            lake.refresh()
        done.set()
        assert [query.result() for query in looking] == [None] * READERS
    assert ids(lake, "made") == ["a~0.0", "b~0.0"]


def test_a_change_that_a_query_has_found_is_told(settings: Settings, written: SmallLake) -> None:
    lake = LiveLake(settings, {"made": CALLS})
    assert ids(lake, "made") == ["a~0.0"]
    assert lake.refresh() and not lake.refresh()


def test_of_each_key_the_highest_value_stays_in_whatever_order_it_comes(
    settings: Settings, written: SmallLake
) -> None:
    newest = Copied(
        "candidates", "SELECT trajectory_id, revision FROM new_rows",
        (("trajectory_id",), "revision"),
    )  # fmt: skip
    lake = LiveLake(settings, {"made": newest})
    for name, revision in (("a", 1), ("b", 0), ("a", 0), ("b", 2), ("a", 1)):
        written.put("candidates", "CC", cand(name, revision=revision))
        lake.refresh()
    found = lake.rows("SELECT trajectory_id, revision FROM made ORDER BY 1")
    assert [tuple(row.values()) for row in found] == [("a", 1), ("b", 2)]


def test_a_lake_that_does_not_answer_is_named(settings: Settings) -> None:
    class Silent(LiveLake):
        def _newest(self, name: str) -> None:
            asked.set()
            assert answered.wait(60)

    asked, answered = Event(), Event()
    lake = Silent(settings, {})
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lake.refresh)
        assert asked.wait(60) and not lake.failed
        lake._looked_at -= WAIT_S
        assert "has not been read to its end" in lake.failed[ALL]
        answered.set()
        assert not running.result() and not lake.failed


def test_the_first_query_waits_for_the_lake_while_another_thread_reads_it(
    settings: Settings, written: SmallLake
) -> None:
    class Slow(LiveLake):
        def _newest(self, name: str) -> Any | None:
            asked.set()
            while not (self._refresher.is_alive() or ended.wait(0.01)):
                pass
            return super()._newest(name)

    asked, ended = Event(), Event()
    lake = Slow(settings, {})
    with ThreadPoolExecutor() as pool:
        pool.submit(lake.refresh)
        assert asked.wait(60)
        try:
            assert ids(lake, "steps_raw") == ["a~0.0"]
        finally:
            ended.set()


def test_a_new_column_changes_the_views_and_loses_no_row(
    settings: Settings, written: SmallLake
) -> None:
    lake = LiveLake(settings, {"made": CALLS})
    assert lake.refresh()
    more = pa.schema([pa.field("added", pa.string())])
    write_deltalake(
        f"{settings.lake_uri}/steps", more.empty_table(), mode="append", schema_mode="merge"
    )
    assert lake.refresh()
    assert ids(lake, "made") == ["a~0.0"]
    assert lake.rows("SELECT added FROM steps") == [{"added": None}]


def test_a_new_column_takes_no_row_of_another_table_that_cannot_be_read(
    settings: Settings, written: SmallLake
) -> None:
    written.put("candidates", "CC", cand("a"))
    lake = LiveLake(
        settings, {"closed": Copied("candidates", "SELECT trajectory_id FROM new_rows")}
    )
    assert lake.refresh()
    known = set(Path(settings.lake_uri, "candidates").rglob("*.parquet"))
    written.put("candidates", "CC", cand("b"))
    (new,) = set(Path(settings.lake_uri, "candidates").rglob("*.parquet")) - known
    away = new.rename(new.with_suffix(".away"))
    more = pa.schema([pa.field("added", pa.string())])
    write_deltalake(
        f"{settings.lake_uri}/steps", more.empty_table(), mode="append", schema_mode="merge"
    )

    def names(table: str) -> list[str]:
        found = lake.rows(f"SELECT trajectory_id FROM {table} ORDER BY 1")
        return [row["trajectory_id"] for row in found]

    assert lake.refresh() and list(lake.failed) == ["candidates"]
    assert names("closed") == names("candidates_raw") == ["a"]
    assert lake.rows("SELECT added FROM steps") == [{"added": None}]
    away.rename(new)
    assert lake.refresh() and not lake.failed
    assert names("closed") == names("candidates_raw") == ["a", "b"]
