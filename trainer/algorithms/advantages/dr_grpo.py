"""Dr. GRPO: GRPO without the standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.groups import group_advantages


def dr_grpo(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return r - mean of the group for each token, shape (T,).

    Without the division, groups of all difficulties count alike.
    Source: arXiv 2503.20783, section 3.2.
    """
    return group_advantages(batch, settings, _centered)


def _centered(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards)
    return [r - mean for r in rewards]
