"""Full versions and deltas on this machine and on another file system."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from support.trainer_runs import MemoryWeightLog, begin, fetched, go, ids, settings

from demo.model import make_random_model
from runtime.digests import sha256
from runtime.kafka import Fenced
from runtime.weights.files import get_files
from schemas.errors import SettingsError
from schemas.records import WeightVersion
from schemas.settings import Settings
from trainer.errors import InvalidCheckpoint
from trainer.settings_check import check_versions
from trainer.versions.directory import versions_in
from trainer.versions.save_model import save_model

NAME = "model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "m", dtype="bfloat16")


def small_steps(data_dir: Path, model_dir: Path, **trainer: object) -> Settings:
    return settings(data_dir, model_dir, lr=1e-6, **trainer)


def kept(s: Settings) -> list[str]:
    return sorted(str(v).removeprefix("r/") for v in versions_in(s.weights_uri, "r"))


def formats(log: MemoryWeightLog) -> list[tuple[str, str | None]]:
    return [(v.format, v.base_version) for v in log.published]


def weights_of(version: WeightVersion, cache: Path) -> Mapping[str, str]:
    """Return the SHA-256 of each file by name."""
    found = get_files(version.files, cache)
    assert all(sha256(path) == digest for path, digest in found.items())
    return {path.name: digest for path, digest in found.items()}


@pytest.mark.slow
def test_deltas_equal_the_full_versions_of_the_same_run(tmp_path: Path, model_dir: Path) -> None:
    full, log = MemoryWeightLog(), MemoryWeightLog()
    a = small_steps(tmp_path / "a", model_dir, keep_versions=6)
    b = small_steps(tmp_path / "b", model_dir, full_every=3, keep_versions=2)
    go(begin(a, full), 0, 2)
    run = begin(b, log)
    go(run, 0, 2)
    kinds = [("full", None), ("delta", "r/0.0"), ("delta", "r/1.0"), ("full", None)]
    assert formats(log) == kinds
    assert kept(b) == ["0.0", "1.0", "2.0", "3.0"], "the bases of a kept delta are kept"
    for at in (1, 2, 3):
        expected = weights_of(full.published[at], tmp_path / "cache")
        assert weights_of(log.published[at], tmp_path / "cache") == expected
    (size,) = (f.size_bytes for f in log.published[3].files if NAME in f.url)
    assert log.published[2].files[-1].size_bytes < size / 10
    save_model(b, "r/2.0", tmp_path / "saved")
    found = {path.name: sha256(path) for path in (tmp_path / "saved").iterdir()}
    assert found == weights_of(full.published[2], tmp_path / "cache")
    go(run, 3, 3)
    assert kept(b) == ["3.0", "4.0"]


@pytest.mark.slow
def test_a_resumed_trainer_begins_with_a_full_version(tmp_path: Path, model_dir: Path) -> None:
    """On a file system without atomic directories. What a killed trainer left is deleted."""
    uri = f"memory://{tmp_path.name}"
    s = small_steps(tmp_path, model_dir, full_every=9, weights_uri=uri, keep_versions=2)
    log = MemoryWeightLog()
    go(begin(s, log), 0, 0)
    orphan = begin(s, log)
    orphan.train(fetched(1))
    log.fenced = True
    with pytest.raises(Fenced):
        orphan.publish()  # the files are there, the manifest is not
    log.fenced = False
    assert kept(s) == ["0.0", "1.0", "2.1"]
    go(begin(s, log), 1, 2)
    assert ids(log) == ["0.0", "1.0", "2.2", "3.2"]
    assert formats(log)[1:] == [("delta", "r/0.0"), ("full", None), ("delta", "r/2.2")]
    assert kept(s) == ["2.2", "3.2"]
    (full,) = (f for f in log.published[2].files if f.url == f"{uri}/r/2.2/{NAME}")
    found = weights_of(log.published[3], tmp_path / "cache")
    assert found[NAME] != full.sha256
    assert not list((s.data_dir / "weights-staging").rglob("*.*"))


@pytest.mark.slow
def test_large_steps_are_published_as_full_versions(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "m", dtype="float32")
    log = MemoryWeightLog()
    go(begin(settings(tmp_path, model, full_every=9), log), 0, 0)
    assert formats(log) == [("full", None), ("full", None)]


@pytest.mark.parametrize(
    ("trainer", "problem"),
    [
        ({"weights_uri": "nosuch://bucket"}, r"trainer\.weights_uri=nosuch://bucket: .*nosuch"),
        ({"full_every": 2, "lora": {"rank": 4}}, r"trainer\.full_every=2: .*trainer\.lora\.rank"),
    ],
)
def test_settings_that_publish_nothing_are_refused(
    tmp_path: Path, trainer: dict[str, object], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        check_versions(settings(tmp_path, tmp_path, **trainer))
    check_versions(settings(tmp_path, tmp_path, full_every=2, weights_uri="memory://bucket"))


@pytest.mark.slow
def test_a_delta_whose_base_is_gone_is_not_saved(tmp_path: Path, model_dir: Path) -> None:
    s, log = small_steps(tmp_path, model_dir, full_every=9), MemoryWeightLog()
    go(begin(s, log), 0, 0)
    (Path(s.weights_uri) / "r" / "0.0" / "clawstream.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"r/0\.0"):
        save_model(s, "r/1.0", tmp_path / "saved")
