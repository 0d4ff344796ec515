"""The critic: its values, its loss, and a run with it, interrupted or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainer_runs import ANY_ID

from benchmarks.learning.batches import RUN, MemoryWeightLog, Reply, batch_of, resume
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import WeightVersion
from clawstream.schemas.settings import Settings
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.sequences import TrainingSequence, sequences_of_batch
from clawstream.trainer.model.critic import Critic
from clawstream.trainer.run import Run
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def settings(data_dir: Path, model_dir: Path, **trainer: object) -> Settings:
    section = {"model_path": model_dir, "device": "cpu", "lr": 1e-3, **trainer}
    return Settings.model_validate({"run_id": RUN, "data_dir": data_dir, "trainer": section})


def batch(seq: int, algorithm: str = "ppo") -> FetchedBatch:
    """Two groups of three replies, which depend on `seq` alone."""
    groups = [
        [
            Reply(
                prompt=(2, 5, 9),
                tokens=[(seq * 7 + g * 5 + m * 3 + k) % 20 + 8 for k in range(2 + m)],
                logprobs=[-3.0] * (2 + m),
                reward=float((seq + g + m) % 3),
                version=f"{RUN}/0.0",
            )
            for m in range(3)
        ]
        for g in range(2)
    ]
    return batch_of(groups, algorithm, seq)


def sequences() -> tuple[TrainingSequence, ...]:
    given = batch(0)
    return sequences_of_batch(given.batch, given.trajectories, 1, "step", ANY_ID).sequences


def with_returns(critic: Critic, value: float) -> list[TrainingSequence]:
    return [
        replace(s, returns=np.full(s.trained_tokens, value, np.float32))
        for s in critic.score(sequences())
    ]


def begin(s: Settings, weight_log: MemoryWeightLog) -> Run:
    taken = {v for r in weight_log.published if (v := parse_version(r.version_id)) is not None}
    return open_run(s, weight_log, weight_log.published, taken, resume)


def go(run: Run, first: int, last: int, algorithm: str = "ppo") -> None:
    for seq in range(first, last + 1):
        train_batch(run, batch(seq, algorithm))
        run.publish()
    run.end()


def weights(version: WeightVersion) -> set[str]:
    return {f.sha256 for f in version.files if f.url.endswith(".safetensors")}


def test_values_are_those_of_the_hidden_state_before_each_token(
    tmp_path: Path, model_dir: Path
) -> None:
    s = settings(tmp_path, model_dir).trainer
    state = torch.get_rng_state()
    critic = Critic(model_dir, s, CPU, 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(not np.any(scored.values) for scored in critic.score(sequences()))
    with torch.no_grad():
        critic.model.weight.uniform_(-1, 1)
        critic.model.bias.fill_(0.5)
    for sequence, scored in zip(sequences(), critic.score(sequences()), strict=True):
        ids = torch.tensor(sequence.tokens.ids).long().unsqueeze(0)
        hidden = critic.model.backbone(input_ids=ids).last_hidden_state[0]
        before = hidden[np.flatnonzero(sequence.tokens.mask) - 1]
        expected = before @ critic.model.weight + 0.5
        np.testing.assert_allclose(scored.values, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_update_takes_the_mean_over_the_tokens_for_passes_of_any_size(
    tmp_path: Path, model_dir: Path
) -> None:
    """At values of zero the clipped loss of a return of 2 is 2, whatever the pass."""
    for tokens in (1, 16384):
        s = settings(tmp_path, model_dir, micro_batch_tokens=tokens, minibatches=1).trainer
        critic = Critic(model_dir, s, CPU, 0)
        stats = critic.update(with_returns(critic, 2.0), 0)
        assert stats.losses == pytest.approx([2.0], rel=1e-6)
        assert stats.explained_variance is None and stats.skipped == ()
        # The first step moves the bias by the learning rate.
        assert critic.model.bias.item() == pytest.approx(s.critic.lr, rel=1e-3)


@pytest.mark.slow
def test_the_critic_learns_a_return(tmp_path: Path, model_dir: Path) -> None:
    critic = Critic(model_dir, settings(tmp_path, model_dir, critic={"lr": 1e-2}).trainer, CPU, 0)
    for seq in range(10):
        critic.update(with_returns(critic, 2.0), seq)
    column = collate(critic.score(sequences()), 1.0, CPU).values
    assert column is not None and (column - 2.0).abs().max() < 0.3


def test_an_update_that_is_not_finite_is_skipped(tmp_path: Path, model_dir: Path) -> None:
    critic = Critic(model_dir, settings(tmp_path, model_dir, minibatches=1).trainer, CPU, 0)
    before = {name: tensor.clone() for name, tensor in critic.model.state_dict().items()}
    stats = critic.update(with_returns(critic, float("inf")), 0)
    assert stats.losses == () and "inf" in stats.skipped[0]
    assert all(torch.equal(t, before[name]) for name, t in critic.model.state_dict().items())


def test_a_critic_that_cannot_work_is_refused(tmp_path: Path, model_dir: Path) -> None:
    run = begin(settings(tmp_path, model_dir, critic={"path": tmp_path}), MemoryWeightLog())
    with pytest.raises(SettingsError, match=r"trainer\.critic\.path.*no Hugging Face model"):
        train_batch(run, batch(0))
    critic = Critic(model_dir, settings(tmp_path, model_dir).trainer, CPU, 0)
    tokens = sequences()[0].tokens
    foreign = replace(sequences()[0], tokens=tokens._replace(ids=tokens.ids + 1000))
    with pytest.raises(SettingsError, match=r"trainer\.critic\.path: the model has \d+ token ids"):
        critic.score([foreign])


@pytest.mark.slow
def test_the_critic_warms_up_trains_and_is_never_published(tmp_path: Path, model_dir: Path) -> None:
    s = settings(tmp_path, model_dir, critic={"warmup_versions": 2})
    weight_log = MemoryWeightLog()
    go(begin(s, weight_log), 0, 3)
    versions = weight_log.published
    assert len({*map(frozenset, map(weights, versions[:3]))}) == 1, "the policy waits"
    assert weights(versions[3]) != weights(versions[2]) != weights(versions[4])
    assert "loss" not in versions[1].metrics and "loss" in versions[3].metrics
    for version in versions[1:]:
        assert {"value_loss", "explained_variance", "critic_seconds"} <= version.metrics.keys()
        assert not any("critic" in Path(file.url).name for file in version.files)
    assert versions[1].metrics["explained_variance"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
def test_an_algorithm_without_values_loads_no_critic(tmp_path: Path, model_dir: Path) -> None:
    s = settings(tmp_path, model_dir, critic={"path": "/nowhere"})
    weight_log = MemoryWeightLog()
    go(begin(s, weight_log), 0, 0, "rloo")
    assert weight_log.published[1].metrics.keys().isdisjoint({"value_loss", "critic_seconds"})


@pytest.mark.slow
def test_a_resume_with_a_critic_is_bit_equal(tmp_path: Path, model_dir: Path) -> None:
    logs = [MemoryWeightLog(), MemoryWeightLog()]
    runs = []
    for name, weight_log, stops in (("whole", logs[0], [2]), ("resumed", logs[1], [0, 2])):
        s = settings(tmp_path / name, model_dir, critic={"lr": 1e-3, "warmup_versions": 1})
        first = 0
        for last in stops:
            run = begin(s, weight_log)
            go(run, first, last)
            first = last + 1
        runs.append(run)
    whole, resumed = ([dict(v.metrics) for v in weight_log.published[1:]] for weight_log in logs)
    for name in ("loss", "value_loss", "explained_variance"):
        assert [m.get(name) for m in whole] == [m.get(name) for m in resumed]
    assert weights(logs[0].published[-1]) == weights(logs[1].published[-1])
    one, other = (run.auxiliary.state for run in runs)
    for name, tensor in one["critic_model"].state_dict().items():
        assert torch.equal(tensor, other["critic_model"].state_dict()[name])
    for parameter, moments in one["critic_optimizer"].state_dict().items():
        for name, tensor in moments.items():
            assert torch.equal(tensor, other["critic_optimizer"].state_dict()[parameter][name])
