"""A reward function with the name and version that its rewards carry, as the settings name it."""

from __future__ import annotations

from rewards.built_in import BUILT_IN, RewardFunction
from schemas.rule_spec import NamedFunction, function_of
from schemas.user_function import Find

Rule = NamedFunction[RewardFunction]
"""A reward function under the name and version that its rewards carry."""


def rule_of(spec: str, setting: str, find: Find) -> Rule:
    """Resolve a reward function by its name in a setting; `find` gives a user's own. Raises SettingsError."""
    return function_of(spec, setting, BUILT_IN, "reward", find)
