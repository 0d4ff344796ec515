"""A quality rule with the name and version that its findings carry, as the settings name it."""

from __future__ import annotations

from collections.abc import Iterable

from quality.built_in import BUILT_IN
from quality.score import QualityRule
from schemas.errors import SettingsError
from schemas.named_function import REVISION_MAX, Named, function_of

Rule = Named[QualityRule]
"""A quality rule under the name and version that its findings carry."""


ALL = "built_in"
"""Stands for every built-in rule."""


def rules_of_run(specs: Iterable[str], setting: str) -> tuple[Rule, ...]:
    """The rules of a run, in the order of the settings. Raises SettingsError that begins with the setting's name."""
    named: list[Rule] = []
    for spec in specs:
        found = [Named(name, "1", rule) for name, rule in BUILT_IN.items()] if spec == ALL else [rule_of(spec, setting)]
        for rule in found:
            if any(rule.name == other.name for other in named):
                raise SettingsError(f"setting {setting}: {rule.name} is named twice")
        named += found
    if sum(rule.revision for rule in named) > REVISION_MAX:
        raise SettingsError(f"setting {setting}: the sum of the versions is above {REVISION_MAX}")
    return tuple(named)


def rule_of(spec: str, setting: str) -> Rule:
    """`name@version` or `package.module:function@version`. Raises SettingsError that begins with the setting's name."""
    return function_of(spec, setting, BUILT_IN, "quality rule")
