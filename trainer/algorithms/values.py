"""The loss of a critic, and how well its values explain the returns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from clawstream.trainer.algorithms.batch import Floats


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of each token.

    A value that has moved by more than `clip` towards its return has no gradient, as a clipped
    ratio of the policy.
    Source: squared error: Schulman et al., arXiv 1707.06347, eq. 9; clipped: the authors' code
    (OpenAI Baselines, ppo2); verl has the same.

    Args:
        values: (tokens,), of the critic, with gradient.
        old_values: (tokens,), of the critic before the first optimiser step on the batch.
        returns: (tokens,), what the values are to predict.
        clip: in units of the reward.

    Returns:
        Shape (tokens,).
    """
    clipped = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2


def explained_variance(values: Floats, returns: Floats) -> float | None:
    """Return 1 - Var(returns - values) / Var(returns).

    None without returns, if they are all equal, or if a value or return is not finite.
    1: the values predict the returns; 0: no better than a constant; negative: worse than one.
    """
    if not (len(returns) and np.isfinite(values).all() and np.isfinite(returns).all()):
        return None
    spread = float(np.var(returns))
    return 1.0 - float(np.var(returns - values)) / spread if spread else None
