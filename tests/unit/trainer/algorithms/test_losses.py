"""Each loss against plain loops over floats, values and gradients, written from the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batch_views import loss_batches
from torch import Tensor

from clawstream.schemas.algorithms import (
    LOSSES,
    Aggregation,
    AlgorithmSettings,
    Correction,
    KlEstimator,
    Level,
)
from clawstream.trainer.algorithms.batch import LossBatch, LossFunction
from clawstream.trainer.algorithms.importance import correction_weights
from clawstream.trainer.algorithms.kl import kl
from clawstream.trainer.algorithms.losses.cispo import cispo
from clawstream.trainer.algorithms.losses.cross_entropy import cross_entropy
from clawstream.trainer.algorithms.losses.dppo import dppo
from clawstream.trainer.algorithms.losses.gspo import gspo
from clawstream.trainer.algorithms.losses.policy_gradient import policy_gradient
from clawstream.trainer.algorithms.losses.ppo_clip import ppo_clip
from clawstream.trainer.algorithms.objective import MinibatchSize, objective
from clawstream.trainer.algorithms.registry import load

CLOSE = {"rtol": 1e-5, "atol": 1e-8}
Numbers = list[float]


def numbers(values: Tensor) -> Numbers:
    found: Numbers = values.detach().tolist()
    return found


def loss_and_slope(
    loss: LossFunction, batch: LossBatch, s: AlgorithmSettings
) -> tuple[Numbers, Numbers]:
    """Return the loss of each token, and the gradient of the sum of the unmasked ones."""
    losses = loss(batch, s)
    (slope,) = torch.autograd.grad(losses.masked_fill(~batch.mask, 0.0).sum(), batch.logprobs)
    return numbers(losses), numbers(slope)


def masked(batch: LossBatch, values: Numbers) -> Numbers:
    return [v if on else 0.0 for v, on in zip(values, batch.mask.tolist(), strict=True)]


def rows(batch: LossBatch) -> list[tuple[float, float, float, float]]:
    """Return (logprob, sampled, old, advantage) of each token."""
    columns = (batch.logprobs, batch.sampled_logprobs, batch.old_logprobs, batch.advantages)
    return list(zip(*map(numbers, columns), strict=True))


@given(batch=loss_batches(), bound=st.floats(0.5, 3))
def test_cispo(batch: LossBatch, bound: float) -> None:
    weights = [min(math.exp(now - old), bound) * a for now, _, old, a in rows(batch)]
    losses, slope = loss_and_slope(cispo, batch, AlgorithmSettings(ratio_max=bound))
    expected = [-w * row[0] for w, row in zip(weights, rows(batch), strict=True)]
    np.testing.assert_allclose(losses, expected, **CLOSE)
    np.testing.assert_allclose(slope, masked(batch, [-w for w in weights]), **CLOSE)


def surrogate(
    ratio: float, advantage: float, low: float, high: float, dual: float
) -> tuple[float, float]:
    """Return the loss of PPO by cases, and the factor of the ratio's gradient."""
    if advantage >= 0:
        clipped = ratio > 1 + high
        return -advantage * min(ratio, 1 + high), 0.0 if clipped else -advantage * ratio
    if ratio > dual:
        return -advantage * dual, 0.0
    clipped = ratio < 1 - low
    return -advantage * max(ratio, 1 - low), 0.0 if clipped else -advantage * ratio


@given(
    batch=loss_batches(),
    low=st.sampled_from([0.2, 0.1]),
    high=st.sampled_from([0.2, 0.28]),
    dual=st.sampled_from([1.5, 3.0, 1e9]),
)
def test_ppo_clips_rises_of_good_tokens_and_falls_of_bad_ones(
    batch: LossBatch, low: float, high: float, dual: float
) -> None:
    expected = [
        surrogate(math.exp(now - old), a, low, high, dual) for now, _, old, a in rows(batch)
    ]
    s = AlgorithmSettings(clip_low=low, clip_high=high, dual_clip=dual)
    losses, slope = loss_and_slope(ppo_clip, batch, s)
    np.testing.assert_allclose(losses, [loss for loss, _ in expected], **CLOSE)
    np.testing.assert_allclose(slope, masked(batch, [grad for _, grad in expected]), **CLOSE)


FAR = [-9999.0, -91.0, -30.0, 30.0, 91.0]
"""Recorded less current log-probability: an engine's stand-in for probability zero, stale data."""


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_token_far_from_the_policy_spoils_no_other(
    name: str, level: Level, far: float, advantage: float
) -> None:
    """The others keep their gradient; the one has one of a usual size, or none."""
    loss: LossFunction = load("grpo", {"loss": name}, ()).loss
    s = AlgorithmSettings(correction="truncate", correction_level=level, kl_coef=0.1)
    near = torch.full((6,), -2.0, dtype=torch.float64)
    recorded = near.clone()
    recorded[3] += far
    logprobs = near.clone().requires_grad_()
    batch = LossBatch(
        logprobs=logprobs,
        sampled_logprobs=recorded,
        old_logprobs=recorded,
        advantages=torch.full((6,), advantage, dtype=torch.float64),
        mask=torch.ones(6, dtype=torch.bool),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        step=torch.zeros(6, dtype=torch.int64),
        lengths=torch.tensor([3, 3]),
        ref_logprobs=recorded,
    )
    total = objective(batch, loss, s, MinibatchSize(6, 2))
    (slope,) = torch.autograd.grad(total, logprobs)
    assert math.isfinite(total.item()) and torch.isfinite(slope).all()
    expected = -advantage / 6
    if name == "gspo":  # the ratio is that of the sequence
        assert slope[:3].tolist() == pytest.approx([expected] * 3)
    elif s.correction_level == "token" or name in ("ppo_clip", "dppo", "cross_entropy"):
        for i in (0, 1, 2, 4, 5):
            assert slope[i].item() == pytest.approx(expected), i
    assert slope[:3].tolist() == pytest.approx([expected] * 3), "the other sequence"


def test_a_clipped_surrogate_has_no_gradient_where_the_ratio_overflows() -> None:
    logprobs = torch.full((3,), -2.0).requires_grad_()
    recorded = torch.tensor([-91.0, -2.0, -2.0])
    batch = LossBatch(
        logprobs=logprobs,
        sampled_logprobs=recorded,
        old_logprobs=recorded,
        advantages=torch.ones(3),
        mask=torch.ones(3, dtype=torch.bool),
        sequence=torch.zeros(3, dtype=torch.int64),
        step=torch.zeros(3, dtype=torch.int64),
        lengths=torch.tensor([3]),
    )
    loss = objective(batch, ppo_clip, AlgorithmSettings(), MinibatchSize(3, 1))
    (slope,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-(1.2 + 1 + 1) / 3)
    assert slope.tolist() == pytest.approx([0, -1 / 3, -1 / 3])


@given(batch=loss_batches(equal_advantages=True))
def test_gspo_is_the_surrogate_of_the_geometric_mean_ratio_of_each_sequence(
    batch: LossBatch,
) -> None:
    """The paper's loss has one term a sequence: the mean over its sequences is taken here."""
    s = AlgorithmSettings(clip_low=0.1, clip_high=0.2, aggregation="sequence_mean")
    every = replace(batch, mask=torch.ones_like(batch.mask))
    size = MinibatchSize(len(batch.logprobs), len(batch.lengths))
    loss = objective(every, gspo, s, size)
    (slope,) = torch.autograd.grad(loss, batch.logprobs)
    total, expected_slope = 0.0, [0.0] * size.tokens
    for index in range(size.sequences):
        own = [i for i, q in enumerate(batch.sequence.tolist()) if q == index]
        data = [rows(batch)[i] for i in own]
        ratio = math.exp(sum(now - old for now, _, old, _ in data) / len(data))
        value, grad = surrogate(ratio, data[0][3], 0.1, 0.2, 3.0)
        total += value / size.sequences
        for i in own:
            expected_slope[i] = grad / len(own) / size.sequences
    np.testing.assert_allclose(loss.item(), total, **CLOSE)
    np.testing.assert_allclose(numbers(slope), expected_slope, **CLOSE)


@given(batch=loss_batches(), low=st.floats(0, 0.3), high=st.floats(0, 0.3), c=st.floats(0, 1))
def test_dppo_masks_by_the_change_of_the_probability(
    batch: LossBatch, low: float, high: float, c: float
) -> None:
    expected, grads = [], []
    for now, sampled, _, a in rows(batch):
        rise, d = math.exp(now) - math.exp(sampled), now - sampled
        keep = not (rise > high if a > 0 else rise < -low)
        expected.append(c * d * d - keep * math.exp(d) * a)
        grads.append(2 * c * d - keep * math.exp(d) * a)
    s = AlgorithmSettings(mask_low=low, mask_high=high, log_ratio_penalty=c)
    losses, slope = loss_and_slope(dppo, batch, s)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    np.testing.assert_allclose(slope, masked(batch, grads), **CLOSE)


def weights_formula(
    batch: LossBatch, logprobs: Numbers, mode: str, level: str, low: float, high: float
) -> Numbers:
    d = [
        now - sampled
        for now, sampled in zip(logprobs, numbers(batch.sampled_logprobs), strict=True)
    ]
    found = []
    sequence, on = batch.sequence.tolist(), batch.mask.tolist()
    for i, own in enumerate(sequence):
        of_sequence = [d[j] for j, q in enumerate(sequence) if q == own and on[j]]
        log_ratio = {
            "token": d[i],
            "sequence": sum(of_sequence),
            "geometric": sum(of_sequence) / max(1, len(of_sequence)),
        }[level]
        weight = math.exp(log_ratio)
        if mode == "truncate":
            found.append(min(weight, high))
        else:
            found.append(weight if low <= weight <= high else 0.0)
    return found


CORRECTIONS = given(
    batch=loss_batches(),
    mode=st.sampled_from(["truncate", "mask"]),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    low=st.floats(0.1, 0.9),
    high=st.floats(1.1, 3),
)


@CORRECTIONS
def test_the_policy_gradient_is_weighted_from_the_sampling_version_to_the_policy(
    batch: LossBatch, mode: Correction, level: Level, low: float, high: float
) -> None:
    s = AlgorithmSettings(
        correction=mode, correction_level=level, correction_min=low, correction_max=high
    )
    w = weights_formula(batch, numbers(batch.logprobs), mode, level, low, high)
    losses, slope = loss_and_slope(policy_gradient, batch, s)
    factors = [-weight * row[3] for weight, row in zip(w, rows(batch), strict=True)]
    expected = [f * row[0] for f, row in zip(factors, rows(batch), strict=True)]
    np.testing.assert_allclose(losses, expected, **CLOSE)
    np.testing.assert_allclose(slope, masked(batch, factors), **CLOSE)


@pytest.mark.parametrize("loss", [cispo, ppo_clip, gspo])
@CORRECTIONS
def test_a_loss_with_a_ratio_is_weighted_from_the_sampling_version_to_the_old_policy(
    loss: LossFunction, batch: LossBatch, mode: Correction, level: Level, low: float, high: float
) -> None:
    s = AlgorithmSettings(
        correction=mode, correction_level=level, correction_min=low, correction_max=high
    )
    w = weights_formula(batch, numbers(batch.old_logprobs), mode, level, low, high)
    plain = numbers(loss(batch, replace(s, correction="none")))
    expected = [weight * value for weight, value in zip(w, plain, strict=True)]
    np.testing.assert_allclose(numbers(loss(batch, s)), expected, **CLOSE)


@given(batch=loss_batches())
def test_without_correction_the_policy_gradient_has_no_weight(batch: LossBatch) -> None:
    s = AlgorithmSettings()
    assert correction_weights(batch.logprobs, batch, s) is None
    expected = [-a * now for now, _, _, a in rows(batch)]
    for loss in (policy_gradient, cross_entropy):
        np.testing.assert_allclose(numbers(loss(batch, s)), expected, **CLOSE)


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(-d) - 1 + d,
}


@given(
    batch=loss_batches(),
    estimator=st.sampled_from(["k1", "k2", "k3"]),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    kl_coef=st.sampled_from([0.0, 0.2]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    more=st.integers(0, 3),
)
def test_the_objective_is_the_mean_of_loss_divergence_and_entropy(
    batch: LossBatch,
    estimator: KlEstimator,
    aggregation: Aggregation,
    kl_coef: float,
    entropy_coef: float,
    more: int,
) -> None:
    """A masked token adds nothing and stays in the denominators; `more` sequences passed before."""
    assert batch.ref_logprobs is not None and batch.entropy is not None
    s = AlgorithmSettings(
        aggregation=aggregation,
        fixed_length=7,
        kl_coef=kl_coef,
        kl_estimator=estimator,
        entropy_coef=entropy_coef,
    )
    lengths = batch.lengths.tolist()
    size = MinibatchSize(len(batch.logprobs) + 2 * more, len(lengths) + more)
    total = 0.0
    for loss, now, ref, entropy, q, on in zip(
        numbers(cross_entropy(batch, s)),
        numbers(batch.logprobs),
        numbers(batch.ref_logprobs),
        numbers(batch.entropy),
        batch.sequence.tolist(),
        batch.mask.tolist(),
        strict=True,
    ):
        token = loss + kl_coef * KL[estimator](now - ref) - entropy_coef * entropy
        divisor = {
            "token_mean": size.tokens,
            "sequence_mean": lengths[q] * size.sequences,
            "fixed_length": 7 * size.sequences,
        }[aggregation]
        total += token / divisor if on else 0.0
    assert objective(batch, cross_entropy, s, size).item() == pytest.approx(
        total, rel=1e-5, abs=1e-9
    )


@given(batch=loss_batches())
def test_the_gradient_of_k2_is_the_difference_and_k3_is_never_negative(batch: LossBatch) -> None:
    assert batch.ref_logprobs is not None
    difference = batch.logprobs.detach() - batch.ref_logprobs
    (slope,) = torch.autograd.grad(
        kl(batch.logprobs, batch.ref_logprobs, "k2").sum(), batch.logprobs
    )
    np.testing.assert_allclose(numbers(slope), numbers(difference), **CLOSE)
    assert bool((kl(batch.logprobs, batch.ref_logprobs, "k3") >= 0).all())


@pytest.mark.parametrize("s", [AlgorithmSettings(kl_coef=1.0), AlgorithmSettings(entropy_coef=1.0)])
def test_a_coefficient_without_its_column_is_an_error(s: AlgorithmSettings) -> None:
    zero = torch.zeros(1)
    batch = LossBatch(
        logprobs=zero,
        sampled_logprobs=zero,
        old_logprobs=zero,
        advantages=zero,
        mask=zero == 0,
        sequence=torch.zeros(1, dtype=torch.int64),
        step=torch.zeros(1, dtype=torch.int64),
        lengths=torch.ones(1, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match="the batch has no"):
        objective(batch, cross_entropy, s, MinibatchSize(1, 1))
