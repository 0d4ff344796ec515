"""A reward function with the name and version that its rewards carry, as the settings name it. Pure but for the import of a user's."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from rewards.built_in import BUILT_IN, RewardFunction
from schemas.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Rule:
    """A reward function under the name and version that its rewards carry."""

    name: str
    version: str
    function: RewardFunction

    @property
    def revision(self) -> int:
        return int(self.version) if self.version.isdecimal() else 0


def rule_of(spec: str, setting: str) -> Rule:
    """`name@version` or `package.module:function@version`. Raises SettingsError that begins with the setting's name."""
    where = f"setting {setting}: {spec!r}"
    target, sep, version = spec.rpartition("@")
    if not sep or not target or not version:
        raise SettingsError(f"{where}: write name@version or package.module:function@version")
    module, colon, name = target.rpartition(":")
    if not colon:
        if name not in BUILT_IN:
            raise SettingsError(f"{where}: no built-in reward {name!r}; there are {', '.join(sorted(BUILT_IN))}")
        return Rule(name, version, BUILT_IN[name])
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise SettingsError(f"{where}: {type(e).__name__}: {e}") from e
    if not callable(function):
        raise SettingsError(f"{where}: {module}.{name} is not callable")
    return Rule(name, version, function)
