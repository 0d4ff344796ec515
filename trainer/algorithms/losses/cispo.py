"""CISPO: policy gradient with a detached, bounded ratio."""

from __future__ import annotations

from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import bounded, corrected


def cispo(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return -min(exp(logprobs - old), ratio_max) * advantage * logprobs, with a detached ratio.

    No token is cut out of the gradient, unlike with PPO's clipping. With the sampled
    log-probabilities as the old ones this is token-level truncated importance sampling: stale and
    mixed-version sequences need no other correction.
    Source: MiniMax-M1, arXiv 2506.13585, eq. 4 and 5, without a lower bound; Ionides, 2008.
    """
    log_ratio = bounded(batch.logprobs.detach() - batch.old_logprobs)
    ratio = log_ratio.exp().clamp(max=settings.ratio_max)
    return corrected(-(ratio * batch.advantages * batch.logprobs), batch, settings)


def clipped(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return whether the ratio of each token is above ratio_max."""
    return bounded(batch.logprobs.detach() - batch.old_logprobs).exp() > settings.ratio_max
