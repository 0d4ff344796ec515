"""RLOO: the mean reward of the other members is the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.groups import group_advantages


def rloo(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return r - mean of the group's other rewards for each token, shape (T,).

    The baseline does not depend on the token's own trajectory, so the gradient is unbiased.
    Source: Ahmadian et al., arXiv 2402.14740, section 3.2; Kool et al., 2019.
    """
    return group_advantages(batch, settings, _leave_one_out)


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    total, others = fsum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]
