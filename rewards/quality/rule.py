"""A quality rule with the name and version that its findings carry, as the settings name it."""

from __future__ import annotations

from collections.abc import Iterable

from rewards.quality.built_in import BUILT_IN
from rewards.quality.score import QualityRule
from schemas.errors import SettingsError
from schemas.rule_spec import REVISION_MAX, NamedFunction, function_of
from schemas.user_function import Find

Rule = NamedFunction[QualityRule]
"""A quality rule under the name and version that its findings carry."""


ALL = "built_in"
"""Stands for every built-in rule."""


def rules_of_run(specs: Iterable[str], setting: str, find: Find) -> tuple[Rule, ...]:
    """The rules of a run, in the order of the settings; `find` gives a user's own. Raises SettingsError that begins with the setting's name."""
    named: list[Rule] = []
    for spec in specs:
        found = (
            [NamedFunction(name, "1", rule) for name, rule in BUILT_IN.items()]
            if spec == ALL
            else [rule_of(spec, setting, find)]
        )
        for rule in found:
            if any(rule.name == other.name for other in named):
                raise SettingsError(f"setting {setting}: {rule.name} is named twice")
        named += found
    if sum(rule.revision for rule in named) > REVISION_MAX:
        raise SettingsError(f"setting {setting}: the sum of the versions is above {REVISION_MAX}")
    return tuple(named)


def rule_of(spec: str, setting: str, find: Find) -> Rule:
    """Resolve a quality rule by its name in a setting; `find` gives a user's own. Raises SettingsError."""
    return function_of(spec, setting, BUILT_IN, "quality rule", find)
