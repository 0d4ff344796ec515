"""Advantages from the comparison of the trajectories of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.returns import outcomes


def group_advantages(
    batch: BatchView,
    settings: AlgorithmSettings,
    compare: Callable[[Sequence[float]], Sequence[float]],
) -> Floats:
    """Return the advantage of each token: that of its trajectory, from the outcomes of its group.

    Args:
        batch: every trajectory has a reward.
        settings: for the KL penalty in the reward.
        compare: outcomes of one group to their advantages.

    Returns:
        Shape (T,).
    """
    found = np.zeros(len(batch.rewards))
    results = outcomes(batch, settings)
    for group in range(batch.group.max(initial=-1) + 1):
        members = np.flatnonzero(batch.group == group)
        found[members] = compare(results[members].tolist())
    return found[batch.trajectory]
