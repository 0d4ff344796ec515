"""Algorithms, estimators and losses by name, and users' own by `path.to:function`.

Importing the registry imports no torch: admission checks the name of an algorithm, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from clawstream.schemas.algorithms import (
    ALGORITHMS,
    ESTIMATORS,
    LOSSES,
    Algorithm,
    AlgorithmSettings,
    Column,
    CorrectedColumn,
    Estimator,
    Loss,
    RewardUse,
)
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.rule_spec import is_own
from clawstream.schemas.user_function import FunctionNotFound, load_function

if TYPE_CHECKING:
    from torch import Tensor

    from clawstream.schemas.settings import Settings
    from clawstream.trainer.algorithms.batch import BatchView, Floats, LossBatch, LossFunction


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
    loss: LossFunction
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


def specification(name: str, overrides: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm of that name with overrides, without loading a function.

    Args:
        name: in `ALGORITHMS`.
        overrides: fields of `trainer.algorithm` that are set: advantage, loss, and settings.

    Raises:
        SettingsError: the name, an estimator or a loss is unknown.
    """
    if name not in ALGORITHMS:
        raise SettingsError(
            f"setting {setting_of('algorithm')}={name!r}: this trainer has "
            f"{', '.join(sorted(ALGORITHMS))}"
        )
    algorithm, numbers = ALGORITHMS[name], dict(overrides)
    algorithm = replace(
        algorithm,
        advantage=numbers.pop("advantage", algorithm.advantage),
        loss=numbers.pop("loss", algorithm.loss),
        settings=replace(algorithm.settings, **numbers),
    )
    for part, known in (("advantage", ESTIMATORS), ("loss", LOSSES)):
        spec = getattr(algorithm, part)
        if spec not in known and not is_own(spec):
            raise SettingsError(
                f"setting {setting_of(part)}={spec!r}: this trainer has "
                f"{', '.join(sorted(known))}; a function of your own is path.to:function"
            )
    return algorithm


def setting_of(part: str) -> str:
    """Return the setting that names the algorithm of the run, or a part of it."""
    return "admit.policy.algorithm" if part == "algorithm" else f"trainer.algorithm.{part}"


def needs(algorithm: Algorithm) -> frozenset[Column]:
    """Return the optional columns of the batch that an algorithm reads.

    Those of a user's own estimator are known once it is loaded.
    """
    columns = set(estimator_of(algorithm).needs)
    if algorithm.settings.kl_coef:
        columns.add("ref_logprobs")
    return frozenset(columns)


def estimator_of(algorithm: Algorithm) -> Estimator:
    """Return the estimator of an algorithm; that of a user reads rewards of trajectories."""
    return ESTIMATORS.get(algorithm.advantage, Estimator(path=algorithm.advantage))


def _loss_of(algorithm: Algorithm) -> Loss:
    """Return the loss of an algorithm; that of a user may not be zero where the advantage is."""
    own = Loss(path=algorithm.loss, zero_without_advantage=False)
    return LOSSES.get(algorithm.loss, own)


def load(name: str, overrides: Mapping[str, Any], folders: Sequence[Path]) -> LoadedAlgorithm:
    """Return an algorithm with its functions loaded.

    Args:
        name: in `ALGORITHMS`.
        overrides: fields of `trainer.algorithm` that are set.
        folders: where users' files and modules are looked up.

    Raises:
        SettingsError: the algorithm or one of its functions does not exist.
    """
    algorithm = specification(name, overrides)
    s, estimator, loss = algorithm.settings, estimator_of(algorithm), _loss_of(algorithm)
    advantage: Callable[..., Any]
    returns: Callable[..., Any] | None
    columns = needs(algorithm)
    if own_advantage := algorithm.advantage not in ESTIMATORS:
        advantage = load_function_of("advantage", algorithm.advantage, folders)
        own_columns, returns = _asked_for(advantage)
        columns |= own_columns
    else:
        advantage = _function(f"advantages.{estimator.path}")
        returns = _function(f"advantages.{estimator.returns}") if estimator.returns else None
    return LoadedAlgorithm(
        name=name,
        advantage=advantage,
        returns=returns,
        loss=_function(f"losses.{loss.path}")
        if algorithm.loss in LOSSES
        else load_function_of("loss", algorithm.loss, folders),
        clipped=_function(f"losses.{loss.clipped}") if loss.clipped else None,
        corrected=None if s.correction == "none" else loss.corrected,
        settings=s,
        needs=columns,
        rewards=estimator.credits,
        smallest_group=2 if estimator.compares else 1,
        recomputes=loss.recomputes,
        temperature=loss.temperature,
        own_advantage=own_advantage,
        skips_zero_advantages=loss.zero_without_advantage
        and not s.entropy_coef
        and not (s.kl_coef and s.kl_in == "loss"),
    )


def load_algorithm(settings: Settings, name: str) -> LoadedAlgorithm:
    """Return an algorithm as the settings of the trainer change it. Raises as `load`."""
    return load(name, settings.trainer.algorithm.overrides, settings.functions.folders)


def _asked_for(
    estimator: Callable[..., Any],
) -> tuple[frozenset[Column], Callable[..., Any] | None]:
    """Return the columns and the target of a critic that a user's estimator asks for.

    It has them as attributes `needs` and `returns`.
    """
    columns: frozenset[Column] = frozenset(getattr(estimator, "needs", ()))
    if unknown := sorted(columns - {*get_args(Column)}):
        raise SettingsError(
            f"setting {setting_of('advantage')}: it needs {', '.join(unknown)}; a batch can have "
            f"{', '.join(get_args(Column))}"
        )
    returns: Callable[..., Any] | None = getattr(estimator, "returns", None)
    if "values" in columns and returns is None:
        raise SettingsError(
            f"setting {setting_of('advantage')}: it needs values, so it must say what the critic "
            "is to predict: a function `returns` beside `needs`"
        )
    return columns, returns


def _function(path: str) -> Callable[..., Any]:
    """Return a function of this package. path: `advantages.<module>:<function>` or `losses...`."""
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(
        import_module(f"clawstream.trainer.algorithms.{module}"), name
    )
    return function


def load_function_of(part: str, spec: str, folders: Sequence[Path]) -> Callable[..., Any]:
    """Return a user's estimator or loss. Raises SettingsError that names its setting."""
    try:
        return load_function(spec, folders)
    except FunctionNotFound as e:
        raise SettingsError(f"setting {setting_of(part)}={spec!r}: {e}") from e
