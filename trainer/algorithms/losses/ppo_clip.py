"""PPO's clipped surrogate, with separate bounds and dual clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import bounded, corrected


def ppo_clip(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return the clipped surrogate of each token.

    r = exp(logprobs - old). See `clipped_surrogate`.
    Source: Schulman et al., arXiv 1707.06347, eq. 7.
    """
    ratio = bounded(batch.logprobs - batch.old_logprobs).exp()
    return corrected(clipped_surrogate(ratio, batch.advantages, settings), batch, settings)


def clipped(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return whether each token has no gradient, because its ratio is out of bounds."""
    ratio = bounded(batch.logprobs.detach() - batch.old_logprobs).exp()
    return out_of_bounds(ratio, batch.advantages, settings)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at most -dual_clip A where
    A < 0.

    clip_high above clip_low lets improbable tokens rise further ("clip-higher", DAPO, arXiv
    2503.14476). dual_clip bounds the loss of stale tokens with a negative advantage (Ye et al.,
    arXiv 1912.09729).

    Args:
        ratio, advantages: shape (tokens,).
        settings: `clip_low`, `clip_high`, `dual_clip`.

    Returns:
        Shape (tokens,).
    """
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    bound = -settings.dual_clip * advantages
    return torch.where(advantages < 0, torch.minimum(losses, bound), losses)


def out_of_bounds(ratio: Tensor, advantages: Tensor, settings: AlgorithmSettings) -> Tensor:
    """Return where the clipped surrogate is constant in the ratio. Arguments as above."""
    outside = torch.where(
        advantages > 0, ratio > 1.0 + settings.clip_high, ratio < 1.0 - settings.clip_low
    )
    outside |= (advantages < 0) & (ratio > settings.dual_clip)
    return outside & (advantages != 0)
