"""Checkpoints apart from versions: resumes from older ones, kills while writing, what is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from structlog.testing import capture_logs
from support.trainer_runs import (
    MemoryWeightLog,
    batches,
    begin,
    fetched,
    go,
    ids,
    settings,
    weights_sha,
)

from clawstream.rollout.versions import Versions
from clawstream.runtime.kafka import Fenced
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import WeightVersion
from clawstream.trainer.errors import CheckpointFailed, StorageFailed
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.position import Position
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.checkpoint import load, newest
from clawstream.trainer.versions.directory import (
    INFO,
    VersionState,
    download,
    new_directory,
    read_info,
    upload,
    versions_in,
)
from clawstream.trainer.versions.history import (
    ancestors,
    best,
    deletable,
    deletable_checkpoints,
    version_of,
)

BATCHES = 7
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> list[tuple[float | None, str]]:
    s, log = settings(tmp_path_factory.mktemp("run"), model_dir, save_every=3), MemoryWeightLog()
    go(begin(s, log), 0, BATCHES - 1)
    return results(log)


def results(log: MemoryWeightLog) -> list[tuple[float | None, str]]:
    """Return loss and weights of each version of the surviving chain."""
    chain = reversed(ancestors(log.published, log.published[-1].version_id))
    return [(v.metrics.get("loss"), weights_sha(v)) for v in chain]


def checkpoints(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "r").iterdir())


@pytest.mark.slow
def test_a_kill_between_checkpoints_repeats_every_loss_bit_for_bit(
    tmp_path: Path, model_dir: Path, uninterrupted: list[tuple[float | None, str]]
) -> None:
    s, log = settings(tmp_path, model_dir, save_every=3), MemoryWeightLog()
    go(begin(s, log), 0, 4)
    assert checkpoints(s.checkpoint_dir) == ["0.0", "3.0"]
    with capture_logs() as logs:
        run = begin(s, log)
    (said,) = (line for line in logs if line["event"] == "resumed")
    assert (said["version"], said["next_batch_seq"]) == ("r/3.0", 3)
    assert said["abandoned_version"] == "r/5.0"
    go(run, 3, BATCHES - 1)
    assert ids(log) == ["0.0", "1.0", "2.0", "3.0", "4.0", "5.0", "4.1", "5.1", "6.1", "7.1"]
    assert results(log) == uninterrupted
    chain = [v for v in log.published if v.version_id not in ("r/4.0", "r/5.0")]
    assert batches(chain)[1:] == [(k, k) for k in range(BATCHES)]
    named = [v.checkpoint_version for v in chain]
    assert named[:7] == ["r/0.0"] * 4 + ["r/3.0"] * 3  # 6.1 is being written when 7.1 is published


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(
    tmp_path: Path, model_dir: Path, uninterrupted: list[tuple[float | None, str]]
) -> None:
    s, log = settings(tmp_path, model_dir, save_every=3), MemoryWeightLog()
    go(begin(s, log), 0, 3)
    run = s.checkpoint_dir / "r"
    (run / "3.0").rename(run / ".tmp-3.0")
    (run / ".tmp-3.0" / INFO).unlink()
    go(begin(s, log), 0, BATCHES - 1)
    assert log.published[4].version_id == "r/4.0" and log.published[5].version_id == "r/1.1"
    assert results(log) == uninterrupted


@pytest.mark.slow
def test_a_trainer_on_a_new_disk_resumes_from_the_copies(
    tmp_path: Path, model_dir: Path, uninterrupted: list[tuple[float | None, str]]
) -> None:
    """A copy whose upload was interrupted does not count."""
    uri = f"memory://{tmp_path.name}"
    changes = {"weights_uri": f"{uri}/weights", "checkpoint_uri": f"{uri}/checkpoints/"}
    s, log = settings(tmp_path / "a", model_dir, **changes), MemoryWeightLog()
    run = begin(s, log)
    go(run, 0, 3)
    run.end()
    assert sorted(str(v) for v in versions_in(s.checkpoint_uri or "", "r")) == ["r/3.0", "r/4.0"]
    files = MemoryFileSystem()
    files.rm(f"{s.checkpoint_uri}/r/4.0/model/config.json")
    elsewhere = settings(tmp_path / "b", model_dir, **changes)
    with capture_logs() as logs:
        run = begin(elsewhere, log)
    assert [line["version"] for line in logs if line["event"] == "checkpoint_not_usable"]
    assert run.position.next_batch_seq == 3
    go(run, 3, BATCHES - 1)
    run.end()
    assert results(log) == uninterrupted
    for root in elsewhere.checkpoint_roots:
        assert sorted(str(v) for v in versions_in(root, "r")) == ["r/6.1", "r/7.1"]


@pytest.mark.slow
def test_a_copy_that_cannot_be_written_is_an_error_of_the_next_version(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = settings(tmp_path, model_dir, checkpoint_uri=f"memory://{tmp_path.name}")
    log = MemoryWeightLog()
    run = begin(s, log)

    def fails(*_: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(MemoryFileSystem, "put_file", fails)
    with pytest.raises(StorageFailed, match=f"{tmp_path.name}/r/1.0: .*connection reset"):
        go(run, 0, 1)
    assert checkpoints(s.checkpoint_dir) == ["0.0", "1.0"]
    monkeypatch.undo()
    assert begin(s, log).position.next_batch_seq == 1
    for name in ("0.0", "1.0"):
        copied = Version("r", *map(int, name.split(".")))
        assert download(s.checkpoint_uri or "", tmp_path / "b", copied).version == copied


@pytest.mark.slow
def test_a_clean_end_completes_the_checkpoint_of_the_last_version(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir, save_every=3, sync_every=2), MemoryWeightLog()
    run = begin(s, log)
    go(run, 0, 2)
    run.end()
    assert checkpoints(s.checkpoint_dir) == ["0.0", "2.0"]
    assert begin(s, log).position.next_batch_seq == 3


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_an_error_of_the_next_version(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    run = begin(s, log)
    (s.checkpoint_dir / "r" / ".tmp-1.0").write_text("in the way")
    with pytest.raises(StorageFailed, match="File exists"):
        go(run, 0, 1)
    assert "1.0" in ids(log), "its version is published all the same"


@pytest.mark.slow
def test_shards_that_a_newer_trainer_deletes_end_the_older_one_as_fenced(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    run = begin(s, log)
    (s.checkpoint_dir / "r" / ".tmp-1.0" / "__0_0.distcp").mkdir(parents=True)  # in the way
    train_batch(run, fetched(0))
    run.publish()
    log.fenced = True
    with pytest.raises(Fenced):
        run.end()


@pytest.mark.slow
def test_shards_that_cannot_be_written_are_an_error_with_their_cause(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    run = begin(s, log)
    (s.checkpoint_dir / "r" / ".tmp-1.0" / "__0_0.distcp").mkdir(parents=True)
    train_batch(run, fetched(0))
    run.publish()
    with pytest.raises(CheckpointFailed, match="IsADirectoryError"):
        run.end()


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model_dir: Path) -> None:
    """Ties, or names, that the stored weights do not have: nothing is loaded in part."""
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    begin(s, log)
    policy = Policy(model_dir, s.trainer)
    state, directory = dict(policy.state), s.checkpoint_dir / "r" / "0.0"
    load(directory, state)
    policy.model.register_buffer("added", torch.zeros(1))
    policy.model.lm_head.weight = policy.model.model.embed_tokens.weight
    with pytest.raises(SettingsError, match=r"2 tensors of model .*added, lm_head\.weight"):
        load(directory, state)


@pytest.mark.slow
def test_a_resume_elsewhere_is_logged(tmp_path: Path, model_dir: Path) -> None:
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    begin(s, log)
    torch.set_num_threads(2)
    try:
        with capture_logs() as logs:
            begin(s, log)
    finally:
        torch.set_num_threads(1)
    (said,) = (line for line in logs if line["event"] == "resumed_elsewhere")
    assert said["differing"] == {"threads": (1, 2)}


@pytest.mark.slow
def test_a_run_without_a_whole_first_checkpoint_has_no_version(
    tmp_path: Path, model_dir: Path
) -> None:
    s, log = settings(tmp_path, model_dir), MemoryWeightLog()
    log.fenced = True
    with pytest.raises(Exception, match="newer"):
        begin(s, log)
    assert checkpoints(s.checkpoint_dir) == ["0.0"], "complete before the manifest"
    log.fenced = False
    train_batch(begin(s, log), fetched(0))
    assert ids(log) == ["0.1"]


def test_a_damaged_checkpoint_is_replaced_by_its_copy(tmp_path: Path) -> None:
    uri, log = f"memory://{tmp_path.name}", [version("0.0", None), version("1.0", "0.0")]
    for one in log:
        state = VersionState(
            version=version_of(one),
            parent_version=one.parent_version,
            weights_topic_id="log",
            position=Position(topic_id="b", next_offset=0, next_batch_seq=0),
        )
        with new_directory(tmp_path, state) as tmp:
            (tmp / "shard").write_text("1")
    copied = tmp_path / "r" / "1.0"
    (copied / "shard").write_text("")
    found = newest(tmp_path, uri, log)
    assert found is not None and found[1] == tmp_path / "r" / "0.0", "it has no copy"
    (copied / "shard").write_text("1")
    upload(copied, uri, read_info(copied))
    (copied / "shard").write_text("")
    assert newest(tmp_path, uri, log) == (state, copied)
    assert (copied / "shard").read_text() == "1"
    (copied / "shard").write_text("")
    MemoryFileSystem().rm(f"{uri}/r/1.0/shard")
    found = newest(tmp_path, uri, log)
    assert found is not None and found[1] == tmp_path / "r" / "0.0", "nor is its copy whole"


# -- what is kept, and what workers load


def version(name: str, parent: str | None, score: float | None = None) -> WeightVersion:
    parsed = parse_version(f"r/{name}")
    assert parsed is not None
    return WeightVersion(
        version_id=f"r/{name}",
        run_id="r",
        sync_index=parsed.sync_index,
        attempt=parsed.attempt,
        parent_version=parent and f"r/{parent}",
        format="full",
        files=(),
        channel="train",
        metrics={} if score is None else {"val/reward_mean": score},
        created_at=0,
    )


LOG = [
    version("0.0", None),
    version("1.0", "0.0", 0.5),
    version("2.0", "1.0", 0.25),
    version("3.0", "2.0", 0.9),
    version("2.1", "1.0", 0.5),
    version("3.1", "2.1", 0.4),
]
"""The trainer went on from 1.0 after 3.0."""


def names(versions: object) -> set[str]:
    assert isinstance(versions, frozenset)
    return {f"{v.sync_index}.{v.attempt}" for v in versions}


def test_the_best_version_of_the_chain_is_kept_and_an_abandoned_one_is_not() -> None:
    found = best(ancestors(LOG, "r/3.1"), "val/reward_mean")
    assert found is not None and found.version_id == "r/2.1", "the newest of equals"
    assert best(LOG, "val/other") is None and best(LOG, None) is None
    existing = {version_of(v) for v in LOG}
    assert names(deletable(LOG, existing, "r/3.1", 2)) == {"0.0", "1.0", "2.0", "3.0"}
    better = [replace(v, metrics={"m": 1.0}) if v.version_id == "r/0.0" else v for v in LOG]
    assert names(deletable(better, existing, "r/3.1", 2, "m")) == {"1.0", "2.0", "3.0"}


def test_a_deleted_version_that_becomes_the_best_does_not_replace_the_best_that_exists() -> None:
    log = [version("0.0", None, 0.7), version("1.0", "0.0", 0.6), version("2.0", "1.0", 0.1)]
    log += [version("3.0", "2.0"), version("4.0", "3.0")]
    existing = {version_of(v) for v in log[1:]}
    found = deletable(log, existing, "r/4.0", 2, "val/reward_mean")
    assert names(found) == {"0.0", "2.0"}


def test_of_checkpoints_only_complete_ones_of_the_chain_count() -> None:
    complete = {Version("r", 0, 0), Version("r", 1, 0), Version("r", 3, 0), Version("r", 9, 9)}
    assert names(deletable_checkpoints(LOG, complete, "r/3.1", 1)) == {"3.0"}
    complete |= {Version("r", 2, 1), Version("r", 3, 1)}
    assert names(deletable_checkpoints(LOG, complete, "r/3.1", 2)) == {"0.0", "1.0", "3.0"}
    better = [replace(v, metrics={"m": 1.0}) if v.version_id == "r/0.0" else v for v in LOG]
    found = deletable_checkpoints(better, complete, "r/3.1", 2, "m")
    assert names(found) == {"1.0", "3.0"}


def test_a_worker_leaves_an_abandoned_version_for_a_lower_sync_index() -> None:
    versions = Versions("r")
    for published in LOG[:4]:
        versions.add(published)
    versions.reached_end()
    assert versions.wanted(None) == LOG[3]
    versions.add(LOG[4])
    assert versions.wanted("r/3.0") == LOG[4]
    assert versions.wanted("r/2.1") is None
