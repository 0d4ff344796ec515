"""GRPO: a group is its own baseline."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from trainer.errors import TooFewMembers


def grpo(rewards: Sequence[float], std_offset: float) -> list[float]:
    """(r - mean) / (std + std_offset), std with n - 1 in the denominator (as torch.std).

    Equal rewards give zeros.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1. The offset keeps nearly solved groups from
    shouting: with one failure in 8 and an offset of 1e-4 the failure weighs 2.5, with 0.3 it weighs
    1.3. Raises TooFewMembers for n < 2.
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
