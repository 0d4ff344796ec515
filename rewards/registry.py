"""Built-in reward functions by name, and how a name in the settings becomes a function.

A new reward function is one pure file and one line in `BUILT_IN`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rewards.exact_match import exact_match
from rewards.last_number import last_number
from schemas.records import Trajectory
from schemas.rule_spec import NamedFunction, function_of
from schemas.user_function import Find

RewardFunction = Callable[[Trajectory], float | Mapping[str, float] | None]
"""Maps a trajectory to its reward, to rewards of some of its steps by step id, or to None.

A function that raises gives no reward; the error is the recorded reason.
"""

Rule = NamedFunction[RewardFunction]
"""A reward function with the name and version that its rewards carry."""

BUILT_IN: Mapping[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
}


def rule_of(spec: str, setting: str, find: Find) -> Rule:
    """Resolve a reward function by its name in a setting.

    Args:
        spec: `name@version`, `file.py:function@version` or `module:function@version`.
        setting: Name of the setting, for errors.
        find: Loads a user's function.

    Raises:
        SettingsError: There is no such function, or the spec has another form.
    """
    return function_of(spec, setting, BUILT_IN, "reward", find)
