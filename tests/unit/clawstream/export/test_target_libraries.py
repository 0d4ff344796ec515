"""Exports load in the library that they are for, where it is installed.

datasets, trl and verl are no dependencies; each test is skipped without its library. `make
test-exports` installs them outside of the environment and runs this file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.export_lake import export_lake

from clawstream.export.export import export
from clawstream.schemas.settings import Settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    found = Settings(data_dir=tmp_path_factory.mktemp("data"))
    export_lake(found)
    return found


@pytest.mark.slow
def test_huggingface(settings: Settings, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    export(settings, "huggingface", tmp_path / "out", where="reward is not null")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert loaded["token_ids"][0] == [1, 2, 3, 4, 5, 6]
    assert loaded["logprobs"][0] == [None, None, -0.375, -0.5, None, -0.75]
    assert json.loads(loaded.info.description)["format"] == "huggingface"


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
    protocol = pytest.importorskip("verl.protocol")
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "numpy")
    export(settings, "verl", tmp_path / "out", where="reward is not null")
    loaded = protocol.DataProto.load_from_disk(str(tmp_path / "out" / "data-00000.pkl"))
    loaded.check_consistency()
    assert loaded.batch["responses"].tolist() == [[3, 4, 5, 6], [7, 5, 8, 9]]
    assert loaded.batch["response_mask"].tolist() == [[1, 1, 0, 1], [1, 0, 1, 1]]
    assert loaded.batch["token_level_scores"].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert loaded.non_tensor_batch["uid"].tolist() == ["run/g/0", "run/g/0"]
