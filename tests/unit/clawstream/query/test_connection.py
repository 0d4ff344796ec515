"""The SQL views over a small lake on disk."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.small_lake import SmallLake
from typer.testing import CliRunner

from clawstream.cli.main import app
from clawstream.query.connection import connect
from clawstream.query.sandbox import run_sql, write_sql
from clawstream.schemas import records
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.stream_jobs.errors import SqlError
from clawstream.stream_jobs.lake.delta.snapshots import take_snapshot
from clawstream.stream_jobs.lake.delta.table import commit, create, open_table
from clawstream.stream_jobs.lake.main import LakeFenced, LakeMissing
from clawstream.stream_jobs.lake.tables.catalog import catalog


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path)


@pytest.fixture
def lake(settings: Settings) -> SmallLake:
    return SmallLake(settings)


def reward(value: float | None, **changes: Any) -> records.RewardValue:
    return records.RewardValue(
        **{
            "source": "rule",
            "name": "f",
            "function_version": "1",
            "value": value,
            "reward_revision": 0,
        }
        | changes
    )


def candidate(
    key: str, revision: int, sync: int | None, *rewards: records.RewardValue
) -> records.Candidate:
    return records.Candidate(
        run_id="r", channel="train", trajectory_key=key, trajectory_id=key, group_id="g",
        revision=revision, outcome="completed", opened_at=1_000, closed_at=2_000, rewards=rewards,
        steps=(
            records.CandidateStep(
                step_id=f"{key}~1.0", index=0, response_tokens=2, trainable=True
            ),
        ),
        prompt_tokens=3, trainable_tokens=2, oldest_sync_index=sync, trainable=True,
    )  # fmt: skip


def trajectory(key: str, version: str, part: int = 0, parts: int = 1) -> records.Trajectory:
    step = records.TrajectoryStep(
        step_id=f"{key}~{part + 1}.0", index=part, status="ok", drift="root", prompt_tokens=3,
        response_tokens=2, response_json=b"{}", oldest_version=version, newest_version=version,
        trainable=True, marks=("retried",), offset=0,
    )  # fmt: skip
    return records.Trajectory(
        run_id="r", trajectory_key=key, trajectory_id=key, group_id="g", channel="train",
        outcome="completed", opened_at=1_000, closed_at=2_000, metadata_json=b'{"gold": 1}',
        part=part, parts=parts, segments=(), steps=(step,),
    )  # fmt: skip


@pytest.mark.slow
def test_rewards_by_sync_index(settings: Settings, lake: SmallLake) -> None:
    lake.put("trajectories", "TT", trajectory("a", "r/1.2"), trajectory("b", "r/1.2"),
             trajectory("c", "r/2.2"),
             trajectory("d", "r/11.1", 0, 2), trajectory("d", "r/3.9", 1, 2))  # fmt: skip
    lake.put(
        "candidates", "CC", candidate("a", 0, 1),
        candidate("b", 0, 1, reward(1.0), reward(9.0, step_id="b~1.0")),
        candidate("c", 0, 2, reward(0.25), reward(0.5, source="env")),
        candidate("c", 2, 2, reward(None), reward(0.5, source="env")),
        candidate("c", 1, 2, reward(7.0)), candidate("a", 1, 1, reward(0.5)), candidate("d", 0, 3),
        candidate("e", 0, None),
    )  # fmt: skip
    query = (
        "select oldest_sync_index, avg(reward) from trajectories group by 1 order by 1 nulls last"
    )
    assert connect(settings).execute(query).fetchall() == [
        (1, 0.75),
        (2, 0.5),
        (3, None),
        (None, None),
    ]
    columns = (
        "trajectory_id, weight_version, revision, steps, trainable_tokens, len(step_details), "
        "closed_at::varchar"
    )
    assert connect(settings).execute(
        f"select {columns} from trajectories order by 1"
    ).fetchall() == [
        ("a", "r/1.2", 1, 1, 2, 1, "1970-01-01 00:00:02"),
        ("b", "r/1.2", 0, 1, 2, 1, "1970-01-01 00:00:02"),
        ("c", "r/2.2", 2, 1, 2, 1, "1970-01-01 00:00:02"),
        ("d", "r/3.9", 0, 1, 2, 2, "1970-01-01 00:00:02"),
        ("e", None, 0, 1, 2, None, "1970-01-01 00:00:02"),
    ]
    assert run_sql(settings, query).splitlines() == [
        "oldest_sync_index  avg(reward)",
        "-----------------  -----------",
        "                1         0.75",
        "                2          0.5",
        "                3",
        "",
        "(4 rows)",
    ]
    assert json.loads(run_sql(settings, f"{query} limit 1", "json")) == [
        {"oldest_sync_index": 1, "avg(reward)": 0.75}
    ]
    assert run_sql(settings, f"{query} limit 1", "csv") == "oldest_sync_index,avg(reward)\n1,0.75"


@pytest.mark.slow
def test_duckdb_shows_what_each_column_means(settings: Settings, lake: SmallLake) -> None:
    query = "select table_name, column_name, comment from duckdb_columns() where not internal"
    said = json.loads(run_sql(settings, query, "json"))
    comments = {(row["table_name"], row["column_name"]): row["comment"] for row in said}
    assert (
        comments["steps_raw", "version_first"]
        == "Engine's label when the call began; used when there are no spans."
    )
    assert comments["steps", "version_first"] == comments["steps_raw", "version_first"]
    assert comments["trajectories", "steps"] == "Number of steps."
    assert comments["trajectories_raw", "steps"] == "Steps by index."
    assert comments["lineage_steps", "trained"] == "True: its tokens were trained."
    assert [column for column, comment in comments.items() if not comment] == []


@pytest.mark.slow
def test_a_damaged_table_leaves_the_comments(settings: Settings, lake: SmallLake) -> None:
    (settings.data_dir / "lake" / "rewards" / "_delta_log" / f"{0:020}.json").write_text("{")
    query = (
        "select comment from duckdb_columns() where table_name = 'trajectories' and "
        "column_name = 'steps'"
    )
    assert json.loads(run_sql(settings, query, "json")) == [{"comment": "Number of steps."}]


@pytest.mark.slow
def test_steps_carry_their_marks_once(settings: Settings, lake: SmallLake) -> None:
    steps = [
        records.Step(
            step_id=s, run_id="r", trajectory_key="a", call_id="a~1", choice_index=0, protocol="p",
            model="m", status="ok", streamed=False, request_json=b'{"x": 1}', response_json=b"{}",
            prompt_token_ids=pack_ids([1, 2, 3]), response_token_ids=pack_ids([4, 5]),
            response_logprobs=pack_logprobs([-0.5, -0.25]), gateway_id="g",
            received_at=1, finished_at=2,
        )
        for s in ("a~1.0", "a~9.0")
    ]  # fmt: skip
    lake.put("steps", "SS", *steps)
    lake.put("trajectories", "TT", trajectory("a", "r/1.2"))
    # The same trajectory, replayed into a recreated topic.
    lake.put("trajectories", "T2", trajectory("a", "r/1.2"))
    marks = [
        records.StepMark(event_id=str(i), run_id="r", trajectory_key="a", trajectory_id="a",
            step_id="a~9.0", mark="late", offset=9)
        for i in range(2)
    ]  # fmt: skip
    lake.put("step_marks", "MM", *marks)
    query = (
        "select step_id, trajectory_id, step_index, marks, list_sum(response_logprobs), "
        "len(prompt_token_ids) from steps order by 1"
    )
    assert connect(settings).execute(query).fetchall() == [
        ("a~1.0", "a", 0, ["retried"], -0.75, 3),
        ("a~9.0", "a", None, ["late"], -0.75, 3),
    ]
    assert connect(settings).execute("select request_json->>'x' from steps_raw").fetchall() == [
        ("1",),
        ("1",),
    ]


@pytest.mark.slow
def test_the_reward_that_counts(settings: Settings, lake: SmallLake) -> None:
    def of(event_id: str, value: float, revision: int, **more: Any) -> records.Reward:
        return records.Reward(
            event_id=event_id, run_id="r", trajectory_key="k", source="human", name="n",
            function_version="1", value=value, reward_revision=revision, created_at=1, **more,
        )  # fmt: skip

    sent = [
        of("a", 1.0, 0),
        of("b", 2.0, 3),
        of("c", 3.0, 3),
        of("d", 4.0, 1),
        of("e", 5.0, 0, step_id="k~1.0"),
    ]
    assert lake.put("rewards", "RR", *sent) == 5
    rows = (
        connect(settings)
        .execute("select value, step_id, trajectory_id from rewards order by 1")
        .fetchall()
    )
    assert rows == [(2.0, None, "k"), (5.0, "k~1.0", "k")]
    assert connect(settings).execute("select count(*) from rewards_raw").fetchall() == [(5,)]


@pytest.mark.slow
@pytest.mark.parametrize("key", ["anonymous-" + "0" * 32, "agent-codex-" + "0" * 32])
def test_what_names_a_step_where_the_gateway_made_the_key_has_the_trajectory_of_the_step(
    settings: Settings, lake: SmallLake, key: str
) -> None:
    def of(event_id: str, value: float, n: int | None, **more: Any) -> records.Reward:
        return records.Reward(
            event_id=event_id, run_id="r", trajectory_key=key, source="human", name="n",
            function_version="1", value=value, created_at=1,
            **{"reward_revision": 0, "step_id": f"{key}~{n}.0" if n is not None else None} | more,
        )  # fmt: skip

    sent = [
        of("a", 1.0, 1),
        of("b", 2.0, 1, trajectory_id=key),
        of("c", 3.0, 2, trajectory_id=key, reward_revision=1),
    ]
    sent += [
        of("d", 4.0, None, trajectory_id=f"{key}~1"),
        of("e", 5.0, 9),
        of("f", 6.0, 8, trajectory_id=key),
        of("g", 7.0, 7),
    ]
    lake.put("rewards", "RR", *sent)
    mark = records.Curation(
        event_id="m",
        run_id="r",
        trajectory_key=key,
        step_id=f"{key}~2.0",
        quality=1.0,
        by="me",
        created_at=1,
    )
    lake.put("curation", "RR2", mark)
    query = (
        "select value, split_part(step_id, '~', 2), split_part(trajectory_id, '~', 2) from "
        "rewards order by 1"
    )
    unknown = [
        (v, f"{n}.0", None) for v, n in ((1.0, 1), (2.0, 1), (3.0, 2), (5.0, 9), (6.0, 8), (7.0, 7))
    ]
    of_marks = "select split_part(trajectory_id, '~', 2), quality from curation"
    assert connect(settings).execute(query).fetchall() == sorted([*unknown, (4.0, None, "1")])
    assert connect(settings).execute(of_marks).fetchall() == [(None, 1.0)]

    whole = trajectory(key, "r/1.2", 0, 2), trajectory(key, "r/1.2", 1, 2)
    lake.put("trajectories", "TT", *(replace(part, trajectory_id=f"{key}~1") for part in whole))
    late = records.StepMark(
        event_id="l",
        run_id="r",
        trajectory_key=key,
        trajectory_id=f"{key}~5",
        step_id=f"{key}~7.0",
        mark="late",
        offset=9,
    )
    lake.put("step_marks", "MM", late)
    assert connect(settings).execute(query).fetchall() == [
        (1.0, "1.0", "1"), (3.0, None, "1"), (5.0, "9.0", None), (6.0, "8.0", None),
        (7.0, "7.0", "5"),
    ]  # fmt: skip
    assert connect(settings).execute(of_marks).fetchall() == [("1", 1.0)]


@pytest.mark.slow
def test_time_travel(settings: Settings, lake: SmallLake) -> None:
    lake.put("candidates", "CC", candidate("a", 0, 1, reward(0.0)))
    lake.put("candidates", "CC", candidate("a", 1, 1, reward(1.0)))
    for version, expected in ((2, [(0.0,)]), (3, [(1.0,)])):
        assert (
            connect(settings, {"candidates": version})
            .execute("select reward from trajectories")
            .fetchall()
            == expected
        )
    with pytest.raises(LakeMissing, match="has no version 99"):
        connect(settings, {"candidates": 99})
    with pytest.raises(LakeMissing, match="no table nope; there are steps, "):
        connect(settings, {"nope": 1})


@pytest.mark.slow
def test_the_command_reads_the_state_that_its_option_names(
    settings: Settings, lake: SmallLake
) -> None:
    lake.put("candidates", "CC", candidate("a", 0, 1, reward(0.0)))
    take_snapshot(settings, "before")
    lake.put("candidates", "CC", candidate("a", 1, 1, reward(1.0)))
    command = ["sql", "select reward from trajectories", f"data_dir={settings.data_dir}"]
    for options, answer in (([], "1.0"), (["--as-of", "before"], "0.0")):
        done = CliRunner().invoke(app, [*command, "--format", "csv", *options])
        assert (done.exit_code, done.stdout) == (0, f"reward\n{answer}\n")


@pytest.mark.slow
@pytest.mark.parametrize("table", list(catalog()))
def test_every_table_answers(settings: Settings, lake: SmallLake, table: str) -> None:
    assert connect(settings).execute(f"select count(*) from {table}").fetchall() == [(0,)]
    assert connect(settings).execute(f"select * from {table}_raw").fetchall() == []


@pytest.mark.slow
def test_a_wrong_query_is_told_in_the_words_of_duckdb(settings: Settings, lake: SmallLake) -> None:
    with pytest.raises(SqlError, match="Table with name nope does not exist"):
        run_sql(settings, "select * from nope")


@pytest.mark.slow
def test_nested_values_are_json_in_every_text_format(settings: Settings, lake: SmallLake) -> None:
    query = (
        "select {'a': 1, 'b': [1.5::double, null]} s, map {'x': [1]} m, [date '2020-01-02'] d, "
        "sum(2) n, 'y'::blob b"
    )
    nested = """{"a": 1, "b": [1.5, null]}""", """{"x": [1]}""", """["2020-01-02"]"""
    assert json.loads(run_sql(settings, query, "json")) == [
        {"s": {"a": 1, "b": [1.5, None]}, "m": {"x": [1]}, "d": ["2020-01-02"], "n": 2, "b": "79"}
    ]
    assert list(csv.reader(run_sql(settings, query, "csv").splitlines())) == [
        ["s", "m", "d", "n", "b"],
        [*nested, "2", "79"],
    ]
    assert [cell.strip() for cell in re.split("  +", run_sql(settings, query).splitlines()[2])] == [
        *nested,
        "2",
        "79",
    ]


@pytest.mark.slow
def test_parquet_has_the_types(settings: Settings, lake: SmallLake) -> None:
    out = io.BytesIO()
    write_sql(
        settings,
        "select range as a, [range::double] as b, timestamp '2020-01-01' as t from range(5000)",
        out,
        "parquet",
    )
    found = pq.read_table(io.BytesIO(out.getvalue()))
    assert [str(f.type) for f in found.schema] == [
        "int64",
        "list<element: double>",
        "timestamp[us]",
    ]
    assert (found.num_rows, found.column("b")[4999].as_py()) == (5000, [4999.0])


@pytest.mark.slow
def test_an_older_lake_lacks_a_table(settings: Settings, lake: SmallLake) -> None:
    (settings.data_dir / "lake" / "weights").rename(settings.data_dir / "aside")
    assert connect(settings).execute("select count(*) from weights").fetchall() == [(0,)]


@pytest.mark.slow
def test_an_older_lake_lacks_a_field_inside_a_struct(settings: Settings, lake: SmallLake) -> None:
    now = catalog()["trajectories"].schema
    items = now.field("steps").type.value_type
    older = pa.struct([f for f in items if f.name != "drift"])
    schema = now.set(now.get_field_index("steps"), now.field("steps").with_type(pa.list_(older)))
    shutil.rmtree(settings.data_dir / "lake" / "trajectories")
    create(settings.lake_uri, "trajectories", schema, (), timedelta(days=1), {})
    row = {"run_id": "r", "steps": [{"step_id": "a~1.0", "index": 0}]}
    commit(
        open_table(settings.lake_uri, "trajectories", {}),
        pa.Table.from_pylist([row], schema=schema),
        {},
    )
    query = "select s.step_id, s.drift from (select unnest(steps) as s from trajectories_raw)"
    assert connect(settings).execute(query).fetchall() == [("a~1.0", None)]


@pytest.mark.slow
def test_rows_come_once_and_the_newer_writer_goes_on(settings: Settings, lake: SmallLake) -> None:
    assert (
        lake.put(
            "candidates", "CC", candidate("a", 0, 1), candidate("a", 0, 1), candidate("a", 1, 1)
        )
        == 2
    )
    assert lake.put("candidates", "CC", candidate("a", 1, 1)) == 0
    newer = SmallLake(settings)
    assert (
        newer.put(
            "candidates", "CC", candidate("b", 0, 1), candidate("b", 0, 1), candidate("c", 0, 1)
        )
        == 0
    )
    # The new writer's offsets were below the committed offset of the older writer. Above the
    # committed offset, the deduplication window read from the table contains the ids.
    assert newer.put("candidates", "CC", candidate("a", 0, 1), candidate("b", 0, 1)) == 1
    with pytest.raises(LakeFenced, match="another writer took over from 1"):
        lake.put("candidates", "CC", *(candidate(str(i), 0, 1) for i in range(9)))
    assert connect(settings).execute("select count(*) from candidates").fetchall() == [(3,)]
