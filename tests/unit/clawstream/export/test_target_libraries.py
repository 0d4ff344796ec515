"""Exports load in the library that they are for, where it is installed.

datasets, trl and verl are no dependencies; each test is skipped without its library. `make
test-exports` installs them outside of the environment and runs this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.export_lake import export_lake

from clawstream.export.export import export
from clawstream.schemas.settings import Settings

DOCS = Path(__file__).resolve().parents[4] / "docs" / "export.md"


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = Settings(data_dir=tmp_path_factory.mktemp("data"))
    export_lake(found)
    return found


@pytest.mark.slow
def test_datasets(settings: Settings, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(settings, "parquet", tmp_path / "out", where="reward is not null")
    file = str(tmp_path / "out" / "data.parquet")
    loaded = datasets.load_dataset("parquet", data_files=file, cache_dir=str(tmp_path / "cache"))
    row = loaded["train"][0]
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6]
    assert row["logprobs"] == [None, None, -0.375, -0.5, None, -0.75]


def test_trl(settings: Settings, tmp_path: Path) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    datasets = pytest.importorskip("datasets")
    export(settings, "trl", tmp_path / "out", where="reward is not null")
    file = str(tmp_path / "out" / "data.parquet")
    loaded = datasets.load_dataset("parquet", data_files=file, cache_dir=str(tmp_path / "cache"))
    row = loaded["train"][0]
    assert data_utils.is_conversational(row)
    assert (row["input_ids"], row["completion_mask"]) == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])


def test_verl(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of the page makes a batch of verl of an export."""
    pytest.importorskip("verl.protocol")
    export(settings, "parquet", tmp_path / "out", where="reward is not null")
    section = DOCS.read_text().partition("### verl")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code, names)
    batch = names["batch"]
    batch.check_consistency()
    assert batch.batch["responses"].tolist() == [[3, 4, 5, 6], [7, 5, 8, 9]]
    assert batch.batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 1, 1]]
    assert batch.batch["token_level_scores"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert batch.batch["rollout_log_probs"][0].tolist() == [-0.375, -0.5, 0, -0.75]
    assert batch.non_tensor_batch["uid"].tolist() == ["run/g/0", "run/g/0"]
