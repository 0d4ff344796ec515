"""Exports of a small lake: rows, provenance, and the files of each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pyarrow.parquet as pq
import pytest
from support.export_lake import TOOLS, ExportLake, export_lake, turn
from support.small_lake import SmallLake
from typer.testing import CliRunner

from clawstream.cli.lake.export import FormatName
from clawstream.cli.main import app
from clawstream.export.errors import ExportError
from clawstream.export.export import export
from clawstream.export.formats.registry import FORMATS
from clawstream.export.selection import Selection, chunks
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.errors import SqlError
from clawstream.stream_jobs.lake.delta.snapshots import take_snapshot
from clawstream.trainer.data.sequences import sequences_of

pytestmark = pytest.mark.slow  # each export reads a lake


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(data_dir=tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def lake(settings: Settings) -> ExportLake:
    """A lake that no test writes to."""
    return export_lake(settings)


def rows_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path / "data.parquet").to_pylist()
    return found


def test_jsonl_has_one_conversation_per_branch(
    lake: ExportLake, settings: Settings, tmp_path: Path
) -> None:
    export(settings, "jsonl", tmp_path / "out", where="reward is not null")
    text = (tmp_path / "out" / "data.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["step_id"] for line in lines] == ["g-0~1.0", "g-1~1.0", "g-1~2.0"]
    first = lines[0]
    assert [m["content"] for m in first["messages"]] == ["1", "2", "3", "4", "5", "[6]"]
    assert first["messages"][-1]["role"] == "assistant"
    assert first["tools"] == TOOLS
    assert (first["reward"], first["metadata"], first["tags"]) == (1.0, {"gold": "7"}, ["good"])


def test_parquet_rows_are_the_training_sequences_of_the_trainer(
    lake: ExportLake, settings: Settings, tmp_path: Path
) -> None:
    export(settings, "parquet", tmp_path / "out", where="reward is not null")
    rows = rows_of(tmp_path / "out")
    assert [(r["step_id"], r["token_ids"], r["loss_mask"]) for r in rows] == [
        ("g-0~1.0", [1, 2, 3, 4, 5, 6], [False, False, True, True, False, True]),
        ("g-1~1.0", [1, 2, 7, 5, 8, 9], [False, False, True, False, True, True]),
    ]
    assert rows[0]["logprobs"] == [None, None, -0.375, -0.5, None, -0.75]
    assert rows[0]["temperatures"] == [None, None, 0.5, 0.5, None, 0.5]
    assert rows[0]["weight_versions"] == [
        {"version": "run/1.0", "start": 2, "end": 4},
        {"version": "run/1.0", "start": 5, "end": 6},
    ]
    assert (rows[0]["group_reward_mean"], rows[0]["group_reward_std"]) == (0.5, 0.5)
    assert json.loads(rows[0]["messages_json"])[-1]["content"] == "[6]"
    for key, untrainable in (("g-0", ()), ("g-1", ("g-1~2.0",))):
        expected = sequences_of(lake.trajectories[key], untrainable)
        for sequence, row in zip(
            expected, [r for r in rows if r["trajectory_id"] == key], strict=True
        ):
            assert sequence.tokens.ids.tolist() == row["token_ids"]
            assert sequence.tokens.mask.tolist() == row["loss_mask"]


def test_group_statistics_do_not_depend_on_the_condition(
    lake: ExportLake, settings: Settings, tmp_path: Path
) -> None:
    export(settings, "parquet", tmp_path / "out", where="reward > group_reward_mean")
    (row,) = rows_of(tmp_path / "out")
    assert (row["trajectory_id"], row["group_reward_mean"], row["group_rewards"]) == ("g-0", 0.5, 2)


@pytest.mark.slow
def test_a_replaced_trajectory_is_no_member_of_its_group(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = export_lake(settings)
    lake.put("g-2", [turn("g-2", 0, [1], [2])], 1.0, "g", outcome="replaced")
    export(settings, "parquet", tmp_path / "out", where="group_id = 'g'")
    found = {(row["group_reward_mean"], row["group_rewards"]) for row in rows_of(tmp_path / "out")}
    assert found == {(0.5, 2)}


@pytest.mark.slow
def test_provenance_pins_the_tables_and_counts_what_was_skipped(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = export_lake(settings)
    versions = take_snapshot(settings)["versions"]
    provenance, counts = export(settings, "parquet", tmp_path / "one")
    assert provenance.versions == versions
    assert (counts.trajectories, counts.rows, counts.tokens, counts.trained_tokens) == (4, 3, 15, 8)
    assert counts.skipped == {"no token to train": 1}
    sidecar = json.loads((tmp_path / "one" / "provenance.json").read_text())
    assert sidecar["counts"]["skipped"] == {"no token to train": 1}
    assert [file["name"] for file in sidecar["files"]] == ["data.parquet"]
    inside = pq.read_metadata(tmp_path / "one" / "data.parquet").metadata[b"clawstream.provenance"]
    assert json.loads(inside)["versions"] == versions
    # Rows that came later are not in an export of the same versions.
    lake.put("g-2", [turn("g-2", 0, [1], [2])], 5.0, "g")
    export(settings, "parquet", tmp_path / "two", at=sidecar["at"])
    assert rows_of(tmp_path / "two") == rows_of(tmp_path / "one")
    export(settings, "parquet", tmp_path / "three")
    assert len(rows_of(tmp_path / "three")) == 4


def test_a_step_that_the_lake_lost_excludes_its_trajectory(
    lake: ExportLake, settings: Settings, tmp_path: Path
) -> None:
    made = lake.trajectories["g-0"]
    versions = take_snapshot(settings)["versions"] | {"steps": None}
    with Selection(settings, versions, "trajectory_id = 'g-0'") as selection:
        (found,) = selection.trajectories()
    assert found.recorded == {} and [s.step_id for s in found.steps] == [
        s.step_id for s in made.steps
    ]


def test_an_existing_target_an_empty_selection_and_a_wrong_condition_are_refused(
    lake: ExportLake, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="exists"):
        export(settings, "jsonl", tmp_path / "out")
    with pytest.raises(ExportError, match="0 trajectories selected"):
        export(settings, "jsonl", tmp_path / "none", where="reward > 100")
    with pytest.raises(SqlError):
        export(settings, "jsonl", tmp_path / "none", where="no_such_column")
    assert not list(tmp_path.glob("*none*"))


@pytest.mark.parametrize("form", ["jsonl", "parquet", "trl"])
def test_a_lone_surrogate_is_written(form: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = ExportLake(SmallLake(settings), {})
    reply = b'{"content": "\\ud800"}'
    lake.put("s-0", [turn("s-0", 0, [1], [2], response_json=reply)], 1.0, "s")
    _, counts = export(settings, form, tmp_path / "out", where="group_id = 's'")
    assert counts.rows == 1


def test_trl_columns(lake: ExportLake, settings: Settings, tmp_path: Path) -> None:
    export(settings, "trl", tmp_path / "out", where="reward is not null")
    first, second = rows_of(tmp_path / "out")
    assert first["input_ids"] == [1, 2, 3, 4, 5, 6] and first["completion_mask"] == [
        0, 0, 1, 1, 0, 1
    ]  # fmt: skip
    assert [m["content"] for m in first["prompt"]] == ["1", "2", "3", "4", "5"]
    assert [(m["role"], m["content"]) for m in first["completion"]] == [("assistant", "[6]")]
    assert json.loads(first["tools"]) == TOOLS
    assert (first["advantage"], second["advantage"]) == (0.5, -0.5)


def test_command_line(lake: ExportLake, settings: Settings, tmp_path: Path) -> None:
    assert set(get_args(FormatName)) == set(FORMATS)
    run = CliRunner().invoke
    given = [f"data_dir={settings.data_dir}"]
    done = run(app, ["export", str(tmp_path / "out"), *given, "--where", "reward = 1"])
    assert done.exit_code == 0, done.output
    assert "1 rows of 1 trajectories" in done.output


def test_chunks_hold_both_limits() -> None:
    sizes = [(1, 5), (2, 5), (3, 20), (4, 1), (5, 1), (6, 1)]
    assert list(chunks(sizes, 10, 2)) == [(1, 2), (3, 3), (4, 5), (6, 6)]
    assert list(chunks([], 10, 2)) == []
