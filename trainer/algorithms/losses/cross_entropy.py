"""Weighted cross-entropy, for supervised training."""

from __future__ import annotations

from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch


def cross_entropy(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return -weight * logprobs of each token; the weight is its advantage.

    Sampling-time log-probabilities are not used: the data may come from another policy.
    """
    return -(batch.advantages * batch.logprobs)
