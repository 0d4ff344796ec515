"""REINFORCE, with importance weights between the sampling version and the policy."""

from __future__ import annotations

from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import correction_weights


def policy_gradient(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return -w * advantage * logprobs, w by `correction` and 1 without one.

    Source: Williams, "Simple statistical gradient-following algorithms", 1992.
    """
    losses = -(batch.advantages * batch.logprobs)
    weights = correction_weights(batch.logprobs, batch, settings)
    return losses if weights is None else losses * weights
