"""A reward function with the name and version that its rewards carry, as the settings name it."""

from __future__ import annotations

from rewards.built_in import BUILT_IN, RewardFunction
from schemas.named_function import Named, function_of

Rule = Named[RewardFunction]
"""A reward function under the name and version that its rewards carry."""


def rule_of(spec: str, setting: str) -> Rule:
    """`name@version` or `package.module:function@version`. Raises SettingsError that begins with the setting's name."""
    return function_of(spec, setting, BUILT_IN, "reward")
