"""The numbers of an algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSettings:
    """Settings of estimators and losses; each part reads its own. docs/algorithms.md explains them.

    Attributes:
        std_offset: added to a standard deviation, in units of the reward.
        gamma: discount a token (a step in `gae_steps`).
        gae_lambda: lambda of GAE.
        aggregation: from token losses to the loss of a minibatch.
        fixed_length: tokens; divisor of `fixed_length`.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: bound of the ratio for negative advantages.
        ratio_max: upper bound of the detached ratio of CISPO.
        mask_low, mask_high: DPPO; largest fall and rise of a token's probability.
        log_ratio_penalty: DPPO; coefficient of the squared log-ratio.
        kl_coef: coefficient of the divergence from the reference policy.
        kl_estimator: see `clawstream.trainer.algorithms.kl`.
        kl_in: whether the divergence is a loss term or subtracted from rewards.
        entropy_coef: coefficient of the entropy bonus.
        correction: what is done with importance weights out of bounds.
        correction_level: token: one weight a token; sequence: their product; geometric: their
            geometric mean.
        correction_min, correction_max: bounds of the weight; truncate uses the upper one only.
    """

    std_offset: float = 1e-6
    gamma: float = 1.0
    gae_lambda: float = 1.0
    aggregation: Aggregation = "token_mean"
    fixed_length: int = 4096
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    ratio_max: float = 2.0
    mask_low: float = 0.2
    mask_high: float = 0.2
    log_ratio_penalty: float = 1e-3
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = 0.0
    correction: Correction = "none"
    correction_level: Level = "token"
    correction_min: float = 0.5
    correction_max: float = 2.0
