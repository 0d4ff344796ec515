"""The critic's target and loss against verl's formulas, reimplemented in numpy over padded rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.batch_views import SEEDS, Member, members, view_of

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.advantages.gae import gae, gae_returns, gae_steps_returns
from clawstream.trainer.algorithms.batch import BatchView
from clawstream.trainer.algorithms.returns import token_rewards
from clawstream.trainer.algorithms.values import explained_variance, value_loss

CLOSE = {"rtol": 1e-5, "atol": 1e-8}
Matrix = NDArray[np.float64]


def rows(batch: BatchView, column: Matrix, rng: np.random.Generator) -> tuple[Matrix, Matrix]:
    """Return the column as one padded row a sequence, with untrained tokens in between, and the
    mask of the trained ones.
    """
    length = 3 * len(column)
    padded, mask = rng.normal(size=(len(batch.sequence_trajectory), length)), np.zeros(0)
    mask = np.zeros_like(padded)
    for row in range(len(padded)):
        own = column[batch.sequence == row]
        places = np.sort(rng.choice(length, len(own), replace=False))
        padded[row, places], mask[row, places] = own, 1.0
    return padded, mask


def verl_gae(
    rewards: Matrix, values: Matrix, mask: Matrix, gamma: float, lam: float
) -> tuple[Matrix, Matrix]:
    """Advantages and returns of verl 0.7: columns from the last to the first; an untrained token
    passes on what comes after it.
    """
    found = np.zeros_like(rewards)
    value_after = estimate = np.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        trained = mask[:, t] == 1.0
        delta = rewards[:, t] + gamma * value_after - values[:, t]
        estimate = np.where(trained, delta + gamma * lam * estimate, estimate)
        value_after = np.where(trained, values[:, t], value_after)
        found[:, t] = estimate
    trained = mask == 1.0
    n = trained.sum()
    spread = found[trained].var() * n / max(n - 1, 1)
    return (found - found[trained].mean()) / np.sqrt(spread + 1e-8), found + values


@given(data=members(), gamma=st.floats(0.8, 1), lam=st.floats(0, 1), seed=SEEDS)
def test_gae_and_returns_equal_verls(
    data: list[Member], gamma: float, lam: float, seed: int
) -> None:
    batch, s = view_of(data), AlgorithmSettings(gamma=gamma, gae_lambda=lam)
    assert batch.values is not None
    rewards, mask = rows(batch, token_rewards(batch, s), np.random.default_rng(seed))
    values, _ = rows(batch, batch.values, np.random.default_rng(seed))
    advantages, returns = verl_gae(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(gae_returns(batch, s), returns[mask == 1.0], **CLOSE)
    n = mask.sum()
    assume((returns - values)[mask == 1.0].std() > 0.1)
    unbiased = advantages[mask == 1.0] * np.sqrt(n / (n - 1))
    np.testing.assert_allclose(gae(batch, s), unbiased, rtol=1e-5, atol=1e-6)


@given(data=members(), gamma=st.floats(0.8, 1), lam=st.floats(0, 1))
def test_the_target_of_a_step_is_the_return_of_a_batch_with_one_token_a_step(
    data: list[Member], gamma: float, lam: float
) -> None:
    s = AlgorithmSettings(gamma=gamma, gae_lambda=lam)
    one_token = [
        Member(
            member.group,
            member.reward,
            tuple(
                tuple(type(step)(step.reward, step.tokens[:1]) for step in sequence)
                for sequence in member.sequences
            ),
        )
        for member in data
    ]
    of_steps = gae_returns(view_of(one_token), s)
    counts = [len(step.tokens) for m in data for sequence in m.sequences for step in sequence]
    np.testing.assert_allclose(gae_steps_returns(view_of(data), s), np.repeat(of_steps, counts))


@given(seed=SEEDS, n=st.integers(1, 20), clip=st.floats(0.01, 2))
def test_value_loss_equals_verls(seed: int, n: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    values, old, returns = rng.uniform(-2, 2, (3, n))
    near = np.minimum(np.maximum(values, old - clip), old + clip)
    plain, clipped = np.square(values - returns), np.square(near - returns)
    expected = 0.5 * np.where(clipped > plain, clipped, plain).mean()
    leaf = torch.tensor(values, requires_grad=True)
    loss = value_loss(leaf, torch.tensor(old), torch.tensor(returns), clip).mean()
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected, **CLOSE)
    # At a value outside the clip range that is nearer to its return, the constant one is larger.
    slope = np.where(clipped > plain, 0.0, values - returns) / n
    np.testing.assert_allclose(leaf.grad, slope, **CLOSE)


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns + 5.0, returns) == 1.0
    assert explained_variance(np.zeros(4), returns) == 0.0
    assert explained_variance(-returns, returns) == -3.0
    assert explained_variance(np.zeros(4), np.ones(4)) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None
