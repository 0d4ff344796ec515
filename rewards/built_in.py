"""Built-in rule rewards: one small pure file each, one line here. A name in the settings is a key of this table, with a version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rewards.exact_match import exact_match
from rewards.last_number import last_number
from schemas.records import Trajectory

RewardFunction = Callable[[Trajectory], float | Mapping[str, float] | None]
"""A trajectory to its reward, to the rewards of some of its steps by step id, or to None. Raising means no reward, with the reason."""

BUILT_IN: Mapping[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
}
