"""REINFORCE++ with baseline: rewards minus the group's mean, normalized over the whole batch."""

from __future__ import annotations

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.advantages.dr_grpo import dr_grpo
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.returns import whitened


def reinforce_pp_baseline(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return r - mean of the group, normalized over all tokens of the batch, shape (T,).

    The unit is the same for all groups, unlike that of GRPO.
    Source: arXiv 2501.03262, section 3, for several samples a prompt; std as in `reinforce_pp`.
    """
    return whitened(dr_grpo(batch, settings), settings.std_offset)
