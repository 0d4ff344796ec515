"""A lake that is being written: what a failed refresh leaves, and what a later one repairs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.export_lake import turn
from support.small_lake import SmallLake

from clawstream.query.live_lake import Copy, LiveLake
from schemas.settings import Settings
from stream_jobs.errors import SqlError
from stream_jobs.lake.delta.maintenance import SMALL_FILES, maintain
from stream_jobs.lake.erasure import Erasure

CALLS = Copy("steps", "SELECT step_id FROM new_rows")
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


def test_a_query_ends_at_the_time_limit_and_when_the_process_stops(settings: Settings) -> None:
    limited = settings.lake.model_copy(update={"sql_timeout_s": 0.05})
    lake = LiveLake(settings.model_copy(update={"lake": limited}), {})
    endless = "SELECT count(*) AS n FROM range(1000000000) a, range(1000000000) b WHERE a <> b"
    with pytest.raises(SqlError, match=r"longer than lake\.sql_timeout_s"):
        lake.rows(endless)
    assert lake.rows("SELECT 1 AS one") == [{"one": 1}]
    lake = LiveLake(settings, {})
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lake.rows, endless)
        while not running.done():
            lake.close()
        with pytest.raises(SqlError):
            running.result()
    with pytest.raises(SqlError, match="stopping"):
        lake.rows("SELECT 1 AS one")
