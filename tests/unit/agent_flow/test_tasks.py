"""Tasks from files, their ids, and their division among processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.agent_flow.errors import FlowError
from clawstream.agent_flow.tasks import id_text, metadata_of, numbered, tasks_of_file
from clawstream.schemas.ids import check_group_id

TASKS = [{"id": "a", "question": "1+1?", "answer": 2}, {"id": "b", "question": "2+2?", "answer": 4}]


def test_each_kind_of_file_gives_the_same_tasks(tmp_path: Path) -> None:
    lines, parquet, dataset = tmp_path / "t.jsonl", tmp_path / "t.parquet", tmp_path / "dataset"
    lines.write_text("\n".join(map(json.dumps, TASKS)) + "\n\n")
    table = pa.Table.from_pylist(TASKS)
    pa.parquet.write_table(table, parquet)
    dataset.mkdir()
    with pa.ipc.new_stream(dataset / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    for path in (lines, parquet, dataset):
        assert list(tasks_of_file(path)) == TASKS


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("t.jsonl", "{}\n[1]", "t.jsonl, line 2: not a JSON object"),
        ("t.jsonl", "{", "t.jsonl, line 1: not JSON"),
        ("t.csv", "a", "must be"),
        ("none.jsonl", None, "no such file"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, content: str | None, error: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(FlowError, match=error):
        list(tasks_of_file(tmp_path / name))


@given(st.lists(st.integers()), st.integers(1, 5), st.integers(0, 9))
def test_processes_share_all_tasks_once(numbers: list[int], processes: int, limit: int) -> None:
    tasks = [{"number": n} for n in numbers]
    shared = [found for i in range(processes) for found in numbered(tasks, (i, processes), limit)]
    assert sorted(int(name) for name, _ in shared) == list(range(min(limit, len(tasks))))


@given(st.one_of(st.text(), st.integers()))
def test_every_id_is_a_group_id(value: str | int) -> None:
    name = id_text(value)
    assert check_group_id(f"flow-{name}") and re.fullmatch(r"[A-Za-z0-9._:@=+-]{1,140}", name)


@given(st.text(), st.text())
def test_different_ids_stay_different(one: str, other: str) -> None:
    assert (id_text(one) == id_text(other)) == (one == other)


def test_task_that_is_not_json_is_refused() -> None:
    assert metadata_of({"id": 1, "gold": [1, 2]}) == {"id": 1, "gold": [1, 2]}
    for value in (object(), float("nan")):
        with pytest.raises(FlowError, match="task 'x': not JSON"):
            metadata_of({"id": "x", "value": value})


def test_the_order_is_that_of_its_seed() -> None:
    tasks = [{"number": n} for n in range(50)]
    first, again = (list(numbered(tasks, shuffle="7/0")) for _ in range(2))
    assert first == again and first != list(numbered(tasks))
    assert sorted(name for name, _ in first) == sorted(name for name, _ in numbered(tasks))
    assert first != list(numbered(tasks, shuffle="7/1")) != list(numbered(tasks, shuffle="8/0"))
    assert list(numbered(tasks, shuffle="7/0", skip=20)) == first[20:]
    shared = [found for i in range(3) for found in numbered(tasks, (i, 3), 40, "7/0", 10)]
    assert sorted(name for name, _ in shared) == sorted(
        name for name, _ in list(numbered(tasks[:40], shuffle="7/0"))[10:]
    )


def test_ids_differ_and_do_not_depend_on_the_order() -> None:
    tasks = [{"id": name, "n": n} for n, name in enumerate(["a", "b", "a", "a.1", "a", "b"])]
    names = {name: task["n"] for name, task in numbered(tasks)}
    assert list(names) == ["a", "b", "a.1", "a.1.1", "a.2", "b.1"]
    assert {name: task["n"] for name, task in numbered(tasks, shuffle="3")} == names
