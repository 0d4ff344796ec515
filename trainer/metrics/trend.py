"""Whether training gets worse: a fall of the mean reward that chance does not explain. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean

WINDOW = 8
"""Versions whose mean rewards are averaged."""
LOOK_BACK = 100
"""Versions that are compared: the best window among more of them is good by chance."""
AFTER_RISE, WITHOUT_RISE = 3.5, 5.0
"""Standard errors of a fall: after a rise of as many, and in a run whose reward never rose."""
SHARE_OF_RISE = 0.25
"""Share of the rise that a fall takes at least: a plateau is no fall."""


def reward_fall(rewards: Sequence[float]) -> float | None:
    """Return how far the mean reward of the last `WINDOW` versions is below the best window.

    The noise of a version's mean reward is estimated from the differences of neighbours, so that
    a trend does not count as noise (von Neumann, 1941).

    Args:
        rewards: mean reward of the versions, oldest first.

    Returns:
        The fall in units of the reward; None if there is none that chance does not explain.
    """
    rewards = rewards[-LOOK_BACK:]
    if len(rewards) < 2 * WINDOW:
        return None
    noise = sqrt(fmean((a - b) ** 2 for a, b in pairwise(rewards)) / 2)
    error = noise * sqrt(2 / WINDOW)
    means = [fmean(rewards[i : i + WINDOW]) for i in range(len(rewards) - WINDOW + 1)]
    rise, fall = max(means) - means[0], max(means) - means[-1]
    errors = AFTER_RISE if rise > AFTER_RISE * error else WITHOUT_RISE
    return fall if fall > max(errors * error, SHARE_OF_RISE * rise) else None
