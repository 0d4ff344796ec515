"""Every algorithm from records to weights: the batch view, one update, and a run."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainer_runs import ANY_ID, MemoryWeightLog, record_of

from clawstream.demo.model import make_random_model
from clawstream.schemas.algorithms import ALGORITHMS
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    ReadyBatch,
    RewardValue,
    Segment,
    Trajectory,
    TrajectoryStep,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs
from clawstream.trainer.algorithms.registry import LoadedAlgorithm, load, needs
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import TrainingSequence, sequences_of_batch
from clawstream.trainer.data.view import batch_view, with_advantages
from clawstream.trainer.main import train
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update, with_old_logprobs
from clawstream.trainer.position import Position
from clawstream.trainer.run import Run
from clawstream.trainer.settings_check import check_algorithm, check_named_algorithm
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch

TRAINABLE = [name for name, algorithm in ALGORITHMS.items() if not needs(algorithm)]
NAN = math.nan
pytestmark = pytest.mark.usefixtures("one_thread")


def trajectory(name: str, forked: bool) -> Trajectory:
    """Two steps, of two and three tokens; if forked, the second one does not see the first."""

    def said(ids: list[int], index: int, parent: int) -> Segment:
        logprobs = pack_logprobs([-3.0 + 0.125 * (i % 4) for i in ids])
        return Segment(parent=parent, step_index=index, token_ids=pack_ids(ids), logprobs=logprobs)

    first = sum(map(ord, name)) % 11
    segments = (
        Segment(token_ids=pack_ids([2, 5, 9])),
        said([8 + first, 9 + first], 0, 0),
        Segment(parent=0 if forked else 1, token_ids=pack_ids([6])),
        said([7 + first, 10 + first, 12], 1, 2),
    )
    steps = tuple(
        TrajectoryStep(
            step_id=f"{name}~{index}.0",
            index=index,
            status="ok",
            drift="root",
            prompt_tokens=3,
            response_tokens=2,
            response_json=b"{}",
            oldest_version=f"r/{index}.0",
            newest_version=f"r/{index}.0",
            trainable=True,
            offset=index,
        )
        for index in range(2)
    )
    return Trajectory(
        run_id="r",
        trajectory_key=name,
        trajectory_id=name,
        group_id="g",
        channel="train",
        outcome="completed",
        opened_at=0,
        closed_at=1,
        part=0,
        parts=1,
        segments=segments,
        steps=steps,
    )


def reward(value: float, step_id: str | None = None) -> RewardValue:
    return RewardValue(
        source="env",
        name="r",
        function_version="1",
        value=value,
        step_id=step_id,
        reward_revision=0,
    )


def member(name: str, value: float | None, of_step: float | None = None) -> BatchMember:
    rewards = [] if value is None else [reward(value)]
    rewards += [] if of_step is None else [reward(of_step, f"{name}~0.0")]
    return BatchMember(
        trajectory_id=name,
        trajectory_key=name,
        revision=0,
        rewards=tuple(rewards),
        untrainable_steps=(),
        trainable_tokens=5,
        place=Place(topic_id="p", partition=0, first_offset=0, last_offset=0),
    )


GROUPS = (
    (member("a", 1.0, 0.5), member("b", 0.0), member("c", 0.0, 0.25)),
    (member("d", 1.0), member("e", 1.0), member("f", -1.0, 2.0)),
)


def fetched(algorithm: str, seq: int = 0) -> FetchedBatch:
    batch = ReadyBatch(
        run_id="r",
        channel="train",
        batch_seq=seq,
        groups=tuple(
            BatchGroup(group_id=str(i), round=seq, n=len(members), members=members)
            for i, members in enumerate(GROUPS)
        ),
        policy_version=0,
        sync_every=1,
        algorithm=algorithm,
        reward_weights={},
        input_topic_id="c",
        input_partition=0,
        input_from=0,
        input_to=0,
        content_hash="",
        trainable_tokens=30,
        created_at_event_time=0,
    )
    position = Position(topic_id="t", next_offset=2 * seq + 2, next_batch_seq=seq + 1)
    return FetchedBatch(
        batch=batch,
        record=record_of(position),
        trajectories={
            m.trajectory_id: trajectory(m.trajectory_id, m.trajectory_id == "b")
            for group in GROUPS
            for m in group
        },
        position=position,
        read_seconds=0.0,
    )


def settings(model_dir: Path, **trainer: object) -> Settings:
    section = {"model_path": model_dir, "device": "cpu", "lr": 1e-3, "minibatches": 1, **trainer}
    return Settings.model_validate({"run_id": "r", "trainer": section})


def sequences_for(algorithm: LoadedAlgorithm) -> tuple[TrainingSequence, ...]:
    given = fetched(algorithm.name)
    data = sequences_of_batch(
        given.batch, given.trajectories, algorithm.smallest_group, algorithm.rewards, ANY_ID
    )
    view = batch_view(data.sequences, data.members, "r", 3)
    return with_advantages(data.sequences, algorithm.advantage(view, algorithm.settings))


def test_the_view_has_the_indexes_and_rewards_of_the_records() -> None:
    given = fetched("grpo")
    data = sequences_of_batch(given.batch, given.trajectories, 2, "step", ANY_ID)
    view = batch_view(data.sequences[:4], data.members, "r", 3)
    # a is linear, b is forked into two sequences, c is linear.
    assert view.sequence.tolist() == [0] * 5 + [1] * 2 + [2] * 3 + [3] * 5
    assert view.sequence_trajectory.tolist() == [0, 1, 1, 2]
    assert not view.cut.any()
    at_limit = [
        replace(trajectory, steps=(*trajectory.steps[:-1], last))
        for trajectory in given.trajectories.values()
        for last in [replace(trajectory.steps[-1], finish_reason="length")]
    ]
    data_of_cut = sequences_of_batch(
        given.batch, {one.trajectory_id: one for one in at_limit}, 2, "step", ANY_ID
    )
    cut = batch_view(data_of_cut.sequences[:4], data_of_cut.members, "r", 3).cut
    assert cut.tolist() == [True, False, True, True], "the second one ends with the first step"
    assert view.step.tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 5]
    assert view.position[:10].tolist() == [3, 4, 6, 7, 8, 3, 4, 4, 5, 6]
    assert view.staleness[:5].tolist() == [3, 3, 2, 2, 2]
    assert view.step_trajectory.tolist() == [i for i in range(6) for _ in range(2)]
    assert view.turn.tolist() == [0, 1] * 6
    np.testing.assert_array_equal(view.step_rewards[:6], [0.5, NAN, NAN, NAN, 0.25, NAN])
    assert view.rewards.tolist() == [1, 0, 0, 1, 1, -1]
    assert view.group.tolist() == [0, 0, 0, 1, 1, 1]
    assert view.trajectory.tolist() == [0] * 5 + [1] * 5 + [2] * 5


def test_a_member_is_left_out_without_a_reward_that_the_algorithm_reads() -> None:
    given = fetched("sft")
    group = BatchGroup(
        group_id="g", round=0, n=3, members=(member("a", None), member("b", None, 1.0))
    )
    batch = replace(given.batch, groups=(group,))
    names = {
        use: [
            m.trajectory_id
            for m in sequences_of_batch(batch, given.trajectories, 1, use, ANY_ID).members
        ]
        for use in ("none", "step", "trajectory")
    }
    assert names == {"none": ["a", "b"], "step": ["b"], "trajectory": []}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINABLE)
def test_passes_of_any_size_give_the_same_loss_and_gradient(model_dir: Path, name: str) -> None:
    algorithm = load(name, {}, ())
    sequences = sequences_for(algorithm)
    one, many = (
        update(
            Policy(model_dir, settings(model_dir, micro_batch_tokens=n).trainer),
            sequences,
            0,
            algorithm,
            1e-3,
            None,
        ).steps[0]
        for n in (16384, 1)
    )
    assert one.skipped is None and one.grad_norm
    assert many.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward_weighted", "rloo"])
def test_supervised_training_is_of_the_model_itself_whatever_the_data_was_sampled_at(
    tmp_path: Path, model_dir: Path, name: str
) -> None:
    """A model that is trained on softmax(z / 0.5) gives flatter distributions than its data."""
    losses = []
    for temperature in (None, 0.5):
        s = settings(model_dir, first_attempt=1).model_copy(
            update={"data_dir": tmp_path / str(temperature)}
        )
        weight_log, start = (
            MemoryWeightLog(),
            Position(topic_id="t", next_offset=0, next_batch_seq=0),
        )
        run = open_run(s, weight_log, [], set(), lambda _, at=start: at)  # type: ignore[misc]
        given = fetched(name, 0)
        for key, trajectory in given.trajectories.items():
            steps = [replace(step, logprobs_temperature=temperature) for step in trajectory.steps]
            given.trajectories[key] = replace(trajectory, steps=tuple(steps))
        train_batch(run, given)
        run.publish()
        losses.append(weight_log.published[-1].metrics["loss"])
    assert (losses[0] == losses[1]) == (name != "rloo")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_algorithm_trains_in_a_run(tmp_path: Path, model_dir: Path, name: str) -> None:
    s = settings(model_dir, first_attempt=1).model_copy(update={"data_dir": tmp_path})
    weight_log = MemoryWeightLog()
    run: Run = open_run(
        s, weight_log, [], set(), lambda _: Position(topic_id="t", next_offset=0, next_batch_seq=0)
    )
    for seq in range(2):
        train_batch(run, fetched(name, seq))
        run.publish()
    assert len({tuple(f.sha256 for f in v.files) for v in weight_log.published}) == 3
    for version in weight_log.published[1:]:
        assert version.metrics["optimizer_steps"] == 1 and version.metrics["members"] == 6
        assert math.isfinite(version.metrics["loss"])


def test_an_update_with_recomputed_old_log_probabilities_starts_at_ratio_one(
    model_dir: Path,
) -> None:
    """The first step of PPO then has loss -mean(w A), w the weight of the sampling version."""
    algorithm = load("dapo", {"correction": "truncate", "correction_max": 1.5}, ())
    sequences = sequences_for(algorithm)
    s = settings(model_dir, recompute_old_logprobs=True).trainer
    policy = Policy(model_dir, s)
    batch = collate(sequences, s.temperature, policy.device)
    now = policy.logprobs(batch).detach()
    old = collate(with_old_logprobs(policy, sequences), s.temperature, policy.device).old_logprobs
    assert torch.allclose(old, now, atol=1e-5)
    weights = (now - batch.logprobs).exp().clamp(max=1.5)
    (step,) = update(policy, sequences, 0, algorithm, 1e-3, None).steps
    assert step.loss == pytest.approx(-(weights * batch.advantages).mean().item(), rel=1e-4)


@pytest.mark.parametrize("setting", [None, True, False])
def test_gspo_compares_with_the_trainers_own_log_probabilities(
    model_dir: Path, setting: bool | None
) -> None:
    """An engine in bfloat16 differs by more than its bounds: samples with a negative advantage
    would have no gradient.
    """
    algorithm = load("gspo", {}, ())
    s = settings(model_dir, recompute_old_logprobs=setting).trainer
    policy = Policy(model_dir, s)
    noise = np.random.default_rng(0)
    sequences = [engine_noise(one, policy, noise) for one in sequences_for(algorithm)]
    (step,) = update(policy, sequences, 0, algorithm, 1e-3, None).steps
    measured = step.measured
    assert measured is not None
    assert measured.clipped_negative is not None and measured.clipped_negative[1] > 0
    clipped, tokens = measured.clipped_negative
    assert (clipped == 0) == (setting is not False), f"{clipped} of {tokens}"


def engine_noise(
    sequence: TrainingSequence, policy: Policy, noise: np.random.Generator
) -> TrainingSequence:
    """Return a sequence as an engine in bfloat16 records it: 0.02 nats a token off, sampled from
    its own distribution, so that the policy finds its tokens less probable.
    """
    own = policy.logprobs(collate([sequence], 1.0, policy.device)).detach().numpy()
    logprobs = sequence.tokens.logprobs.copy()
    logprobs[sequence.tokens.mask] = own + np.abs(noise.normal(0, 0.02, len(own)))
    return replace(sequence, tokens=sequence.tokens._replace(logprobs=logprobs))


def test_the_entropy_is_that_of_the_distribution_of_the_engine(model_dir: Path) -> None:
    algorithm = load("dapo", {"entropy_coef": 0.5}, ())
    sequences = sequences_for(algorithm)[:1]
    policy = Policy(model_dir, settings(model_dir, temperature=2.0).trainer)
    batch = collate(sequences, 2.0, policy.device)
    logprobs, entropy = policy.logprobs_and_entropy(batch)
    assert torch.equal(logprobs, policy.logprobs(batch))
    logits = policy.model(input_ids=batch.token_ids).logits[0]
    places = np.flatnonzero(sequences[0].tokens.mask) - 1
    p = torch.softmax(logits[places] / 2.0, -1)
    assert torch.allclose(entropy, -(p * p.log()).sum(-1), atol=1e-5)
    plain = load("dapo", {}, ())
    losses = [
        update(Policy(model_dir, policy.settings), sequences, 0, a, 1e-3, None).steps[0].loss
        for a in (plain, algorithm)
    ]
    assert losses[0] is not None and losses[1] is not None
    assert losses[0] - losses[1] == pytest.approx(0.5 * entropy.mean().item(), rel=1e-4)


def test_a_function_of_the_users_own_trains(tmp_path: Path, model_dir: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def loss(batch, settings):\n"
        "    square = batch.advantages ** 2\n"
        "    return -batch.logprobs * square, {'square': square}\n\n\n"
        "def advantage(batch, settings):\n    return batch.turn[batch.step] + 1.0\n"
    )
    algorithm = load(
        "cispo", {"advantage": "mine.py:advantage", "loss": "mine.py:loss"}, (tmp_path,)
    )
    sequences = sequences_for(algorithm)
    policy = Policy(model_dir, settings(model_dir).trainer)
    batch = collate(sequences, 1.0, policy.device)
    expected = -(policy.logprobs(batch).detach() * batch.advantages**2).mean().item()
    assert set(batch.advantages.tolist()) == {1.0, 2.0}
    (step,) = update(policy, sequences, 0, algorithm, 1e-3, None).steps
    assert step.loss == pytest.approx(expected, rel=1e-4)
    measured = step.measured
    assert measured is not None
    squares = batch.advantages.square()
    assert measured.own == {"own/square": pytest.approx(squares.sum().item())}


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("teacher") / "m", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("distillation", {}),
        ("grpo", {"algorithm": {"kl_coef": 0.1}}),
        ("reinforce_pp", {"algorithm": {"kl_coef": 0.1}}),
        ("reinforce_pp_baseline", {"algorithm": {"kl_coef": 0.1}}),
    ],
)
def test_a_reference_or_teacher_model_gives_its_column(
    tmp_path: Path,
    model_dir: Path,
    teacher_dir: Path,
    name: str,
    trainer: dict[str, object],
) -> None:
    """The loss of the first step against one computed from log-probabilities of both models."""
    s = settings(
        model_dir,
        first_attempt=1,
        reference_path=teacher_dir,
        teacher_path=teacher_dir,
        micro_batch_tokens=20,
        **trainer,
    )
    check_named_algorithm(name, s.trainer)
    algorithm = load(name, s.trainer.algorithm.overrides, ())
    given = fetched(name)
    data = sequences_of_batch(
        given.batch, given.trajectories, algorithm.smallest_group, algorithm.rewards, ANY_ID
    )
    policy, other = (Policy(path, s.trainer) for path in (model_dir, teacher_dir))
    batch = collate(data.sequences, 1.0, policy.device)
    with torch.no_grad():
        now, frozen = policy.logprobs(batch), other.logprobs(batch)
    columns = np.split(frozen.numpy(), np.cumsum(batch.lengths.tolist())[:-1])
    scored = [
        replace(q, ref_logprobs=column, teacher_logprobs=column)
        for q, column in zip(data.sequences, columns, strict=True)
    ]
    view = batch_view(scored, data.members, "r", 0)
    assert view.ref_logprobs is not None and view.teacher_logprobs is not None
    a = torch.tensor(algorithm.advantage(view, algorithm.settings))
    ratio, d = (now - batch.logprobs).exp(), now - frozen
    surrogate = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    weight = 1 / batch.lengths[batch.sequence] / len(batch.lengths)
    expected = {
        "distillation": (-ratio.clamp(max=2.0) * (frozen - batch.logprobs) * now).mean(),
        "grpo": ((surrogate + 0.1 * ((-d).exp() - 1 + d)) * weight).sum(),
        "reinforce_pp": surrogate.mean(),
        "reinforce_pp_baseline": (surrogate + 0.1 * d * d / 2).mean(),
    }[name]
    weight_log = MemoryWeightLog()
    run = open_run(
        s.model_copy(update={"data_dir": tmp_path}),
        weight_log,
        [],
        set(),
        lambda _: Position(topic_id="t", next_offset=0, next_batch_seq=0),
    )
    train_batch(run, given)
    run.publish()
    assert weight_log.published[1].metrics["loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_a_part_that_does_not_give_one_number_a_token_is_refused(
    tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "wrong.py").write_text(
        "def loss(batch, settings):\n    return batch.logprobs.mean()\n\n\n"
        "def advantage(batch, settings):\n    return batch.rewards\n"
    )
    with pytest.raises(SettingsError, match=r"algorithm\.advantage: it returned shape \(6,\)"):
        sequences_for(load("cispo", {"advantage": "wrong.py:advantage"}, (tmp_path,)))
    algorithm = load("cispo", {"loss": "wrong.py:loss"}, (tmp_path,))
    policy = Policy(model_dir, settings(model_dir).trainer)
    with pytest.raises(SettingsError, match=r"algorithm\.loss: its loss has shape \(\)"):
        update(policy, sequences_for(algorithm), 0, algorithm, 1e-3, None)


def test_an_algorithm_that_cannot_be_trained_is_refused_before_a_batch(model_dir: Path) -> None:
    s = settings(model_dir)
    with pytest.raises(SettingsError, match=r"distillation'.* needs trainer\.teacher_path"):
        check_named_algorithm("distillation", s.trainer)
    check_named_algorithm("ppo", s.trainer)
    with pytest.raises(SettingsError, match=r"ppo'.* needs trainer\.critic\.path"):
        check_named_algorithm("ppo", Settings().trainer)
    with pytest.raises(SettingsError, match=r"needs trainer\.reference_path"):
        check_named_algorithm("grpo", settings(model_dir, algorithm={"kl_coef": 0.1}).trainer)
    sft = Settings.model_validate({"admit": {"policy": {"algorithm": "sft"}}})
    with pytest.raises(SettingsError, match="drop_zero_variance: sft reads no rewards"):
        check_algorithm(sft)
    check_algorithm(s)


@pytest.mark.parametrize("part", ["advantage", "loss"])
def test_a_function_that_does_not_exist_ends_the_trainer_at_its_start(part: str) -> None:
    s = Settings.model_validate({"trainer": {"algorithm": {part: "missing.py:function"}}})
    with pytest.raises(SettingsError, match=rf"trainer\.algorithm\.{part}=.*no file missing\.py"):
        train(s, threading.Event())


def test_a_model_that_the_users_own_estimator_lacks_ends_the_trainer_at_its_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "def advantage(batch, settings): ...\n\nadvantage.needs = {'teacher_logprobs'}\n"
    )
    s = Settings.model_validate(
        {
            "trainer": {"algorithm": {"advantage": "mine.py:advantage"}},
            "functions": {"dirs": [tmp_path]},
        }
    )
    with pytest.raises(SettingsError, match=r"trainer\.algorithm\.advantage: it needs trainer\.te"):
        train(s, threading.Event())
