"""A batch that mixes environments: each has its own algorithm, and weighs as its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.trainer_runs import MemoryWeightLog, begin, fetched

from clawstream.schemas.algorithms import ALGORITHMS
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings, TrainerSettings
from clawstream.trainer.algorithms.registry import load, load_all
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.environments import by_environment
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import Algorithms, update
from clawstream.trainer.settings_check import check_algorithm

pytestmark = pytest.mark.usefixtures("one_thread")


def settings(**trainer: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"device": "cpu", "minibatches": 1, **trainer})


def in_environments(metadata: Sequence[bytes | None], seq: int = 0) -> FetchedBatch:
    """Return a batch whose groups have these metadata."""
    found = fetched(seq)
    group_of = {
        member.trajectory_id: i
        for i, group in enumerate(found.batch.groups)
        for member in group.members
    }
    trajectories = {
        name: replace(trajectory, metadata_json=metadata[group_of[name]])
        for name, trajectory in found.trajectories.items()
    }
    return replace(found, trajectories=trajectories)


NAMES = st.sampled_from([None, "math", "code", "games"])


@given(st.lists(NAMES, min_size=2, max_size=2))
def test_every_group_is_in_one_part_and_the_others_are_together(found: list[str | None]) -> None:
    batch = in_environments([orjson.dumps({"id": 1, "environment": name}) for name in found])
    parts = by_environment(batch.batch, batch.trajectories, ("math", "code"))
    expected: dict[str | None, list[str]] = {}
    for name, group in zip(found, batch.batch.groups, strict=True):
        expected.setdefault(None if name == "games" else name, []).append(group.group_id)
    assert {n: [g.group_id for g in part.groups] for n, part in parts.items()} == expected


@pytest.mark.parametrize("metadata", [None, b"", b"{", b"[1]", b"{}", b'{"environment": 1}'])
def test_metadata_without_an_environment_means_the_algorithm_of_the_run(
    metadata: bytes | None,
) -> None:
    batch = in_environments([metadata, metadata])
    assert by_environment(batch.batch, batch.trajectories, ("math",)) == {None: batch.batch}


def sequences(environment: str | None, count: int, seed: int) -> list[TrainingSequence]:
    rng = np.random.default_rng(seed)
    found = []
    for group in range(count):
        n = int(rng.integers(5, 14))
        tokens = Tokens(
            rng.integers(8, 30, n).astype(np.int32),
            np.arange(n) >= 3,
            rng.normal(-3.0, 0.3, n).astype(np.float32),
            np.full(n, np.nan, np.float32),
            np.full(n, "r/0.0", object),
            np.zeros(n, np.int32),
        )
        advantages = np.full(n - 3, rng.normal(), np.float32)
        found.append(
            TrainingSequence("t", tokens, advantages, group=group, environment=environment)
        )
    return found


def updated(
    model_dir: Path, given: Sequence[TrainingSequence], algorithms: Algorithms
) -> tuple[float, list[torch.Tensor], dict[str, float]]:
    """Return loss and gradient of one optimiser step without clipping."""
    policy = Policy(model_dir, settings(max_grad_norm=1e9))
    (step,) = update(policy, given, 0, algorithms, 1e-3, None).steps
    assert step.loss is not None
    gradients = [p.grad for p in policy.trained if p.grad is not None]
    return step.loss, gradients, dict(step.environment_losses)


def test_a_mixed_minibatch_is_the_sum_of_its_parts_by_their_share(model_dir: Path) -> None:
    by_tokens, by_sequences = sequences(None, 3, 1), sequences("math", 2, 2)
    algorithms = {None: load("cispo", {}, ()), "math": load("gspo", {"clip_high": 9.0}, (), "math")}
    loss, gradients, shares = updated(model_dir, [*by_tokens, *by_sequences], algorithms)
    tokens = sum(s.trained_tokens for s in by_tokens)
    share = tokens / (tokens + sum(s.trained_tokens for s in by_sequences))
    first, of_first, _ = updated(model_dir, by_tokens, algorithms)
    second, of_second, _ = updated(model_dir, by_sequences, algorithms)
    assert shares == pytest.approx({"math": second * 2 / 5}, rel=1e-5)
    assert loss == pytest.approx(first * share + second * 2 / 5, rel=1e-5)
    for got, a, b in zip(gradients, of_first, of_second, strict=True):
        assert torch.allclose(got, a * share + b * 2 / 5, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["cispo", "grpo", "dr_grpo"])
def test_one_algorithm_in_two_environments_is_one_algorithm(model_dir: Path, name: str) -> None:
    algorithm = load(name, {}, ())
    parts = [*sequences(None, 2, 3), *sequences("math", 3, 4)]
    loss, gradients, _ = updated(model_dir, parts, {None: algorithm, "math": algorithm})
    together = [replace(s, environment=None, group=i) for i, s in enumerate(parts)]
    expected, of_all, _ = updated(model_dir, together, {None: algorithm})
    assert loss == pytest.approx(expected, rel=1e-5)
    for a, b in zip(gradients, of_all, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_run_estimates_and_measures_each_environment_alone(
    model_dir: Path, tmp_path: Path
) -> None:
    """REINFORCE++ normalizes over the tokens of its own environment, as if it had the batch."""
    trainer = {"environments": {"math": {"algorithm": "reinforce_pp"}}, "minibatches": 1}
    found = []
    for metadata in ([b'{"environment": "math"}', None], [b'{"environment": "math"}'] * 2):
        s = Settings.model_validate(
            {
                "run_id": "r",
                "data_dir": tmp_path / str(len(found)),
                "trainer": {"model_path": model_dir, "device": "cpu", **trainer},
            }
        )
        log = MemoryWeightLog()
        run = begin(s, log)
        run.train(in_environments(metadata))
        run.publish()
        found.append(log.published[-1].metrics)
        run._checkpoints.wait()
    mixed, alone = found
    assert mixed["groups"] == 2 and mixed["members"] == 6
    assert mixed["environment/math/reward_mean"] == 1.0
    assert mixed["loss"] != mixed["environment/math/loss"]
    assert alone["loss"] == alone["environment/math/loss"]


@pytest.mark.parametrize(
    ("environment", "policy", "message"),
    [
        ({"algorithm": "magic"}, {}, r"trainer\.environments\.math\.algorithm='magic'"),
        ({"loss": "magic"}, {}, r"trainer\.environments\.math\.loss='magic'"),
        ({"algorithm": "distillation"}, {}, r"math\.algorithm='distillation'.*teacher_path"),
        ({"kl_coef": 0.1}, {}, r"math\.algorithm='cispo'.*reference_path"),
        ({"algorithm": "sft"}, {}, r"drop_zero_variance: the algorithm of math reads no rewards"),
        (
            {"algorithm": "grpo"},
            {"algorithm": "reinforce_pp"},
            r"algorithm='reinforce_pp'.*algorithm of math compares members",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_at_the_start(
    model_dir: Path, environment: dict[str, Any], policy: dict[str, Any], message: str
) -> None:
    trainer = {"model_path": model_dir, "environments": {"math": environment}}
    s = Settings.model_validate({"trainer": trainer, "admit": {"policy": policy}})
    with pytest.raises(SettingsError, match=message):
        check_algorithm(s)


@pytest.mark.slow
def test_environments_share_one_critic(model_dir: Path, tmp_path: Path) -> None:
    """It learns as without environments; during its warm-up the policy learns from the others."""
    found = []
    for names, math in (((), None), (("math",), "ppo"), (("math",), "cispo")):
        s = Settings.model_validate(
            {
                "run_id": "r",
                "data_dir": tmp_path / str(len(found)),
                "trainer": {
                    "model_path": model_dir,
                    "device": "cpu",
                    "environments": {name: {"algorithm": math} for name in names},
                    "critic": {"warmup_versions": 1},
                },
            }
        )
        log = MemoryWeightLog()
        run = begin(s, log)
        for seq in range(2):
            mixed = in_environments([None, b'{"environment": "math"}'], seq)
            run.train(replace(mixed, batch=replace(mixed.batch, algorithm="ppo")))
            run.publish()
        run._checkpoints.wait()
        found.append([version.metrics for version in log.published[1:]])
    alone, shared, others = found
    for name in ("value_loss", "explained_variance"):
        assert [m[name] for m in shared] == [m[name] for m in alone]
        assert [m[name] for m in others] != [m[name] for m in alone]
    assert "loss" not in alone[0] and "loss" not in shared[0]
    assert others[0]["loss"] == others[0]["environment/math/loss"]
    assert others[1]["loss"] != others[1]["environment/math/loss"]


def test_an_environment_changes_the_algorithm_of_the_run_or_has_another() -> None:
    s = settings(
        algorithm={"clip_high": 0.5, "ratio_max": 3.0},
        environments={"math": {"clip_high": 0.7}, "code": {"algorithm": "gspo", "clip_low": 0.1}},
    )
    found = load_all(s.algorithms("cispo"), ())
    base = ALGORITHMS["cispo"].settings
    assert found[None].settings == replace(base, clip_high=0.5, ratio_max=3.0)
    assert found["math"].settings == replace(base, clip_high=0.7, ratio_max=3.0)
    assert found["code"].settings == replace(ALGORITHMS["gspo"].settings, clip_low=0.1)
    assert [found[name].name for name in (None, "math", "code")] == ["cispo", "cispo", "gspo"]
