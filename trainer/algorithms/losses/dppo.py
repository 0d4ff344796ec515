"""DPPO: a mask on the change of probability, and a squared log-ratio penalty."""

from __future__ import annotations

import torch
from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.importance import bounded


def dppo(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return -keep * r * advantage + log_ratio_penalty * log(r)^2, r = exp(logprobs - sampled).

    A token is not kept when its probability has already risen by more than mask_high with a
    positive advantage, or fallen by more than mask_low with another one. The difference of
    probabilities, unlike their ratio, does not cut off improbable tokens. The penalty covers all
    tokens and pulls the policy back to the sampling version. r has a gradient.
    Source: Qi et al., "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv
    2602.04879, binary total variation; the penalty as in prime-rl.
    """
    log_ratio = bounded(batch.logprobs - batch.sampled_logprobs)
    surrogate = torch.where(clipped(batch, settings), 0.0, log_ratio.exp() * batch.advantages)
    return settings.log_ratio_penalty * log_ratio**2 - surrogate


def clipped(batch: LossBatch, settings: AlgorithmSettings) -> Tensor:
    """Return whether each token is masked."""
    rise = (batch.logprobs.exp() - batch.sampled_logprobs.exp()).detach()
    return torch.where(batch.advantages > 0, rise > settings.mask_high, rise < -settings.mask_low)
