"""Estimates of the divergence from a reference policy, from sampled tokens."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from clawstream.schemas.algorithms import KlEstimator
from clawstream.trainer.algorithms.batch import Floats
from clawstream.trainer.algorithms.importance import LARGEST_LOG_RATIO, bounded

Values = TypeVar("Values", Tensor, Floats)


def kl(logprobs: Values, ref_logprobs: Values, estimator: KlEstimator) -> Values:
    """Return an estimate of KL(policy || reference) for each token, in nats.

    With d = logprobs - ref_logprobs: k1 is d, unbiased, of high variance; k2 is d^2 / 2, biased,
    and its gradient is that of the divergence; k3 is exp(-d) - 1 + d, unbiased and never negative,
    with d limited as every log-ratio that is exponentiated.
    Source: J. Schulman, "Approximating KL divergence", 2020; k3 as a loss: arXiv 2402.03300, eq. 4.

    Args:
        logprobs, ref_logprobs: shape (tokens,).
        estimator: which estimate.

    Returns:
        Shape (tokens,).
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d * d / 2
        case "k3":
            if isinstance(d, Tensor):
                d = bounded(d)
                return torch.expm1(-d) + d
            d = np.clip(d, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
            return np.expm1(-d) + d
