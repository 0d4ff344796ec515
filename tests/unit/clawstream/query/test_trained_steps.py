"""What the views say of training is what the trainer did, for algorithms with different rules.

A trainer trains a batch in memory; the lake gets its records; the views are asked.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.small_lake import SmallLake
from support.trainer_runs import MemoryWeightLog, begin, fetched, settings

from clawstream.query.connection import connect
from clawstream.schemas.records import BatchMember, RewardValue, Trajectory
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.step import train_batch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
NONE, FEW = "no training reward", "its group has fewer than 2 training rewards"
OUTSIDE = "an id in it or before it is outside the model's vocabulary"
INFINITE = "no token of it has a log-probability that is finite"
REDACTED = "all its tokens are redacted"
OWN = {"t0-1-0": "retried", "t0-1-1": "left out by curation, or by policy 0"}
"""Steps that no algorithm trains, whose members have rewards."""


def value(reward: float | None, step_id: str | None = None) -> RewardValue:
    return RewardValue(
        source="rule", name="r", function_version="1", value=reward, step_id=step_id,
        reward_revision=0,
    )  # fmt: skip


def changed(trajectory: Trajectory, **segment: bytes) -> Trajectory:
    """Change the sampled segment."""
    prompt, said = trajectory.segments
    return replace(trajectory, segments=(prompt, replace(said, **segment)))


def batch() -> FetchedBatch:
    """A batch of four groups of three; t0-<group>-<member> is a trajectory of one step.

    Group 0: rewards 1, 0, none. Group 1: two steps that are left out by others, and one that is
    fine. Group 2: rewards of one member, a step reward of another one. Group 3: an id outside the
    vocabulary, infinite log-probabilities, redacted tokens.
    """
    first, second = fetched(0), fetched(0)
    trajectories = dict(first.trajectories)
    for group, name in ((2, "t0-0"), (3, "t0-1")):
        for m in range(3):
            old = second.trajectories[f"{name}-{m}"]
            new = f"t0-{group}-{m}"
            steps = (replace(old.steps[0], step_id=f"{new}~1.0"),)
            trajectories[new] = replace(old, trajectory_key=new, trajectory_id=new, steps=steps)
    (step,) = trajectories["t0-1-0"].steps
    retried = replace(step, trainable=False, untrainable_reason="retried")
    trajectories["t0-1-0"] = replace(trajectories["t0-1-0"], steps=(retried,))
    for name, segment in (
        ("t0-3-0", {"token_ids": pack_ids([8, 9, 10**6, 10])}),
        ("t0-3-1", {"logprobs": pack_logprobs([float("-inf")] * 4)}),
        ("t0-3-2", {"logprobs": pack_logprobs([float("nan")] * 4)}),
    ):
        trajectories[name] = changed(trajectories[name], **segment)
    rewards: dict[str, tuple[RewardValue, ...]] = {
        "t0-0-2": (value(None),),
        "t0-2-1": (value(2.0, "t0-2-1~1.0"),),
        "t0-2-2": (),
    }

    def member(old: BatchMember, name: str) -> BatchMember:
        number = list(trajectories).index(name)
        left_out = ("t0-1-1~1.0",) if name == "t0-1-1" else ()
        return replace(
            old, trajectory_id=name, trajectory_key=name, untrainable_steps=left_out,
            rewards=rewards.get(name, (value(float(int(name[-1]) % 2)),)),
            place=replace(old.place, topic_id="TT", first_offset=number, last_offset=number),
        )  # fmt: skip

    groups = [
        replace(
            first.batch.groups[0],
            group_id=f"g{g}",
            members=tuple(
                member(old, f"t0-{g}-{m}") for m, old in enumerate(first.batch.groups[0].members)
            ),
        )
        for g in range(4)
    ]
    return replace(
        first, batch=replace(first.batch, groups=tuple(groups)), trajectories=trajectories
    )


ALWAYS = OWN | {"t0-3-0": OUTSIDE, "t0-3-1": INFINITE, "t0-3-2": REDACTED}
LONELY = {"t0-2-0": FEW, "t0-2-1": NONE, "t0-2-2": NONE}
UNTRAINED = {
    "sft": {},
    "reinforce_pp": {"t0-0-2": NONE, "t0-2-2": NONE},
    "reward_weighted": {"t0-0-2": NONE, "t0-2-1": NONE, "t0-2-2": NONE},
    "ppo": {"t0-0-2": NONE, "t0-2-2": NONE},
    "ppo_steps": {"t0-0-2": NONE, "t0-2-2": NONE},
    "grpo_process": {"t0-0-2": NONE, "t0-2-2": NONE},
    "cispo": {"t0-0-2": NONE} | LONELY,
    "rloo": {"t0-0-2": NONE} | LONELY,
}
"""Algorithm to the further trajectories that it leaves out, counted by hand."""


def lake_of(directory: Path, given: FetchedBatch, log: MemoryWeightLog) -> Settings:
    """Write what Kafka has of a batch and its version to a lake."""
    here = Settings(data_dir=directory)
    lake = SmallLake(here)
    lake.put("trajectories", "TT", *given.trajectories.values())
    lake.put("groups", "topic", given.batch)
    lake.put("trained_tokens", "NN", *log.trained)
    lake.put("trained_trajectories", "NT", *log.decided)
    lake.put("weights", "WW", *log.published)
    return here


@pytest.mark.parametrize("algorithm", UNTRAINED)
def test_trained_is_what_the_trainer_did(tmp_path: Path, model_dir: Path, algorithm: str) -> None:
    given, log = batch(), MemoryWeightLog()
    given = replace(given, batch=replace(given.batch, algorithm=algorithm))
    critic = {"warmup_versions": 0}
    run = begin(settings(tmp_path / "run", model_dir, minibatches=1, critic=critic), log)
    train_batch(run, given)
    run.publish()
    run._checkpoints.wait()
    untrained = ALWAYS | UNTRAINED[algorithm]
    found = connect(lake_of(tmp_path, given, log)).execute(
        "SELECT trajectory_id, trained, untrained_reason FROM lineage_steps "
        "WHERE version_id = 'r/1.0' ORDER BY 1"
    )
    assert found.fetchall() == [
        (name, name not in untrained, untrained.get(name)) for name in sorted(given.trajectories)
    ]
    tokens = {t.trajectory_id for t in log.trained}
    assert tokens == given.trajectories.keys() - untrained.keys()


@pytest.mark.parametrize(
    ("trainer", "algorithm", "reason"),
    [
        ({"critic": {"warmup_versions": 3}}, "ppo", "the critic warms up"),
        ({"record_tokens": 0.0}, "cispo", None),
    ],
)
def test_the_record_is_whole_whatever_else_is_recorded(
    tmp_path: Path, model_dir: Path, trainer: dict[str, object], algorithm: str, reason: str | None
) -> None:
    log, given = MemoryWeightLog(), fetched(0)
    given = replace(given, batch=replace(given.batch, algorithm=algorithm))
    run = begin(settings(tmp_path, model_dir, **trainer), log)
    train_batch(run, given)
    run.publish()
    run._checkpoints.wait()
    steps = {s.step_id: s.untrained_reason for one in log.decided for s in one.steps}
    assert steps.keys() == {f"{name}~1.0" for name in given.trajectories} and not log.trained
    for why in steps.values():
        assert why is None if reason is None else (why or "").startswith(reason)
    assert {(one.version_id, one.batch_seq) for one in log.decided} == {("r/1.0", 0)}
