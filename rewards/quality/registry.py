"""Built-in quality rules by name, and how names in the settings become the rules of a run.

A new quality rule is one small pure file and one line in `BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from clawstream.rewards.quality.drift import drift
from clawstream.rewards.quality.length import length
from clawstream.rewards.quality.repetition import repetition
from clawstream.rewards.quality.retried import retried
from clawstream.rewards.quality.score import QualityRule
from clawstream.rewards.quality.token_capture import tokens
from clawstream.rewards.quality.truncation import truncation
from clawstream.rewards.quality.well_formed import format
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.rule_spec import REVISION_MAX, NamedFunction, function_of
from clawstream.schemas.user_function import Find

Rule = NamedFunction[QualityRule]
"""A quality rule with the name and version that its findings carry."""

BUILT_IN: Mapping[str, QualityRule] = {
    "length": length,
    "repetition": repetition,
    "truncation": truncation,
    "format": format,
    "tokens": tokens,
    "drift": drift,
    "retried": retried,
}

ALL = "built_in"
"""In settings: stands for every built-in rule."""


def rules_of_run(specs: Iterable[str], setting: str, find: Find) -> tuple[Rule, ...]:
    """Resolve the quality rules of a run, in the order of the settings.

    Args:
        specs: Rule names as in the settings; `built_in` stands for all built-in rules.
        setting: Name of the setting, for errors.
        find: Loads a user's rule.

    Raises:
        SettingsError: A rule does not exist, is named twice, or the sum of versions is too large.
            The message begins with the setting's name.
    """
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
    """Resolve a quality rule by its name in a setting.

    Raises:
        SettingsError: There is no such rule, or the spec has another form.
    """
    return function_of(spec, setting, BUILT_IN, "quality rule", find)
