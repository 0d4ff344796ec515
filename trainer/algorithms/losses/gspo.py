"""GSPO: one ratio for each sequence."""

from __future__ import annotations

from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import bounded, corrected
from clawstream.trainer.algorithms.losses.ppo_clip import clipped_surrogate, out_of_bounds


def gspo(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return the clipped surrogate of each token with the ratio of its sequence.

    s = exp(mean over the sequence of (logprobs - old)). The gradient of a token is s times that of
    its own logprobs (GSPO-token): with aggregation=sequence_mean and one advantage a sequence, sum
    and gradient are those of GSPO; advantages may also differ within a sequence.
    Source: Zheng et al., arXiv 2507.18071, eq. 5 and 7; GSPO-token: eq. 13 and 14.
    """
    mean = batch.sequence_mean(batch.logprobs.detach() - batch.old_logprobs)[batch.sequence]
    ratio = bounded(mean + batch.logprobs - batch.logprobs.detach()).exp()
    return corrected(clipped_surrogate(ratio, batch.advantages, settings), batch, settings)


def clipped(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return whether each token has no gradient, because the ratio of its sequence is out of
    bounds.
    """
    mean = batch.sequence_mean(batch.logprobs.detach() - batch.old_logprobs)[batch.sequence]
    return out_of_bounds(bounded(mean).exp(), batch.advantages, settings)
