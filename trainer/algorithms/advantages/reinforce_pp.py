"""REINFORCE++: returns, normalized over the whole batch."""

from __future__ import annotations

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.returns import discounted, token_rewards, whitened


def reinforce_pp(batch: BatchView, settings: AlgorithmSettings) -> Floats:
    """Return the discounted return from each token on, normalized over all tokens, shape (T,).

    Step rewards give credit for each step, kl_in=reward for each token. The divergence is usually
    k1. Works with groups of one.
    Source: arXiv 2501.03262, section 3; std has n in the denominator, as in OpenRLHF. verl has
    n - 1: its values are smaller by a factor of sqrt(1 - 1 / T).
    """
    returns = discounted(token_rewards(batch, settings), batch, settings.gamma)
    return whitened(returns, settings.std_offset)
