"""Generalized advantage estimation with a critic, over tokens or over steps.

Each estimator has a function beside it that returns what the critic is to predict.
"""

from __future__ import annotations

import numpy as np

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats, Indexes
from clawstream.trainer.algorithms.returns import token_rewards, whitened


def gae(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return GAE(gamma, lambda) of each token, normalized over the batch, shape (T,).

    A[t] = sum over l of (gamma lambda)^l delta[t + l], delta[t] = r[t] + gamma V[t + 1] - V[t],
    along the trained tokens of a sequence; the value after its last token is 0. A reply that ended
    at its limit of tokens would have gone on: there the value before the last token stands for the
    one after it. The tokens of the environment are passed over: they are no actions.
    Source: Schulman et al., arXiv 1506.02438, eq. 16.

    Raises:
        ValueError: the batch has no values.
    """
    return whitened(_estimates(token_rewards(batch, settings), batch, settings), 1e-8)


def gae_returns(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the target of each token's value: its value plus its estimate, not normalized, (T,).

    Raises:
        ValueError: the batch has no values.
    """
    found: Floats = _values(batch) + _estimates(token_rewards(batch, settings), batch, settings)
    return found


def gae_steps(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return GAE(gamma, lambda) of each token's step, normalized over the batch, shape (T,).

    One action is all trained tokens of a step in a sequence. Its value is that before its first
    token, its reward the sum over its tokens; gamma discounts a step, so long replies are not
    discounted more.
    Source: as `gae`, with turns as actions: Zhou et al., "ArCHer", arXiv 2402.19446.

    Raises:
        ValueError: the batch has no values.
    """
    estimates, _, action = _step_estimates(batch, settings)
    return whitened(estimates[action], 1e-8)


def gae_steps_returns(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the target of each token's value: that of its step, not normalized, shape (T,).

    The value before the step plus the step's estimate. The later tokens of a step learn the same
    target, although the estimator does not read their values.

    Raises:
        ValueError: the batch has no values.
    """
    estimates, starts, action = _step_estimates(batch, settings)
    found: Floats = (_values(batch)[starts] + estimates)[action]
    return found


def _step_estimates(
    batch: BatchView, settings: AlgorithmSettings
) -> tuple[Floats, Indexes, Indexes]:
    """Return the estimate and the first token of each action, and the action of each token."""
    first = np.ones(len(batch.step), bool)
    first[1:] = (np.diff(batch.step) != 0) | (np.diff(batch.sequence) != 0)
    starts, action = np.flatnonzero(first), np.cumsum(first) - 1
    rewards: Floats = np.bincount(action, token_rewards(batch, settings), len(starts)).astype(float)
    return _estimates(rewards, batch, settings, starts), starts, action


def _values(batch: BatchView) -> Floats:
    if batch.values is None:
        raise ValueError("gae needs the values of a critic, and the batch has none")
    return batch.values


def _values_after_end(batch: BatchView) -> Floats:
    """Return the value after the last token of each sequence, shape (Q,)."""
    ends = np.flatnonzero(np.diff(batch.sequence, append=-1))
    return np.where(batch.cut, _values(batch)[ends], 0.0)


def _estimates(
    rewards: Floats,
    batch: BatchView,
    settings: AlgorithmSettings,
    starts: Indexes | None = None,
) -> Floats:
    """Return the estimates of actions that begin at `starts`; None: each token is an action."""
    values = _values(batch) if starts is None else _values(batch)[starts]
    sequence = batch.sequence if starts is None else batch.sequence[starts]
    found, after_end = np.zeros(len(rewards)), _values_after_end(batch)
    estimate = 0.0
    for i in reversed(range(len(rewards))):
        last = i + 1 == len(rewards) or sequence[i + 1] != sequence[i]
        after = after_end[sequence[i]] if last else values[i + 1]
        delta = rewards[i] + settings.gamma * after - values[i]
        estimate = delta + (0.0 if last else settings.gamma * settings.gae_lambda * estimate)
        found[i] = estimate
    return found
