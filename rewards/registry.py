"""Built-in reward functions by name, and how a name in the settings becomes a function.

A new reward function is one pure file and one line in `BUILT_IN`. A reward with settings is one
package and one line in `FACTORIES`; its functions run in the child processes of users' functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from clawstream.rewards.exact_match import exact_match
from clawstream.rewards.last_number import last_number
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import Trajectory
from clawstream.schemas.records.parts import RewardSource
from clawstream.schemas.rule_spec import NamedFunction, function_of
from clawstream.schemas.settings.reward_models import RewardModel, compares, source_of
from clawstream.schemas.user_function import Find, FunctionNotFound

Value = float | tuple[float | None, Mapping[str, Any]] | None
"""A number, None, or one of them with details for the record."""
RewardFunction = Callable[[Trajectory], Value | Mapping[str, Value | str]]
"""Maps a trajectory to its reward, or to rewards of some of its steps by step id.

A text is the reason why a step has none.

A function that raises gives no reward; the error is the recorded reason.
"""


GroupFunction = Callable[[Sequence[Trajectory]], Sequence[Value | str]]
"""Maps members of a group to the reward of each; a text is the reason why it has none."""


@dataclass(frozen=True)
class Rule(NamedFunction[RewardFunction]):
    """A reward function with the name, version and source that its rewards carry."""

    source: RewardSource = "rule"
    by: ClassVar[str] = "clawstream.reward"


@dataclass(frozen=True)
class GroupRule(NamedFunction[GroupFunction]):
    """A function that compares the members of a group, and what its rewards carry."""

    source: RewardSource = "judge"
    by: ClassVar[str] = "clawstream.compare"


BUILT_IN: Mapping[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
}


FACTORIES: Mapping[str, str] = {
    "code": "clawstream.rewards.code.reward:code_tests",
    "disrm": "clawstream.rewards.classifier.reward:classifier",
    "genrm": "clawstream.rewards.judge.reward:judge",
}
"""Type of a reward model to what makes its function of its settings."""


def rule_of(
    spec: str, setting: str, find: Find, models: Mapping[str, RewardModel] = MappingProxyType({})
) -> Rule:
    """Resolve a reward function by its name in a setting.

    Args:
        spec: `name@version`, `file.py:function@version` or `module:function@version`.
        setting: Name of the setting, for errors.
        find: Loads a user's function, or makes that of a reward model.
        models: `Settings.reward_models`.

    Raises:
        SettingsError: There is no such function, it compares the members of a group, or the spec
            has another form.
    """
    for name in models.keys() & BUILT_IN.keys():
        raise SettingsError(f"setting jobs.reward_models.{name}: a built-in function has that name")
    known = {**BUILT_IN, **dict.fromkeys(models, _not_made)}
    named = function_of(spec, setting, known, "reward", find)
    if named.function is not _not_made:
        return Rule(named.name, named.version, named.function)
    model = models[named.name]
    if compares(model):
        raise SettingsError(f"setting {setting}: {spec!r} needs a group, here is one trajectory")
    return Rule(named.name, named.version, _made(named.name, model, find), source_of(model))


def group_rule_of(
    spec: str, setting: str, find: Find, models: Mapping[str, RewardModel]
) -> GroupRule:
    """Resolve a judge that compares the members of a group.

    Args:
        spec: `name@version`.
        setting: Name of the setting, for errors.
        find: Makes the function of the judge.
        models: `Settings.reward_models`.

    Raises:
        SettingsError: It cannot be made, or the spec has another form.
    """
    named = function_of(spec, setting, dict.fromkeys(models, _not_made), "reward", find)
    model = models[named.name]
    return GroupRule(named.name, named.version, _made(named.name, model, find), source_of(model))


def _made(name: str, model: RewardModel, find: Find) -> Callable[..., Any]:
    try:
        return find(FACTORIES[model.type], model.model_dump_json())
    except FunctionNotFound as e:
        raise SettingsError(f"setting jobs.reward_models.{name}: {e}") from e


def _not_made(trajectory: Trajectory) -> None:
    """Stand for the function of a reward model until its name is found to be right."""
