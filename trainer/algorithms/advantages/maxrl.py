"""MaxRL: the mean reward of a group is baseline and unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.groups import group_advantages


def maxrl(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return (r - mean) / (mean + std_offset) of the group for each token, shape (T,).

    For rewards of 0 and 1, division by the success rate turns the gradient of the success rate into
    an estimate of that of its logarithm, so rare successes weigh more. A group whose mean is not
    positive has no advantage. std_offset stands in the place of the paper's zero.
    Source: Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv 2602.02710.
    """
    return group_advantages(batch, settings, partial(_relative, offset=settings.std_offset))


def _relative(rewards: Sequence[float], offset: float) -> list[float]:
    mean = fmean(rewards)
    return [(r - mean) / (mean + offset) if mean > 0.0 else 0.0 for r in rewards]
