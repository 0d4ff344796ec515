"""GRPO: the mean reward of a group is its baseline, its standard deviation the unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, stdev

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.groups import group_advantages


def grpo(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return (r - mean) / (std + std_offset) of the group for each token, shape (T,).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2, outcome supervision. The paper has no
    offset; TRL adds 1e-4, verl 1e-6.
    """
    return group_advantages(batch, settings, partial(standardized, std_offset=settings.std_offset))


def standardized(rewards: Sequence[float], std_offset: float) -> list[float]:
    """Return (r - mean) / (std + std_offset) for each reward, zeros for equal rewards.

    std has n - 1 in the denominator, as torch.std. The offset limits the advantages of nearly
    solved groups: that of one failure in 8 is -2.5 with an offset of 1e-4, and -1.3 with 0.3.

    Args:
        rewards: of a group, at least two.
        std_offset: added to the standard deviation.
    """
    mean, std = fmean(rewards), stdev(rewards)
    if std == 0.0:
        return [0.0] * len(rewards)
    return [(r - mean) / (std + std_offset) for r in rewards]
