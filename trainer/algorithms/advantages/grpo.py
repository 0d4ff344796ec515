"""GRPO: the mean reward of a group is its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from trainer.errors import TooFewMembers


def grpo(rewards: Sequence[float], std_offset: float) -> list[float]:
    """Return (r - mean) / (std + std_offset) for each reward, zeros for equal rewards.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1. std has n - 1 in the denominator, as
    torch.std. The offset limits the advantages of nearly solved groups: that of one failure in 8 is
    -2.5 with an offset of 1e-4, and -1.3 with 0.3.

    Raises:
        TooFewMembers: fewer than two rewards.
    """
    n = len(rewards)
    if n < 2:
        raise TooFewMembers(
            f"grpo over {n} reward(s): with one member every advantage is zero; use groups of 2 or "
            "more"
        )
    mean, std = fmean(rewards), stdev(rewards)
    if std == 0.0:
        return [0.0] * n
    return [(r - mean) / (std + std_offset) for r in rewards]
