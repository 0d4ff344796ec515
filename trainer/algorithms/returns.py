"""Rewards placed on tokens, and their sums along a sequence."""

from __future__ import annotations

import numpy as np

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.kl import kl


def kl_penalty(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return what `kl_in=reward` subtracts from each token's reward, shape (T,); else zeros.

    Raises:
        ValueError: kl_coef is set and the batch has no ref_logprobs.
    """
    if not settings.kl_coef or settings.kl_in != "reward":
        return np.zeros(len(batch.sequence))
    if batch.ref_logprobs is None:
        raise ValueError("kl_coef is set, but the batch has no ref_logprobs")
    return settings.kl_coef * kl(batch.sampled_logprobs, batch.ref_logprobs, settings.kl_estimator)


def outcomes(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the reward of each trajectory, minus the KL penalty of its tokens, shape (M,)."""
    penalty = np.bincount(batch.trajectory, kl_penalty(batch, settings), len(batch.rewards))
    found: Floats = batch.rewards - penalty
    return found


def placed_rewards(batch: BatchView) -> Floats:
    """Return the reward that each token receives, shape (T,); NaN for a token without one.

    A step's reward goes to its last trained token. If the step has none, the reward goes to the
    last trained token of the nearest earlier step of the trajectory, whose action led to it; if
    there is none either, no token receives it. The trajectory's reward goes to the last token of
    each of its sequences, because each path ends with that outcome. Rewards that meet add up.
    """
    placed = np.full(len(batch.sequence), np.nan)
    last_of_step = np.full(len(batch.step_rewards), -1)
    last_of_step[batch.step] = np.arange(len(batch.step))  # the last write wins
    before, trajectory = -1, -1
    for step, reward in enumerate(batch.step_rewards):
        if batch.step_trajectory[step] != trajectory:
            before, trajectory = -1, int(batch.step_trajectory[step])
        before = last_of_step[step] if last_of_step[step] >= 0 else before
        if before >= 0 and not np.isnan(reward):
            placed[before] = np.nan_to_num(placed[before]) + reward
    ends = np.flatnonzero(np.diff(batch.sequence, append=-1))
    outcome = batch.rewards[batch.trajectory[ends]]
    known = ~np.isnan(outcome)
    placed[ends[known]] = np.nan_to_num(placed[ends[known]]) + outcome[known]
    return placed


def token_rewards(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the reward of each token, 0 where it has none, minus its KL penalty, shape (T,)."""
    return np.nan_to_num(placed_rewards(batch)) - kl_penalty(batch, settings)


def discounted(rewards: Floats, batch: BatchView, gamma: float) -> Floats:
    """Return r[t] + gamma * r[t + 1] + ... along each token's sequence, shape (T,)."""
    found = np.zeros(len(rewards))
    total = 0.0
    for t in reversed(range(len(rewards))):
        if t + 1 == len(rewards) or batch.sequence[t + 1] != batch.sequence[t]:
            total = 0.0
        total = rewards[t] + gamma * total
        found[t] = total
    return found


def whitened(values: Floats, offset: float) -> Floats:
    """Return (values - mean) / (std + offset); std has n in the denominator."""
    if not len(values):
        return values
    found: Floats = (values - values.mean()) / (values.std() + offset)
    return found
