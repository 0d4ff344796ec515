"""Weights of supervised training: 1, or the reward."""

from __future__ import annotations

import numpy as np

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats


def ones(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return 1 for each token, shape (T,): the data was chosen by admission or by a query."""
    return np.ones(len(batch.sequence))


def reward_weights(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the trajectory's reward for each token, shape (T,).

    With rewards of 0 and 1 this is rejection-sampling fine-tuning.
    Source: Peters and Schaal, "Reward-weighted regression", 2007.
    """
    return batch.rewards[batch.trajectory]
