"""Importance weights between the version that sampled a token and the policy that trains it."""

from __future__ import annotations

import torch
from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are limited to this size, as in verl. One token of ratio 1e30 would hide all others,
and above 88.7 its exponential is infinite: its gradient, times the zero of a branch that was not
taken, is NaN, for the whole minibatch.
"""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log-ratios that can be exponentiated; they have no gradient at the bounds."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def correction_weights(
    logprobs: Tensor, batch: LossBatch, settings: AlgorithmSettings
) -> Tensor | None:
    """Return the detached weight of each token's loss, or None for no correction.

    The weight is exp(logprobs - sampled_logprobs): of the token, or the product or the geometric
    mean over its sequence. `truncate` limits it to correction_max. `mask` replaces it by 0 outside
    [correction_min, correction_max].
    Source: truncation: Ionides, "Truncated Importance Sampling", 2008; between engine and trainer,
    also masked and over sequences: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025; Liu et al., "When Speed Kills Stability", 2025.

    Args:
        logprobs: (tokens,), of the policy that the tokens are to be weighted for.
        batch: the sequences.
        settings: `correction`, its level and bounds.

    Returns:
        Shape (tokens,).
    """
    if settings.correction == "none":
        return None
    weights = _ratios(logprobs, batch, settings)
    if settings.correction == "truncate":
        return weights.clamp(max=settings.correction_max)
    return torch.where(out_of_bounds(logprobs, batch, settings), 0.0, weights)


def out_of_bounds(logprobs: Tensor, batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return whether `correction` truncates or masks the weight of each token.

    Args: as those of `correction_weights`.
    """
    weights = _ratios(logprobs, batch, settings)
    above = weights > settings.correction_max
    return (
        above if settings.correction == "truncate" else above | (weights < settings.correction_min)
    )


def _ratios(logprobs: Tensor, batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return the detached ratio to the sampling version, at the level of `correction_level`."""
    log_ratio = (logprobs - batch.sampled_logprobs).detach()
    if settings.correction_level == "sequence":
        log_ratio = batch.sequence_sum(log_ratio)[batch.sequence]
    elif settings.correction_level == "geometric":
        log_ratio = batch.sequence_mean(log_ratio)[batch.sequence]
    return bounded(log_ratio).exp()


def corrected(losses: Tensor, batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return the token losses, weighted from the sampling version to `old_logprobs`.

    For losses whose own ratio is that of the policy to `old_logprobs`. Without recomputed
    `old_logprobs` every weight is 1.
    """
    weights = correction_weights(batch.old_logprobs, batch, settings)
    return losses if weights is None else losses * weights
