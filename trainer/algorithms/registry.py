"""Algorithms, estimators and losses by name, and users' own by `path.to:function`.

Importing the registry imports no torch: admission checks the name of an algorithm, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from clawstream.schemas.algorithms import AlgorithmSettings
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.rule_spec import is_own
from clawstream.schemas.user_function import FunctionNotFound, load_function

if TYPE_CHECKING:
    from torch import Tensor

    from clawstream.trainer.algorithms.batch import BatchView, Floats, Loss, LossBatch

Column = Literal["ref_logprobs", "teacher_logprobs", "values"]
RewardUse = Literal["none", "trajectory", "step"]
"""What an estimator reads. A trajectory without it is left out: its own reward, or any at all."""

CorrectedColumn = Literal["logprobs", "old_logprobs"]

_A, _L = "clawstream.trainer.algorithms.advantages", "clawstream.trainer.algorithms.losses"
ADVANTAGES: Mapping[str, str] = {
    "distillation": f"{_A}.distillation:distillation",
    "dr_grpo": f"{_A}.dr_grpo:dr_grpo",
    "gae": f"{_A}.gae:gae",
    "gae_steps": f"{_A}.gae:gae_steps",
    "grpo": f"{_A}.grpo:grpo",
    "grpo_process": f"{_A}.grpo_process:grpo_process",
    "maxrl": f"{_A}.maxrl:maxrl",
    "ones": f"{_A}.supervised:ones",
    "reinforce_pp": f"{_A}.reinforce_pp:reinforce_pp",
    "reinforce_pp_baseline": f"{_A}.reinforce_pp_baseline:reinforce_pp_baseline",
    "reward_weights": f"{_A}.supervised:reward_weights",
    "rloo": f"{_A}.rloo:rloo",
}
"""Estimators: (BatchView, AlgorithmSettings) -> advantage of each token."""

LOSSES: Mapping[str, str] = {
    "cispo": f"{_L}.cispo:cispo",
    "cross_entropy": f"{_L}.cross_entropy:cross_entropy",
    "dppo": f"{_L}.dppo:dppo",
    "gspo": f"{_L}.gspo:gspo",
    "policy_gradient": f"{_L}.policy_gradient:policy_gradient",
    "ppo_clip": f"{_L}.ppo_clip:ppo_clip",
}
"""Losses: (LossBatch, AlgorithmSettings) -> loss of each token."""

CLIPPED: Mapping[str, str] = {
    "cispo": f"{_L}.cispo:clipped",
    "dppo": f"{_L}.dppo:clipped",
    "gspo": f"{_L}.gspo:clipped",
    "ppo_clip": f"{_L}.ppo_clip:clipped",
}
"""Which tokens a loss clips, for the metrics: (LossBatch, AlgorithmSettings) -> bool of each."""

CORRECTED: Mapping[str, CorrectedColumn] = {
    "cispo": "old_logprobs",
    "gspo": "old_logprobs",
    "policy_gradient": "logprobs",
    "ppo_clip": "old_logprobs",
}
"""The column for which the importance weights of a loss correct, if `correction` is set."""

RECOMPUTES = frozenset({"gspo"})
"""Losses that need the trainer's own old log-probabilities.

The trainer's ratio to an engine in bfloat16 differs from 1 by more than their bounds, and its mean
log-ratio is negative: nearly all sequences with a negative advantage would have no gradient.
"""

OF_THE_MODEL = frozenset({"cross_entropy"})
"""Losses of the model's own distribution: at temperature 1, whatever the steps were sampled at."""

NEEDS: Mapping[str, Column] = {
    "distillation": "teacher_logprobs",
    "gae": "values",
    "gae_steps": "values",
}
"""The optional column of the batch view that an estimator reads."""

RETURNS: Mapping[str, str] = {
    "gae": f"{_A}.gae:gae_returns",
    "gae_steps": f"{_A}.gae:gae_steps_returns",
}
"""(BatchView, AlgorithmSettings) -> what a critic is to predict, of each estimator with values."""

WITHOUT_REWARDS = frozenset({"distillation", "ones"})
CREDITS_STEPS = frozenset({"gae", "gae_steps", "grpo_process", "reinforce_pp"})
"""Estimators without rewards, and estimators of step rewards and trajectory rewards together."""

COMPARES = frozenset({"dr_grpo", "grpo", "grpo_process", "maxrl", "reinforce_pp_baseline", "rloo"})
"""Estimators that compare the members of a group: one alone has no advantage."""

NOT_ZERO_WITHOUT_ADVANTAGE = frozenset({"dppo"})
"""Losses that are not zero where the advantage is: those tokens need a forward pass, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm as data.

    Attributes:
        advantage, loss: names in `ADVANTAGES` and `LOSSES`, or `path.to:function`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAlgorithm:
    """An algorithm with its functions.

    Attributes:
        returns: target of the critic's value at each token; None for an estimator without values.
        clipped: which tokens the loss clips; None for a loss without bounds, or a user's own.
        corrected: the column that the importance weights of the loss are for; None without them.
        needs: optional columns of the batch that must be there.
        rewards: the rewards that it reads; of a user's own estimator: those of trajectories.
        smallest_group: members that the estimator needs.
        recomputes: whether its old log-probabilities are the trainer's unless a setting says else.
        temperature: of the distributions that it trains; None: that of each step's sampling.
        own_advantage: whether the estimator is a user's own.
        skips_zero_advantages: whether loss and gradient of a sequence without advantage are zero.
    """

    name: str
    advantage: Callable[[BatchView, AlgorithmSettings], Floats]
    returns: Callable[[BatchView, AlgorithmSettings], Floats] | None
    loss: Loss
    clipped: Callable[[LossBatch, AlgorithmSettings], Tensor] | None
    corrected: CorrectedColumn | None
    settings: AlgorithmSettings
    needs: frozenset[Column]
    rewards: RewardUse
    smallest_group: int
    recomputes: bool
    temperature: float | None
    own_advantage: bool
    skips_zero_advantages: bool


def specification(
    name: str, overrides: Mapping[str, Any], environment: str | None = None
) -> Algorithm:
    """Return the algorithm of that name with overrides, without loading a function.

    Args:
        name: in `ALGORITHMS`.
        overrides: fields of `trainer.algorithm` that are set: advantage, loss, and settings.
        environment: that has it; None: the run.

    Raises:
        SettingsError: the name, an estimator or a loss is unknown.
    """
    if name not in ALGORITHMS:
        raise SettingsError(
            f"setting {setting_of('algorithm', environment)}={name!r}: this trainer has "
            f"{', '.join(sorted(ALGORITHMS))}"
        )
    algorithm, numbers = ALGORITHMS[name], dict(overrides)
    algorithm = replace(
        algorithm,
        advantage=numbers.pop("advantage", algorithm.advantage),
        loss=numbers.pop("loss", algorithm.loss),
        settings=replace(algorithm.settings, **numbers),
    )
    for part, known in (("advantage", ADVANTAGES), ("loss", LOSSES)):
        spec = getattr(algorithm, part)
        if spec not in known and not is_own(spec):
            raise SettingsError(
                f"setting {setting_of(part, environment)}={spec!r}: this trainer has "
                f"{', '.join(sorted(known))}; a function of your own is path.to:function"
            )
    return algorithm


def setting_of(part: str, environment: str | None) -> str:
    """Return the setting that names the algorithm, or a part of it, of an environment."""
    if environment is not None:
        return f"trainer.environments.{environment}.{part}"
    return "admit.policy.algorithm" if part == "algorithm" else f"trainer.algorithm.{part}"


def needs(algorithm: Algorithm) -> frozenset[Column]:
    """Return the optional columns of the batch that an algorithm reads."""
    found = {NEEDS[algorithm.advantage]} if algorithm.advantage in NEEDS else set()
    if algorithm.settings.kl_coef:
        found.add("ref_logprobs")
    return frozenset(found)


def load_all(
    names: Mapping[str | None, tuple[str, Mapping[str, Any]]], folders: Sequence[Path]
) -> dict[str | None, LoadedAlgorithm]:
    """Return the algorithm of each environment with its functions loaded.

    Args:
        names: name and overrides of each; None: of all other environments.
        folders: where users' files and modules are looked up.

    Raises:
        SettingsError: an algorithm or one of its functions does not exist.
    """
    return {
        environment: load(name, overrides, folders, environment)
        for environment, (name, overrides) in names.items()
    }


def load(
    name: str, overrides: Mapping[str, Any], folders: Sequence[Path], environment: str | None = None
) -> LoadedAlgorithm:
    """Return an algorithm with its functions loaded, as `load_all`."""
    algorithm = specification(name, overrides, environment)
    s = algorithm.settings
    advantage, loss = (setting_of(part, environment) for part in ("advantage", "loss"))
    # A user's own loss may not be zero where the advantage is.
    zero = algorithm.loss in LOSSES and algorithm.loss not in NOT_ZERO_WITHOUT_ADVANTAGE
    estimator = _function(advantage, algorithm.advantage, ADVANTAGES, folders)
    own_needs, own_returns = _asked_for(advantage, estimator)
    return LoadedAlgorithm(
        name=name,
        advantage=estimator,
        returns=_function(advantage, algorithm.advantage, RETURNS, folders)
        if algorithm.advantage in RETURNS
        else own_returns,
        loss=_function(loss, algorithm.loss, LOSSES, folders),
        clipped=_function(loss, algorithm.loss, CLIPPED, folders)
        if algorithm.loss in CLIPPED
        else None,
        corrected=None if s.correction == "none" else CORRECTED.get(algorithm.loss),
        settings=s,
        needs=needs(algorithm) | own_needs,
        rewards=_rewards(algorithm.advantage),
        smallest_group=2 if algorithm.advantage in COMPARES else 1,
        recomputes=algorithm.loss in RECOMPUTES,
        temperature=1.0 if algorithm.loss in OF_THE_MODEL else None,
        own_advantage=algorithm.advantage not in ADVANTAGES,
        skips_zero_advantages=zero and not s.entropy_coef and not (s.kl_coef and s.kl_in == "loss"),
    )


def _asked_for(
    setting: str, estimator: Callable[..., Any]
) -> tuple[frozenset[Column], Callable[..., Any] | None]:
    """Return the columns and the target of a critic that a user's estimator asks for.

    It has them as attributes `needs` and `returns`.
    """
    columns: frozenset[Column] = frozenset(getattr(estimator, "needs", ()))
    if unknown := sorted(columns - {*get_args(Column)}):
        raise SettingsError(
            f"setting {setting}: it needs {', '.join(unknown)}; a batch can have "
            f"{', '.join(get_args(Column))}"
        )
    returns: Callable[..., Any] | None = getattr(estimator, "returns", None)
    if "values" in columns and returns is None:
        raise SettingsError(
            f"setting {setting}: it needs values, so it must say what the critic is to predict: a "
            "function `returns` beside `needs`"
        )
    return columns, returns


def _rewards(advantage: str) -> RewardUse:
    if advantage in WITHOUT_REWARDS:
        return "none"
    return "step" if advantage in CREDITS_STEPS else "trajectory"


def _function(
    setting: str, spec: str, built_in: Mapping[str, str], folders: Sequence[Path]
) -> Callable[..., Any]:
    if spec in built_in:
        module, _, name = built_in[spec].partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function
    return load_function_of(setting, spec, folders)


def load_function_of(setting: str, spec: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """Return a user's function. Raises SettingsError that names the setting."""
    try:
        return load_function(spec, folders)
    except FunctionNotFound as e:
        raise SettingsError(f"setting {setting}={spec!r}: {e}") from e
