"""Versions, checkpoints and resumes on a weight log in memory: a crash is a value, here a directory
as a kill leaves it.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from structlog.testing import capture_logs
from support.trainer_runs import (
    GROUPS,
    MEMBERS,
    MemoryWeightLog,
    batches,
    begin,
    fetched,
    go,
    ids,
    locate,
    settings,
    weights_sha,
)

from clawstream.demo.model import build_tokenizer, make_random_model
from clawstream.rollout.vllm_plugin.engine import Served, read_layout, stage
from clawstream.runtime.digests import sha256
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_SOURCE, exit_code
from clawstream.runtime.kafka import Fenced, SourceTruncated
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import Version, parse_version
from clawstream.schemas.records import (
    WeightVersion,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import fingerprint, pack_ids
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.errors import (
    BatchesReplaced,
    CheckpointLost,
    InvalidCheckpoint,
    OutOfMemory,
    ProcessLost,
    StorageFailed,
)
from clawstream.trainer.main import check_settings
from clawstream.trainer.metrics.validation import Validation
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.parallel.processes import Processes
from clawstream.trainer.position import Position, start_of
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.checkpoint import MODEL, load
from clawstream.trainer.versions.directory import (
    INFO,
    VersionState,
    directory_of,
    new_directory,
    verify,
)
from clawstream.trainer.versions.history import ancestors, deletable, next_sync_index, version_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_version_ids_after_two_resumes_are_never_reused(tmp_path: Path, model_dir: Path) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 1)
    go(begin(s, weight_log), 2, 2)
    lost = begin(s, weight_log)
    train_batch(lost, fetched(3))  # killed before anything of it was published
    go(begin(s, weight_log), 3, 4)
    assert ids(weight_log) == ["0.0", "1.0", "2.0", "3.1", "4.2", "5.2"]
    parents = [v.parent_version for v in weight_log.published]
    assert parents == [None, "r/0.0", "r/1.0", "r/2.0", "r/3.1", "r/4.2"]
    assert batches(weight_log.published) == [(None, None), (0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert [v.sync_index for v in weight_log.published] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_the_version_with_the_best_validation_is_kept(tmp_path: Path, model_dir: Path) -> None:
    s = settings(tmp_path, model_dir, keep_versions=2, keep_best_by="val/reward_mean")
    run = begin(s, MemoryWeightLog())
    go(run, 0, 0)
    for sync_index, mean in ((0, 0.25), (1, 0.75)):
        run.validated(Validation(sync_index=sync_index, trajectories=9, mean=mean, interval=None))
    go(run, 1, 3)
    assert sorted(path.name for path in (Path(s.weights_uri) / "r").iterdir()) == [
        "1.0",
        "3.0",
        "4.0",
    ]
    assert [v.metrics.get("val/reward_mean") for v in run.versions] == [
        0.25,
        0.75,
        None,
        None,
        None,
    ]


@pytest.mark.slow
def test_ids_start_above_those_that_recorded_data_names(tmp_path: Path, model_dir: Path) -> None:
    s, weight_log = settings(tmp_path, model_dir, first_attempt=3), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    go(begin(s, weight_log), 1, 1)
    assert ids(weight_log) == ["0.3", "1.3", "2.4"]
    # Every recorded token names r/0.0: none of these versions, and none of the weights that are
    # trained.
    assert "logp_max_abs_diff_same_version" not in weight_log.published[1].metrics


def test_tokens_of_versions_that_would_get_an_id_of_ours_are_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    run = begin(settings(tmp_path, model_dir), weight_log := MemoryWeightLog())
    batch = fetched(0)
    for name, trajectory in batch.trajectories.items():
        (step,) = trajectory.steps
        batch.trajectories[name] = replace(
            trajectory, steps=(replace(step, oldest_version="r/5.2", newest_version="r/5.2"),)
        )
    train_batch(run, batch)
    ((offset, reason, detail),) = weight_log.dead_letters
    assert (offset, reason) == (batch.offset, "untrainable")
    assert "tokens of r/5.2, which is not on this weights log" in detail
    assert "first_attempt=3" in detail
    weight_log.fenced = True
    with pytest.raises(Fenced):  # a newer trainer published it
        train_batch(run, batch)


WORST = -sys.float_info.max


def with_rewards(batch: FetchedBatch, *values: float, of_steps: bool) -> FetchedBatch:
    """Return the batch with other rewards of the first members of its first group."""
    first, *others = batch.batch.groups
    members = list(first.members)
    for i, value in enumerate(values):
        step_id = batch.trajectories[members[i].trajectory_id].steps[0].step_id
        reward = replace(members[i].rewards[0], value=value, step_id=step_id if of_steps else None)
        members[i] = replace(members[i], rewards=(reward,))
    groups = (replace(first, members=tuple(members)), *others)
    return replace(batch, batch=replace(batch.batch, groups=groups))


def test_a_batch_that_cannot_be_calculated_is_skipped_with_a_dead_letter(
    tmp_path: Path, model_dir: Path
) -> None:
    """Batches of an older release, or of another writer, have any number."""
    s = settings(tmp_path, model_dir, algorithm={"advantage": "grpo_process"})
    run = begin(s, weight_log := MemoryWeightLog())
    train_batch(run, with_rewards(fetched(0), WORST, WORST, of_steps=True))
    run.publish()
    ((offset, reason, detail),) = weight_log.dead_letters
    assert (offset, reason) == (fetched(0).offset, "untrainable")
    assert detail.startswith("batch 0: OverflowError")
    assert not weight_log.trained
    train_batch(run, fetched(1))
    run.publish()
    assert ids(weight_log) == ["0.0", "1.0", "2.0"]
    assert {t.batch_seq for t in weight_log.trained} == {1}


def test_a_reward_that_admission_would_refuse_leaves_its_member_out(
    tmp_path: Path, model_dir: Path
) -> None:
    run = begin(settings(tmp_path, model_dir), weight_log := MemoryWeightLog())
    train_batch(run, with_rewards(fetched(0), WORST, of_steps=False))
    run.publish()
    assert ids(weight_log) == ["0.0", "1.0"] and not weight_log.dead_letters
    metrics = weight_log.published[-1].metrics
    assert metrics["members_unrewarded"] == 1 and abs(metrics["reward_mean"]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_seed_and_batches_give_identical_weights_resumed_or_not(
    tmp_path: Path, dtype: str
) -> None:
    """The checkpoint holds the float32 weights that learn; what is published of them is rounded."""
    model_dir = make_random_model(tmp_path / "m", dtype=dtype)
    uninterrupted, again, resumed = MemoryWeightLog(), MemoryWeightLog(), MemoryWeightLog()
    a, b, c = (settings(tmp_path / name, model_dir, dtype=dtype) for name in "abc")
    go(begin(a, uninterrupted), 0, 3)
    go(begin(b, again), 0, 3)
    for seq in range(4):
        go(begin(c, resumed), seq, seq)
    digests = [weights_sha(v) for v in uninterrupted.published]
    assert len(set(digests)) == 5
    assert digests == [weights_sha(v) for v in again.published]
    assert digests == [weights_sha(v) for v in resumed.published]

    def loaded(directory: Path) -> Policy:
        policy = Policy(directory / MODEL, a.trainer, weights=False)
        load(directory, policy.state)
        return policy

    last, then = a.checkpoint_dir / "r" / "4.0", c.checkpoint_dir / "r" / "4.3"
    assert sha256(last / "__0_0.distcp") == sha256(then / "__0_0.distcp")
    weights = load_file(Path(a.weights_uri) / "r" / "4.0" / "model.safetensors")
    states = [loaded(path).state for path in (last, then)]
    for name, master in states[0]["model"].state_dict().items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(weights[name].dtype), weights[name])
    for name, moments in states[0]["optimizer"].state_dict().items():
        for key, value in moments.items():
            assert torch.equal(value, states[1]["optimizer"].state_dict()[name][key])
    assert states[0]["random"].state_dict() == states[1]["random"].state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("own", "engine"), [("bfloat16", "auto"), ("float32", "bfloat16")])
def test_an_engine_that_booted_in_bfloat16_takes_every_version(
    tmp_path: Path, model_dir: Path, own: str, engine: str
) -> None:
    boot = model_dir if own == "float32" else make_random_model(tmp_path / "m", dtype=own)
    given = settings(tmp_path / "data", boot, max_versions=3)
    s = given.model_copy(update={"rollout": given.rollout.model_copy(update={"dtype": engine})})
    go(begin(s, weight_log := MemoryWeightLog()), 0, 0)
    go(begin(s, weight_log), 1, 1)
    served = Served(read_layout(boot), torch.bfloat16)
    for version in weight_log.published:
        paths = [file.url.removeprefix("file://") for file in version.files]
        tensors = [path for path in paths if path.endswith(".safetensors")]
        assert {t.dtype for t in stage(tensors, served).values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [10**6, -1])
def test_tokens_that_the_model_does_not_have_are_left_out_and_training_goes_on(
    tmp_path: Path, model_dir: Path, foreign: int
) -> None:
    run = begin(settings(tmp_path, model_dir), weight_log := MemoryWeightLog())
    batch = fetched(0)
    name, odd = next(iter(batch.trajectories.items()))
    segments = (replace(odd.segments[0], token_ids=pack_ids([2, foreign, 9])), *odd.segments[1:])
    batch.trajectories[name] = replace(odd, segments=segments)
    with capture_logs() as logs:
        train_batch(run, batch)
    run.publish()
    (said,) = (line for line in logs if line["event"] == "tokens_outside_vocabulary")
    assert said["trajectories"] == [name] and said["tokens"] == 4
    metrics = weight_log.published[-1].metrics
    assert (metrics["tokens_outside_vocabulary"], metrics["sequences"]) == (
        4.0,
        GROUPS * MEMBERS - 1.0,
    )


@pytest.mark.slow
def test_sequences_with_images_are_left_out(tmp_path: Path, model_dir: Path) -> None:
    run = begin(settings(tmp_path, model_dir), weight_log := MemoryWeightLog())
    run.policy.model.config.image_token_index = 31
    batch = fetched(0)
    name, odd = next(iter(batch.trajectories.items()))
    segments = (replace(odd.segments[0], token_ids=pack_ids([2, 31, 31, 9])), *odd.segments[1:])
    batch.trajectories[name] = replace(odd, segments=segments)
    with capture_logs() as logs:
        train_batch(run, batch)
    run.publish()
    (said,) = (line for line in logs if line["event"] == "media_not_trained")
    assert said["trajectories"] == [name] and said["tokens"] == 4
    metrics = weight_log.published[-1].metrics
    assert (metrics["tokens_with_media"], metrics["tokens_outside_vocabulary"]) == (4.0, 0.0)


@pytest.mark.slow
def test_data_of_another_tokenizer_is_refused(tmp_path: Path, model_dir: Path) -> None:
    run = begin(settings(tmp_path, model_dir), MemoryWeightLog())
    own = fingerprint(build_tokenizer().get_vocab())

    def sampled_with(found: str, trainable: bool = True) -> FetchedBatch:
        batch = fetched(0)
        for name, trajectory in batch.trajectories.items():
            steps = [
                replace(s, tokenizer_fingerprint=found, trainable=trainable)
                for s in trajectory.steps
            ]
            batch.trajectories[name] = replace(trajectory, steps=tuple(steps))
        return batch

    with pytest.raises(SettingsError, match=r"its tokenizer .* batch 0 .* f00d"):
        train_batch(run, sampled_with("f00d"))
    train_batch(run, sampled_with("f00d", trainable=False))
    train_batch(run, sampled_with(own))


@pytest.mark.slow
def test_published_files_are_what_the_manifest_says_and_a_loadable_model(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    version = weight_log.published[-1]
    directory = Path(s.weights_uri) / "r" / "1.0"
    assert {Path(f.url.removeprefix("file://")) for f in version.files} == {
        directory / p.name for p in model_dir.iterdir()
    }
    for file in version.files:
        path = Path(file.url.removeprefix("file://"))
        assert (sha256(path), path.stat().st_size) == (file.sha256, file.size_bytes)
    tokenizer_files = {p.name for p in model_dir.iterdir()} - {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }
    assert tokenizer_files
    for name in tokenizer_files:
        assert (directory / name).read_bytes() == (model_dir / name).read_bytes()
    assert version.metrics["reward_mean"] == 1.0 and version.metrics["tokens"] == 24.0
    assert version.metrics["staleness_mean"] == 0.0
    assert version.metrics["logp_max_abs_diff_same_version"] == version.metrics["logp_max_abs_diff"]


@pytest.mark.slow
def test_what_a_killed_trainer_left_is_cleared_away_and_trained_again(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    orphan = begin(s, weight_log)
    train_batch(orphan, fetched(1))
    weight_log.fenced = True
    with pytest.raises(Fenced):
        orphan.publish()  # all files are there, the manifest is not
    weight_log.fenced = False
    (s.checkpoint_dir / "r" / ".tmp-3.1" / "model").mkdir(parents=True)
    (Path(s.weights_uri) / "r" / ".tmp-3.1").mkdir()
    assert (Path(s.weights_uri) / "r" / "2.1").exists()
    run = begin(s, weight_log)
    for root in (s.checkpoint_dir, Path(s.weights_uri)):
        assert sorted(p.name for p in (root / "r").iterdir()) == ["0.0", "1.0"]
    go(run, 1, 1)
    assert ids(weight_log) == ["0.0", "1.0", "2.2"], "an id that was once written to disk is taken"
    assert batches(weight_log.published)[-1] == (1, 1)


@pytest.mark.slow
def test_a_log_that_has_lost_what_was_trained_stops_the_trainer_before_it_deletes(
    tmp_path: Path, model_dir: Path
) -> None:
    """The broker came back from an older copy: the same topics, but neither the newest version nor
    its batch.
    """
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 1)
    weight_log.published.pop()

    def truncated(stored: Position | None) -> Position:
        if stored is not None and stored.next_offset > 2:
            raise SourceTruncated("source truncated")
        return locate("topic", stored)

    with pytest.raises(SourceTruncated):
        open_run(
            s, weight_log, weight_log.published, [Version("r", 0, 0), Version("r", 1, 0)], truncated
        )
    assert all((root / "r" / "2.0").is_dir() for root in (s.checkpoint_dir, Path(s.weights_uri)))


def test_a_fenced_trainer_says_so_even_when_its_files_were_cleared_away(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    run = begin(s, weight_log)
    train_batch(run, fetched(0))
    (Path(s.weights_uri) / "r" / "1.0").mkdir()  # as if a newer one had written there
    with pytest.raises(FileExistsError):
        run.publish()
    weight_log.fenced = True
    with pytest.raises(Fenced):
        run.publish()
    assert ids(weight_log) == ["0.0"]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["shard", ".metadata", INFO, "everything"])
def test_a_damaged_checkpoint_falls_back_to_its_parent(
    tmp_path: Path, model_dir: Path, damage: str
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 2)
    newest = s.checkpoint_dir / "r" / "3.0"
    match damage:
        case "shard":
            with (newest / "__0_0.distcp").open("r+b") as f:
                f.seek(2000)
                f.write(b"\xff" * 8)
        case "everything":
            shutil.rmtree(newest)
        case _:
            os.truncate(newest / damage, 10)
    go(begin(s, weight_log), 2, 2)
    assert ids(weight_log) == ["0.0", "1.0", "2.0", "3.0", "3.1"]
    assert weight_log.published[-1].parent_version == "r/2.0"
    trained = [v.last_batch_seq for v in reversed(ancestors(weight_log.published, "r/3.1"))]
    assert trained == [None, 0, 1, 2], "each batch once along the surviving chain"


@pytest.mark.slow
def test_versions_without_any_checkpoint_are_an_error(tmp_path: Path, model_dir: Path) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    shutil.rmtree(s.checkpoint_dir)
    with pytest.raises(CheckpointLost, match=r"r/1\.0"):
        begin(s, weight_log)


@pytest.mark.slow
def test_a_wiped_weights_log_starts_anew_under_new_ids_and_deletes_nothing(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 1)
    before = {
        p: p.stat().st_mtime_ns
        for root in (s.checkpoint_dir, Path(s.weights_uri))
        for p in root.rglob("*.safetensors")
    }
    wiped = MemoryWeightLog(topic_id="another")
    go(begin(s, wiped, "topic2"), 0, 0)
    assert ids(wiped) == ["0.1", "1.1"]
    assert all(p.stat().st_mtime_ns == t for p, t in before.items())
    go(begin(s, wiped, "topic2"), 1, 1)
    assert ids(wiped) == ["0.1", "1.1", "2.2"]


@pytest.mark.slow
def test_a_batches_topic_made_anew_is_an_error_once_something_was_trained(
    tmp_path: Path, model_dir: Path
) -> None:
    """Its batches count from 0 again: for weights of version 2 the staleness of any of them would
    be negative.
    """
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    begin(s, weight_log)
    run = begin(s, weight_log, "topic2")
    assert run.position == start_of("batches", "topic2", None), (
        "nothing was trained: the new topic will do"
    )
    go(run, 0, 1)
    with pytest.raises(
        BatchesReplaced, match=r"batches 0 to 1 of topic id topic2; today's id is topic3"
    ) as raised:
        begin(s, weight_log, "topic3")
    assert exit_code(raised.value) == EXIT_SOURCE
    assert ids(weight_log) == ["0.0", "1.1", "2.1"]


def no_memory(*_: object) -> NoReturn:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to ..."
    )


@pytest.mark.slow
def test_out_of_memory_names_the_batch_which_a_restart_trains(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    run = begin(s, weight_log)
    run.policy.model.register_forward_pre_hook(no_memory)
    with pytest.raises(
        OutOfMemory, match=r"batch 1 of 24 .* trainer\.micro_batch_tokens \(it is 16384"
    ) as raised:
        train_batch(run, fetched(1))
    assert exit_code(raised.value) == EXIT_FAILED, "restarted"
    go(begin(s, weight_log), 1, 1)
    assert batches(weight_log.published)[-1] == (1, 1)


def test_the_error_of_a_collective_says_that_another_process_ended() -> None:
    with pytest.raises(ProcessLost), Processes(0, 2).joined():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


@pytest.mark.slow
def test_a_batch_that_is_not_finite_is_passed_over_and_said(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir, minibatches=1), MemoryWeightLog()
    run = begin(s, weight_log)
    handle = run.policy.model.lm_head.register_forward_hook(lambda _, __, logits: logits * math.nan)
    with capture_logs() as logs:
        go(run, 0, 0)
    handle.remove()
    (said,) = [line for line in logs if line["event"] == "update_skipped"]
    assert (said["batch_seq"], said["reason"]) == (0, "loss nan, gradient norm nan")
    initial, skipped = weight_log.published
    assert weights_sha(initial) == weights_sha(skipped)
    assert weight_log.trained == [], "no token was trained"
    assert (skipped.metrics["optimizer_steps"], skipped.metrics["optimizer_steps_skipped"]) == (
        0.0,
        1.0,
    )
    assert skipped.metrics.keys().isdisjoint({"loss", "grad_norm", "logp_max_abs_diff"})
    assert all(map(math.isfinite, skipped.metrics.values()))
    go(run, 1, 1)
    assert batches(weight_log.published) == [(None, None), (0, 0), (1, 1)]
    assert weight_log.published[-1].metrics["optimizer_steps"] == 1.0


@pytest.mark.slow
def test_a_stop_between_two_versions_publishes_under_the_index_that_staleness_expects(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = settings(tmp_path, model_dir, sync_every=2), MemoryWeightLog()
    run = begin(s, weight_log)
    go(run, 0, 2)
    assert run.unpublished and not run.version_due
    run.end()  # SIGTERM
    go(begin(s, weight_log), 3, 5)
    assert ids(weight_log) == ["0.0", "1.0", "2.0", "2.1", "3.1"]
    assert batches(weight_log.published)[1:] == [(0, 1), (2, 2), (3, 3), (4, 5)]
    for version in weight_log.published[1:]:
        assert version.last_batch_seq is not None
        assert version.sync_index == version.last_batch_seq // 2 + 1


@pytest.mark.slow
def test_files_of_old_versions_are_deleted_the_newest_two_never(
    tmp_path: Path, model_dir: Path
) -> None:
    s, weight_log = (
        settings(tmp_path, model_dir, keep_checkpoints=1, keep_versions=3),
        MemoryWeightLog(),
    )
    run = begin(s, weight_log)
    go(run, 0, 4)
    run.end()
    assert sorted(p.name for p in (s.checkpoint_dir / "r").iterdir()) == ["4.0", "5.0"]
    assert sorted(p.name for p in (Path(s.weights_uri) / "r").iterdir()) == ["3.0", "4.0", "5.0"]


def test_settings_that_cannot_work_are_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(SettingsError, match=r"trainer\.model_path"):
        begin(Settings(run_id="r", data_dir=tmp_path), MemoryWeightLog())
    with pytest.raises(SettingsError, match=r"trainer\.lr_final"):
        check_settings(settings(tmp_path, model_dir, lr_final=1e-4).trainer)
    with pytest.raises(SettingsError, match=r"lr_decay=cosine: .*lr_warmup_versions=3"):
        never = {"lr_decay": "cosine", "max_versions": 3, "lr_warmup_versions": 3}
        check_settings(settings(tmp_path, model_dir, **never).trainer)
    with pytest.raises(SettingsError, match=r"trainer\.keep_best_by=val/reward: "):
        check_settings(settings(tmp_path, model_dir, keep_best_by="val/reward").trainer)
    check_settings(settings(tmp_path, model_dir, keep_best_by="val/reward_mean").trainer)
    best = {"keep_best_by": "environment/math/reward_mean"}
    with pytest.raises(SettingsError, match=r"'math' is not in trainer\.environments"):
        check_settings(settings(tmp_path, model_dir, **best).trainer)
    check_settings(settings(tmp_path, model_dir, **best, environments=["math"]).trainer)


# -- directories and lineage


def test_a_directory_is_there_completely_or_not_at_all(tmp_path: Path) -> None:
    state = VersionState(
        version=Version("r", 1, 0),
        parent_version=None,
        weights_topic_id="w",
        position=start_of("batches", "topic", None),
    )
    final = directory_of(tmp_path, state.version)
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path, state) as tmp:
        (tmp / "one").write_text("1")
        raise KeyboardInterrupt  # a kill between two files
    assert not final.exists()
    with new_directory(tmp_path, state) as tmp:
        (tmp / "sub").mkdir()
        (tmp / "sub" / "two").write_text("2")
    assert verify(final, state.version) == state
    (final / "three").write_text("3")
    with pytest.raises(InvalidCheckpoint, match="three"):
        verify(final, state.version)
    with pytest.raises(FileExistsError), new_directory(tmp_path, state):
        pass
    place = tmp_path / "no directory"
    place.write_text("a file")  # a directory that this process may not write to fails alike
    with (
        pytest.raises(StorageFailed, match=r"no directory.*trainer\.weights_uri") as failed,
        new_directory(place, state),
    ):
        pass
    assert exit_code(failed.value) == EXIT_FAILED


@pytest.mark.slow
def test_a_checkpoint_of_another_version_is_not_taken(tmp_path: Path, model_dir: Path) -> None:
    s, weight_log = settings(tmp_path, model_dir), MemoryWeightLog()
    go(begin(s, weight_log), 0, 0)
    run = s.checkpoint_dir / "r"
    shutil.rmtree(run / "1.0")
    shutil.copytree(run / "0.0", run / "1.0")
    with capture_logs() as logs:
        assert begin(s, weight_log).position == start_of("batches", "topic", None)
    (said,) = (line for line in logs if line["event"] == "checkpoint_not_usable")
    assert "is of version r/0.0, not of r/1.0" in said["error"]


def version(name: str, parent: str | None, base: str | None = None) -> WeightVersion:
    parsed = parse_version(name)
    assert parsed is not None
    return WeightVersion(
        version_id=name,
        run_id=parsed.run_id,
        sync_index=parsed.sync_index,
        attempt=parsed.attempt,
        parent_version=parent,
        format="delta" if base else "full",
        base_version=base,
        files=(),
        channel="train",
        metrics={},
        created_at=0,
    )


def all_of(log: list[WeightVersion]) -> set[Version]:
    return {version_of(record) for record in log}


def test_what_a_kept_delta_is_based_on_is_kept() -> None:
    log = [version("r/0.0", None), version("r/1.0", "r/0.0"), version("r/2.0", "r/1.0", "r/1.0")]
    log += [version("r/3.0", "r/2.0", "r/2.0"), version("r/4.0", "r/3.0", "r/3.0")]
    assert set(deletable(log, all_of(log), "r/4.0", 2)) == {Version("r", 0, 0)}
    log += [version("r/5.0", "r/4.0"), version("r/6.0", "r/5.0")]
    log[2] = replace(log[2], metrics={"val/reward_mean": 1.0})
    old = set(deletable(log, all_of(log), "r/6.0", 2, "val/reward_mean"))
    assert old == {Version("r", sync_index, 0) for sync_index in (0, 3, 4)}


def test_a_dead_branch_does_not_push_out_the_chain() -> None:
    log = [
        version("r/0.0", None),
        version("r/1.0", "r/0.0"),
        version("r/2.0", "r/1.0"),
        version("r/2.1", "r/1.0"),
    ]
    assert set(deletable(log, all_of(log), "r/2.1", 2)) == {Version("r", 0, 0)}, (
        "1.0 is the parent, 2.0 the last but one of the log"
    )


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_sync_indexes_are_what_admission_counts(every: int, stops: list[bool]) -> None:
    """Whether or not the trainer is stopped after a batch: a version's sync index is floor(last
    batch / every) + 1.
    """
    sync, start = 0, 0
    for seq, stop in enumerate(stops):
        if stop or (seq + 1) % every == 0:
            sync, start = next_sync_index(sync, start, every), seq + 1
            assert sync == seq // every + 1
