"""GRPO with process supervision: credit for each step."""

from __future__ import annotations

import numpy as np

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.advantages.grpo import standardized
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.returns import discounted, kl_penalty, placed_rewards


def grpo_process(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the sum of the standardized rewards from each token on, shape (T,).

    All rewards of a group, those of steps and those of trajectories, are standardized together as
    in `grpo`. A token's advantage is the sum of those at or after it in its sequence.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3; the outcome is one more reward at the
    end here. A group with fewer than two rewards has no advantage.
    """
    placed = placed_rewards(batch)
    groups = batch.group[batch.trajectory]
    found = np.zeros(len(placed))
    for group in range(batch.group.max(initial=-1) + 1):
        rewarded = np.flatnonzero((groups == group) & ~np.isnan(placed))
        if len(rewarded) > 1:
            found[rewarded] = standardized(placed[rewarded].tolist(), settings.std_offset)
    return discounted(found - kl_penalty(batch, settings), batch, 1.0)
