"""Pinning the data of an offline training, and the settings of its trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.export_lake import RUN, ExportLake, turn
from support.small_lake import SmallLake

from clawstream.export.selection import trajectory_keys
from clawstream.ops.replay.lake_source import LakeReplaySource, Span, snapshot_versions
from clawstream.ops.replay.offline import name_of, settings_for_training
from clawstream.ops.replay.record_filter import RecordFilter
from clawstream.schemas.records import PolicyApplied, Step
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.admit.policy import policy_of
from clawstream.stream_jobs.lake.delta.snapshots import take_snapshot


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, run_id=RUN)


@pytest.mark.slow
def test_the_condition_selects_the_trajectories_of_a_replay(settings: Settings) -> None:
    lake = ExportLake(SmallLake(settings), {})
    lake.put("a-0", [turn("a-0", 0, [1], [2])], 1.0, "a")
    lake.put("a-1", [turn("a-1", 0, [1], [3])], 0.0, "a")
    versions = take_snapshot(settings)["versions"]
    keys = trajectory_keys(settings, versions, "reward > group_reward_mean")
    assert keys == {"a-0"}
    kept = RecordFilter(RUN, "offline", trajectory_keys=frozenset(keys))
    source = LakeReplaySource(settings, snapshot_versions(settings, versions), 1, Span(), kept)
    steps = [e.record for e in source.events() if isinstance(e.record, Step)]
    assert [(s.step_id, s.run_id, s.version_first) for s in steps] == [
        ("a-0~0.0", "offline", "offline/1.0")
    ]


@pytest.mark.slow
def test_a_condition_reads_the_training_reward(settings: Settings) -> None:
    """`reward` is the sum without weights; the policy weighs env/score with -2."""
    lake = ExportLake(SmallLake(settings), {})
    lake.put("a-0", [turn("a-0", 0, [1], [2])], 1.0, "a")
    lake.put("a-1", [turn("a-1", 0, [1], [3])], 0.0, "a")
    policy = replace(policy_of(settings, 1, 0), run_id=RUN, reward_weights={"env/score": -2.0})
    applied = PolicyApplied(
        run_id=RUN, channel="train", policy=policy, input_topic_id="C", from_offset=0
    )
    lake.lake.put("run_events", "RR", applied)
    versions = take_snapshot(settings)["versions"]
    assert trajectory_keys(settings, versions, "training_reward < 0") == {"a-0"}
    assert trajectory_keys(settings, versions, "Training_Reward = 0") == {"a-1"}


def test_the_name_depends_on_all_that_the_batches_depend_on(settings: Settings) -> None:
    versions = {"steps": 1, "trajectories": 2}
    name = name_of(settings, versions, "true")
    assert name == name_of(settings, dict(reversed(versions.items())), "true")
    policy = settings.admit.policy.model_copy(update={"group_size": 3})
    tuned = settings.model_copy(
        update={"admit": settings.admit.model_copy(update={"policy": policy})}
    )
    others = {
        name_of(settings, {**versions, "steps": 2}, "true"),
        name_of(settings, versions, "reward > 0"),
        name_of(tuned, versions, "true"),
    }
    assert len({name, *others}) == 4
    slower = settings.model_copy(
        update={"trainer": settings.trainer.model_copy(update={"lr": 1e-7})}
    )
    assert name_of(slower, versions, "true") == name


@pytest.mark.parametrize(
    ("limit", "newest_attempt", "expected"), [(None, None, (7, 2)), (3, 4, (3, 5)), (9, 0, (7, 2))]
)
def test_the_trainer_ends_with_the_batches_and_reuses_no_version_id(
    settings: Settings, limit: int | None, newest_attempt: int | None, expected: tuple[int, int]
) -> None:
    trainer = settings.trainer.model_copy(update={"max_versions": limit, "first_attempt": 2})
    kafka = settings.kafka.model_copy(update={"bootstrap_servers": "localhost:1"})
    given = settings.model_copy(update={"trainer": trainer, "kafka": kafka})
    report: dict[str, Any] = {
        "name": "n", "run": "n", "partitions": 4, "newest_attempt": newest_attempt
    }  # fmt: skip
    made = settings_for_training(given, report, 7)
    assert (made.trainer.max_versions, made.trainer.first_attempt) == expected
    assert (made.run_id, made.kafka.topic_prefix) == ("n", "replay-n")
