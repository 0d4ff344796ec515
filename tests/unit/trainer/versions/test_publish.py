"""Full versions and deltas on this machine and on another file system."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from safetensors.torch import save_file
from structlog.testing import capture_logs
from support.trainer_runs import MemoryWeightLog, begin, fetched, go, ids, settings

from clawstream.demo.model import make_random_model
from clawstream.runtime.digests import sha256
from clawstream.runtime.kafka import Fenced
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.errors import InvalidCheckpoint, StorageFailed
from clawstream.trainer.parallel.processes import ONE
from clawstream.trainer.position import Position
from clawstream.trainer.settings_check import CHECKS, check_versions
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.directory import (
    INFO,
    VersionState,
    delete_unpublished,
    directory_of,
    download,
    new_directory,
    prune,
    read_info,
    upload,
    verify,
    versions_in,
)
from clawstream.trainer.versions.publish import Publisher, files_of
from clawstream.trainer.versions.save_model import save_model

if TYPE_CHECKING:
    from clawstream.trainer.model.policy import Policy

NAME = "model.safetensors"
pytestmark = pytest.mark.usefixtures("one_thread")


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
    train_batch(orphan, fetched(1))
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
    staging = s.data_dir / "weights-staging" / "r"
    assert [path.name for path in staging.iterdir()] == ["model-3"], "what the next is compared to"


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
        ({"checkpoint_uri": "nosuch://b"}, r"trainer\.checkpoint_uri=nosuch://b: .*nosuch"),
        (
            {"weights_uri": "memory://b", "checkpoint_uri": "memory://b/"},
            r"trainer\.checkpoint_uri=memory://b: trainer\.weights_uri is the same place",
        ),
        (
            {"checkpoint_dir": "/nosuch/c", "checkpoint_uri": "file:///nosuch/./a/../c"},
            r"trainer\.checkpoint_uri=.*: trainer\.checkpoint_dir is the same place",
        ),
        ({"full_every": 2, "lora": {"rank": 4}}, r"trainer\.full_every=2: .*trainer\.lora\.rank"),
    ],
)
def test_settings_that_publish_nothing_are_refused(
    tmp_path: Path, trainer: dict[str, object], problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem):
        check_versions(settings(tmp_path, tmp_path, **trainer))
    assert check_versions in CHECKS, "clawstream up finds them, too"
    check_versions(settings(tmp_path, tmp_path, full_every=2, weights_uri="memory://bucket"))


@pytest.mark.slow
def test_a_delta_whose_base_is_gone_is_not_saved(tmp_path: Path, model_dir: Path) -> None:
    s, log = small_steps(tmp_path, model_dir, full_every=9), MemoryWeightLog()
    go(begin(s, log), 0, 0)
    (Path(s.weights_uri) / "r" / "0.0" / "clawstream.json").unlink()
    with pytest.raises(InvalidCheckpoint, match=r"r/0\.0"):
        save_model(s, "r/1.0", tmp_path / "saved")


class TinyPolicy:
    """A policy with one tensor, which differs a little from version to version."""

    processes = ONE
    base_model = None

    def __init__(self) -> None:
        self.saved = 0

    def served_dtypes(self, dtype: str) -> None:
        pass

    def save(self, directory: Path, dtypes: None) -> None:
        tensor = torch.zeros(9999)
        tensor[0] = self.saved
        self.saved += 1
        save_file({"a": tensor}, directory / NAME)


def state(number: int, topic_id: str = "log") -> VersionState:
    return VersionState(
        version=Version("r", number, 0),
        parent_version=f"r/{number - 1}.0" if number else None,
        weights_topic_id=topic_id,
        position=Position(topic_id="b", next_offset=0, next_batch_seq=0),
    )


def publisher(data_dir: Path, **trainer: object) -> Publisher:
    s = Settings.model_validate({"run_id": "r", "data_dir": data_dir, "trainer": trainer})
    return Publisher(s, cast("Policy", TinyPolicy()))


def test_a_file_system_that_renames_deleted_files_in_use_adds_none_to_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does with files that are mapped."""
    delete, numbers = Path.unlink, itertools.count()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".safetensors":
            path.rename(path.with_name(f".nfs{next(numbers)}"))
        else:
            delete(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    publishing = publisher(tmp_path, full_every=3)
    found = [publishing.export(state(number)) for number in range(4)]
    assert [exported.is_delta for exported in found] == [False, True, True, False]
    names = [[f.url.rpartition("/r/")[2] for f in exported.files] for exported in found]
    full = f"0.0/{NAME}"
    deltas = ["1.0/model.delta", "2.0/model.delta"]
    assert names == [[full], [full, deltas[0]], [full, *deltas], [f"3.0/{NAME}"]]
    assert found[2].files == files_of(str(tmp_path / "weights"), Version("r", 2, 0))


def test_a_start_leaves_the_staging_files_of_other_runs(tmp_path: Path) -> None:
    for run in ("r", "other"):
        (tmp_path / "weights-staging" / run / ".tmp-1.0").mkdir(parents=True)
    publisher(tmp_path, weights_uri="memory://bucket")
    assert [path.name for path in (tmp_path / "weights-staging").iterdir()] == ["other"]


def test_an_upload_never_overwrites_a_version(tmp_path: Path) -> None:
    uri = f"memory://{tmp_path.name}"
    publisher(tmp_path / "a", weights_uri=uri).export(state(0))
    with pytest.raises(FileExistsError, match=r"r/0\.0 is there already"):
        publisher(tmp_path / "b", weights_uri=uri).export(state(0, "other"))


def test_an_interrupted_upload_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves some files, and of one the beginning."""
    written, uri, files = state(0), f"memory://{tmp_path.name}", MemoryFileSystem()
    with new_directory(tmp_path / "a", written) as tmp:
        (tmp / "model").mkdir()
        for name in ("model/config.json", "one", "two"):
            (tmp / name).write_text(name)
    source = directory_of(tmp_path / "a", written.version)
    upload(source, uri, read_info(source))
    files.rm(f"{uri}/r/0.0/two")
    for name in ("one", INFO):
        files.pipe_file(f"{uri}/r/0.0/{name}", (source / name).read_bytes()[:2])
    with pytest.raises(InvalidCheckpoint):
        download(uri, tmp_path / "b", written.version)
    copied, put = list[str](), MemoryFileSystem.put_file

    def noted(files: MemoryFileSystem, local: str, *where: Any, **how: Any) -> None:
        copied.append(str(Path(local).relative_to(source)))
        put(files, local, *where, **how)

    monkeypatch.setattr(MemoryFileSystem, "put_file", noted)
    upload(source, uri, read_info(source))
    assert copied == [INFO, "one", "two"]
    assert download(uri, tmp_path / "c", written.version) == written


def test_a_damaged_directory_is_replaced_by_its_copy_once_that_is_whole(tmp_path: Path) -> None:
    written, uri, root = state(0), f"memory://{tmp_path.name}", tmp_path / "a"
    with new_directory(root, written) as tmp:
        (tmp / "one").write_text("1")
    directory = directory_of(root, written.version)
    upload(directory, uri, read_info(directory))
    (directory / "one").write_text("")
    (directory / "two").write_text("2")
    files = MemoryFileSystem()
    files.pipe_file(f"{uri}/r/0.0/one", b"")
    with pytest.raises(InvalidCheckpoint, match="one is missing or altered"):
        download(uri, root, written.version)
    assert (directory / "two").exists()
    files.pipe_file(f"{uri}/r/0.0/one", b"1")
    assert download(uri, root, written.version) == written
    assert verify(directory, written.version) == written


def test_a_path_as_a_file_url_is_a_path(tmp_path: Path) -> None:
    url = (tmp_path / "with space").as_uri()
    ((file,), _) = publisher(tmp_path, weights_uri=url).export(state(0))
    assert file.url == f"{url}/r/0.0/{NAME}"
    assert list(versions_in(tmp_path / "with space", "r")) == [Version("r", 0, 0)]


def test_only_the_files_of_this_root_are_deleted(tmp_path: Path) -> None:
    """A path is no pattern."""
    for name in ("[x]", "x"):
        (tmp_path / name / "r" / ".tmp-1.0").mkdir(parents=True)
    assert delete_unpublished(tmp_path / "[x]", "r", (), "log", repr) == ([], [])
    assert not list((tmp_path / "[x]" / "r").iterdir())
    assert list((tmp_path / "x" / "r").iterdir())


def test_a_deletion_that_fails_is_repeated_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"memory://{tmp_path.name}"
    publisher(tmp_path, weights_uri=uri).export(state(0))
    rm = MemoryFileSystem.rm

    def fails(files: MemoryFileSystem, path: str, **how: Any) -> None:
        rm(files, path, **how)
        raise RuntimeError("connection reset")  # an error of the file system's own

    monkeypatch.setattr(MemoryFileSystem, "rm", fails)
    with pytest.raises(StorageFailed, match="connection reset"):
        delete_unpublished(uri, "r", (), "log", repr)
    assert not MemoryFileSystem().exists(f"/{tmp_path.name}/r/0.0/{NAME}")
    monkeypatch.undo()
    assert delete_unpublished(uri, "r", (), "log", repr) == ([Version("r", 0, 0)], [])
    assert not versions_in(uri, "r")


def test_of_deltas_the_newest_is_deleted_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (9, 10):
        (tmp_path / "r" / f"{number}.0").mkdir(parents=True)
    deleted, rm = list[str](), LocalFileSystem.rm

    def noted(files: LocalFileSystem, path: str, **how: Any) -> None:
        deleted.append(Path(path).name)
        rm(files, path, **how)

    monkeypatch.setattr(LocalFileSystem, "rm", noted)
    prune(tmp_path, versions_in(tmp_path, "r"), [Version("r", 9, 0), Version("r", 10, 0)])
    assert deleted == ["10.0", "9.0"]


@pytest.mark.slow
def test_old_versions_that_cannot_be_deleted_now_are_deleted_later(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = small_steps(tmp_path, model_dir, weights_uri=f"memory://{tmp_path.name}", keep_versions=2)
    log = MemoryWeightLog()

    def fails(files: MemoryFileSystem, path: str) -> None:
        raise RuntimeError("connection reset")

    run = begin(s, log)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(MemoryFileSystem, "rm_file", fails)
        go(run, 0, 1)
        log.fenced = True
        with pytest.raises(Fenced):
            run._prune(log.published[-1].version_id)
    assert [line["event"] for line in logs].count("versions_not_deleted") == 1
    assert kept(s) == ["0.0", "1.0", "2.0"]
    log.fenced = False
    go(run, 2, 2)
    assert kept(s) == ["2.0", "3.0"]
