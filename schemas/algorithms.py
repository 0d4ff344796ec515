"""Algorithms as data: estimators, losses and numbers by name.

Admission reads here what a group needs, and the trainer loads the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
KlEstimator = Literal["k1", "k2", "k3"]
Correction = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]

Column = Literal["ref_logprobs", "teacher_logprobs", "values"]
"""Optional columns of a batch: each needs a model beside the policy."""

RewardUse = Literal["none", "trajectory", "step"]
"""What an estimator reads. A trajectory without it is left out: its own reward, or any at all."""

CorrectedColumn = Literal["logprobs", "old_logprobs"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An advantage estimator: (BatchView, AlgorithmSettings) -> advantage of each token.

    Attributes:
        path: of the function, below `trainer/algorithms/advantages/`.
        needs: the optional columns that it reads.
        returns: path of the function that returns what a critic is to predict; None: no critic.
        credits: the rewards that it reads.
        compares: whether it compares the members of a group: one alone has no advantage.
    """

    path: str
    needs: tuple[Column, ...] = ()
    returns: str | None = None
    credits: RewardUse = "trajectory"
    compares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A policy loss: (LossBatch, AlgorithmSettings) -> loss of each token.

    Attributes:
        path: of the function, below `trainer/algorithms/losses/`.
        clipped: path of the function that returns which tokens the loss clips, for the metrics;
            None: the loss has no bounds.
        corrected: the column for which its importance weights correct, if `correction` is set.
        recomputes: whether its old log-probabilities are the trainer's own, unless a setting says
            else. The trainer's ratio to an engine in bfloat16 differs from 1 by more than the
            bounds of `gspo`, and its mean log-ratio is negative: nearly all sequences with a
            negative advantage would have no gradient.
        temperature: of the distributions that it trains; None: that of each step's sampling.
        zero_without_advantage: whether it is zero where the advantage is: such tokens need no
            forward pass.
    """

    path: str
    clipped: str | None = None
    corrected: CorrectedColumn | None = None
    recomputes: bool = False
    temperature: float | None = None
    zero_without_advantage: bool = True


ESTIMATORS: Mapping[str, Estimator] = {
    "distillation": Estimator(
        path="distillation:distillation", needs=("teacher_logprobs",), credits="none"
    ),
    "dr_grpo": Estimator(path="dr_grpo:dr_grpo", compares=True),
    "gae": Estimator(path="gae:gae", needs=("values",), returns="gae:gae_returns", credits="step"),
    "gae_steps": Estimator(
        path="gae:gae_steps", needs=("values",), returns="gae:gae_steps_returns", credits="step"
    ),
    "grpo": Estimator(path="grpo:grpo", compares=True),
    "grpo_process": Estimator(path="grpo_process:grpo_process", credits="step", compares=True),
    "maxrl": Estimator(path="maxrl:maxrl", compares=True),
    "ones": Estimator(path="supervised:ones", credits="none"),
    "reinforce_pp": Estimator(path="reinforce_pp:reinforce_pp", credits="step"),
    "reinforce_pp_baseline": Estimator(
        path="reinforce_pp_baseline:reinforce_pp_baseline", compares=True
    ),
    "reward_weights": Estimator(path="supervised:reward_weights"),
    "rloo": Estimator(path="rloo:rloo", compares=True),
}

LOSSES: Mapping[str, Loss] = {
    "cispo": Loss(path="cispo:cispo", clipped="cispo:clipped", corrected="old_logprobs"),
    "cross_entropy": Loss(path="cross_entropy:cross_entropy", temperature=1.0),
    "dppo": Loss(path="dppo:dppo", clipped="dppo:clipped", zero_without_advantage=False),
    "gspo": Loss(
        path="gspo:gspo", clipped="gspo:clipped", corrected="old_logprobs", recomputes=True
    ),
    "policy_gradient": Loss(path="policy_gradient:policy_gradient", corrected="logprobs"),
    "ppo_clip": Loss(
        path="ppo_clip:ppo_clip", clipped="ppo_clip:clipped", corrected="old_logprobs"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm as data.

    Attributes:
        advantage, loss: names in `ESTIMATORS` and `LOSSES`, or `path.to:function`.
        settings: its defaults.
    """

    advantage: str
    loss: str
    settings: AlgorithmSettings = field(default_factory=AlgorithmSettings)


_S = AlgorithmSettings
_TRUNCATED = _S(correction="truncate")
ALGORITHMS: Mapping[str, Algorithm] = {
    "cispo": Algorithm(advantage="grpo", loss="cispo", settings=_S(std_offset=0.3)),
    "dapo": Algorithm(advantage="grpo", loss="ppo_clip", settings=_S(clip_high=0.28)),
    "distillation": Algorithm(
        advantage="distillation", loss="policy_gradient", settings=_TRUNCATED
    ),
    "dppo": Algorithm(advantage="dr_grpo", loss="dppo"),
    "dr_grpo": Algorithm(
        advantage="dr_grpo", loss="ppo_clip", settings=_S(aggregation="fixed_length")
    ),
    "grpo": Algorithm(advantage="grpo", loss="ppo_clip", settings=_S(aggregation="sequence_mean")),
    "grpo_process": Algorithm(
        advantage="grpo_process", loss="ppo_clip", settings=_S(aggregation="sequence_mean")
    ),
    "gspo": Algorithm(
        advantage="grpo",
        loss="gspo",
        settings=_S(aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    ),
    "maxrl": Algorithm(advantage="maxrl", loss="policy_gradient", settings=_TRUNCATED),
    "ppo": Algorithm(advantage="gae", loss="ppo_clip", settings=_S(gae_lambda=0.95)),
    "ppo_steps": Algorithm(advantage="gae_steps", loss="ppo_clip", settings=_S(gae_lambda=0.95)),
    "reinforce_pp": Algorithm(
        advantage="reinforce_pp",
        loss="ppo_clip",
        settings=_S(kl_estimator="k1", kl_in="reward"),
    ),
    "reinforce_pp_baseline": Algorithm(
        advantage="reinforce_pp_baseline", loss="ppo_clip", settings=_S(kl_estimator="k2")
    ),
    "reward_weighted": Algorithm(advantage="reward_weights", loss="cross_entropy"),
    "rloo": Algorithm(advantage="rloo", loss="policy_gradient", settings=_TRUNCATED),
    "sft": Algorithm(advantage="ones", loss="cross_entropy"),
}
"""Algorithms by their name in the admission policy."""


def smallest_group(algorithm: str) -> int:
    """Return the number of members that a group needs to have advantages.

    Args:
        algorithm: name; an unknown algorithm, of another release, needs one member.
    """
    known = ALGORITHMS.get(algorithm)
    return 2 if known is not None and ESTIMATORS[known.advantage].compares else 1


def reads_rewards(algorithm: str) -> bool:
    """Return whether an algorithm reads rewards. algorithm: name; an unknown one does."""
    known = ALGORITHMS.get(algorithm)
    return known is None or ESTIMATORS[known.advantage].credits != "none"
