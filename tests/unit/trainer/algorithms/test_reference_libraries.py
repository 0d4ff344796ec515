"""Advantages and losses against verl's and TRL's own functions, where they are installed.

They are no dependencies; each test is skipped without its library. `make test-exports` installs
them outside of the environment and runs this file.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.batch_views import Member, loss_batches, members, view_of
from torch import Tensor

from clawstream.schemas.algorithms import Aggregation, AlgorithmSettings, KlEstimator
from clawstream.trainer.algorithms.advantages.dr_grpo import dr_grpo
from clawstream.trainer.algorithms.advantages.gae import gae, gae_returns
from clawstream.trainer.algorithms.advantages.grpo import grpo
from clawstream.trainer.algorithms.advantages.reinforce_pp import reinforce_pp
from clawstream.trainer.algorithms.advantages.reinforce_pp_baseline import reinforce_pp_baseline
from clawstream.trainer.algorithms.advantages.rloo import rloo
from clawstream.trainer.algorithms.batch import BatchView, Floats, LossBatch, LossFunction
from clawstream.trainer.algorithms.kl import kl
from clawstream.trainer.algorithms.losses.cispo import cispo
from clawstream.trainer.algorithms.losses.gspo import gspo
from clawstream.trainer.algorithms.losses.ppo_clip import ppo_clip
from clawstream.trainer.algorithms.objective import MinibatchSize, objective
from clawstream.trainer.algorithms.returns import token_rewards
from clawstream.trainer.algorithms.values import value_loss

CLOSE = {"rtol": 1e-5, "atol": 1e-7}
LOW, HIGH, DUAL, NO_BOUND, LENGTH = 0.2, 0.28, 3.0, 1e9, 7


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    """verl's functions; the modules of its settings, which need older libraries, are empty."""
    pytest.importorskip("verl")
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in (
            ("verl.workers.config", ActorConfig),
            ("verl.trainer.config", AlgoConfig),
        ):
            module = ModuleType(name)
            setattr(module, settings.__name__, settings)
            patch.setitem(sys.modules, name, module)
        yield pytest.importorskip("verl.trainer.ppo.core_algos")


class ActorConfig(SimpleNamespace):
    """verl's settings of a loss."""

    def get(self, name: str, default: object) -> object:
        return getattr(self, name, default)


class AlgoConfig:
    """verl's settings of an estimator."""


@pytest.fixture(scope="module")
def trl_loss() -> Callable[..., Tensor]:
    """The loss of TRL's GRPO trainer, on log-probabilities instead of a model."""
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")

    def compute(batch: LossBatch, loss_type: str, **settings: object) -> Tensor:
        entropies = padded(batch, torch.zeros_like(batch.advantages))
        own = {
            "importance_sampling_level": "token", "beta": 0.0, "epsilon_low": LOW,
            "epsilon_high": HIGH, "loss_type": loss_type, "max_completion_length": LENGTH,
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
            "aux_loss_enabled": False, "_entropy_bonus_enabled": False,
            "model": SimpleNamespace(training=False),
            "args": SimpleNamespace(delta=DUAL, use_bias_correction_kl=False),
            "accelerator": SimpleNamespace(
                num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
            ),
            "_metrics": defaultdict(lambda: defaultdict(list)),
            "_get_per_token_logps_and_entropies": lambda *_, **__: (
                padded(batch, batch.logprobs), entropies, None,
            ),
        }  # fmt: skip
        mask = padded(batch, torch.ones_like(batch.advantages))
        assert batch.ref_logprobs is not None
        inputs = {
            "prompt_ids": mask[:, :0], "prompt_mask": mask[:, :0],
            "completion_ids": mask, "completion_mask": mask,
            "advantages": padded(batch, batch.advantages),
            "old_per_token_logps": padded(batch, batch.old_logprobs),
            "ref_per_token_logps": padded(batch, batch.ref_logprobs),
            "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        found: Tensor = trainer.GRPOTrainer._compute_loss(
            SimpleNamespace(**own | settings), None, inputs
        )
        return found

    return compute


def padded(batch: LossBatch, column: Tensor) -> Tensor:
    """Return a column as one padded row for each sequence, with gradient."""
    rows = column.split(batch.lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def whole(batch: LossBatch) -> LossBatch:
    """Return the batch without masked tokens, which neither library has."""
    return replace(batch, mask=torch.ones_like(batch.mask))


def assert_same(
    batch: LossBatch, loss: LossFunction, s: AlgorithmSettings, expected: Tensor
) -> None:
    """Compare loss and gradient."""
    size = MinibatchSize(len(batch.logprobs), len(batch.lengths))
    got = objective(batch, loss, s, size)
    np.testing.assert_allclose(got.item(), expected.item(), **CLOSE)
    slopes = [torch.autograd.grad(value, batch.logprobs)[0].numpy() for value in (got, expected)]
    np.testing.assert_allclose(*slopes, **CLOSE)


def verl_loss(verl: Any, name: str, batch: LossBatch, mode: str, **clip: float) -> Tensor:
    config = ActorConfig(clip_ratio=LOW, clip_ratio_c=DUAL, global_batch_info={}, **clip)
    config.global_batch_info = {"loss_scale_factor": LENGTH}
    columns = (batch.old_logprobs, batch.logprobs, batch.advantages)
    found: Tensor = verl.POLICY_LOSS_REGISTRY[name](
        *(padded(batch, column) for column in columns),
        padded(batch, torch.ones_like(batch.advantages)),
        loss_agg_mode=mode,
        config=config,
    )[0]
    return found


MODES: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "fixed_length": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("aggregation", MODES)
@given(batch=loss_batches().map(whole))
def test_losses_equal_verls(verl: Any, aggregation: Aggregation, batch: LossBatch) -> None:
    mode = MODES[aggregation]
    # verl 0.7.0 adds the sequences up for a fixed length, where Dr. GRPO has their mean.
    share = 1 / len(batch.lengths) if aggregation == "fixed_length" else 1.0
    s = AlgorithmSettings(
        aggregation=aggregation,
        fixed_length=LENGTH,
        clip_low=LOW,
        clip_high=HIGH,
        dual_clip=DUAL,
        ratio_max=1 + HIGH,
    )
    ppo = verl_loss(verl, "vanilla", batch, mode, clip_ratio_low=LOW, clip_ratio_high=HIGH)
    assert_same(batch, ppo_clip, s, ppo * share)
    lower_bound_0 = {"clip_ratio_low": 1.0, "clip_ratio_high": HIGH}
    assert_same(batch, cispo, s, verl_loss(verl, "cispo", batch, mode, **lower_bound_0) * share)


@given(batch=loss_batches(equal_advantages=True).map(whole))
def test_gspo_equals_verls_and_trls(
    verl: Any, trl_loss: Callable[..., Tensor], batch: LossBatch
) -> None:
    s = AlgorithmSettings(
        aggregation="sequence_mean", clip_low=LOW, clip_high=HIGH, dual_clip=NO_BOUND
    )
    clip = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}
    assert_same(batch, gspo, s, verl_loss(verl, "gspo", batch, "seq-mean-token-mean", **clip))
    args = SimpleNamespace(delta=None, use_bias_correction_kl=False)
    expected = trl_loss(batch, "grpo", importance_sampling_level="sequence", args=args)
    assert_same(batch, gspo, s, expected)


@given(batch=loss_batches().map(whole))
def test_losses_equal_trls(trl_loss: Callable[..., Tensor], batch: LossBatch) -> None:
    s = AlgorithmSettings(
        clip_low=LOW, clip_high=HIGH, dual_clip=DUAL, ratio_max=HIGH, fixed_length=LENGTH
    )
    assert_same(batch, ppo_clip, s, trl_loss(batch, "dapo"))
    assert_same(batch, ppo_clip, s, trl_loss(batch, "bnpo"))
    assert_same(batch, cispo, s, trl_loss(batch, "cispo"))
    by_length = replace(s, aggregation="fixed_length")
    assert_same(batch, ppo_clip, by_length, trl_loss(batch, "dr_grpo"))
    with_reference = replace(s, aggregation="sequence_mean", kl_coef=0.1, kl_estimator="k3")
    assert_same(batch, ppo_clip, with_reference, trl_loss(batch, "grpo", beta=0.1))


def rows_of(batch: BatchView, column: Floats) -> Tensor:
    """Return a column as one padded row for each sequence."""
    lengths = np.bincount(batch.sequence).tolist()
    rows = torch.from_numpy(column).split(lengths)
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def assert_same_rows(batch: BatchView, got: Floats, expected: Tensor, share: float = 1.0) -> None:
    mask = rows_of(batch, np.ones(len(batch.sequence))) == 1
    np.testing.assert_allclose(got, (expected[mask] * share).numpy(), rtol=1e-5, atol=1e-6)


@given(data=members(branches=1))
def test_advantages_of_groups_equal_verls(verl: Any, data: list[Member]) -> None:
    batch, s = view_of(data), AlgorithmSettings(std_offset=1e-6)
    ends = np.zeros(len(batch.sequence))
    ends[np.flatnonzero(np.diff(batch.sequence, append=-1))] = batch.rewards
    rewards, mask = rows_of(batch, ends), rows_of(batch, np.ones(len(batch.sequence)))
    for estimator, name, more in (
        (grpo, "grpo", {}),
        (dr_grpo, "grpo", {"norm_adv_by_std_in_grpo": False}),
        (rloo, "rloo", {}),
    ):
        expected, _ = verl.get_adv_estimator_fn(name)(rewards, mask, batch.group, **more)
        assert_same_rows(batch, estimator(batch, s), expected)


def smaller_deviation(batch: BatchView) -> float:
    """Return what makes of verl's deviation over n - 1 tokens the one over n."""
    n = len(batch.sequence)
    return float(np.sqrt(n / (n - 1)))


@given(data=members(branches=1), gamma=st.floats(0.8, 1), lam=st.floats(0, 1))
def test_advantages_over_the_batch_equal_verls_but_for_the_deviation(
    verl: Any, data: list[Member], gamma: float, lam: float
) -> None:
    batch = view_of(data)
    s = AlgorithmSettings(gamma=gamma, gae_lambda=lam, std_offset=0.0)
    assert batch.values is not None
    rewards, mask = rows_of(batch, token_rewards(batch, s)), rows_of(batch, batch.values * 0 + 1)
    scale = smaller_deviation(batch)
    expected, returns = verl.get_adv_estimator_fn("reinforce_plus_plus")(
        rewards, mask, config=ActorConfig(gamma=gamma)
    )
    assume(returns[mask == 1].std() > 0.1)
    assert_same_rows(batch, reinforce_pp(batch, s), expected, scale)
    estimates, targets = verl.get_adv_estimator_fn("gae")(
        rewards, rows_of(batch, batch.values), mask, gamma, lam
    )
    assert_same_rows(batch, gae_returns(batch, s), targets)
    assume((targets - rows_of(batch, batch.values))[mask == 1].std() > 0.1)
    assert_same_rows(batch, gae(batch, s), estimates, scale)


@given(data=members(branches=1))
def test_reinforce_pp_baseline_equals_verls_but_for_the_deviation(
    verl: Any, data: list[Member]
) -> None:
    batch, s = view_of(data), AlgorithmSettings(std_offset=0.0)
    assume(np.std(dr_grpo(batch, s)) > 0.1)
    ends = np.zeros(len(batch.sequence))
    ends[np.flatnonzero(np.diff(batch.sequence, append=-1))] = batch.rewards
    rewards, mask = rows_of(batch, ends), rows_of(batch, np.ones(len(batch.sequence)))
    function = verl.get_adv_estimator_fn("reinforce_plus_plus_baseline")
    expected, _ = function(rewards, mask, batch.group)
    assert_same_rows(batch, reinforce_pp_baseline(batch, s), expected, smaller_deviation(batch))


@given(batch=loss_batches(), estimator=st.sampled_from(["k1", "k2", "k3"]), seed=st.integers(0, 99))
def test_divergences_and_the_loss_of_the_critic_equal_verls(
    verl: Any, batch: LossBatch, estimator: KlEstimator, seed: int
) -> None:
    assert batch.ref_logprobs is not None
    logprobs = batch.logprobs.detach()
    got = kl(logprobs, batch.ref_logprobs, estimator)
    expected = verl.kl_penalty_forward(logprobs, batch.ref_logprobs, estimator)
    limited = got.clamp(-10, 10) if estimator == "k3" else got
    np.testing.assert_allclose(limited.numpy(), expected.numpy(), **CLOSE)
    values, old, returns = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 1, 9)))
    mean, _ = verl.compute_value_loss(values, returns, old, torch.ones_like(values), 0.5)
    got = value_loss(values, old, returns, 0.5).mean()
    np.testing.assert_allclose(got.item(), mean.item(), **CLOSE)
