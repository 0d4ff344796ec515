"""The reward that a flow returns, and how a rollout ended. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from clawstream.agent_flow.errors import RolloutFailed
from clawstream.schemas.numbers.values import number_of

Reward = float | Mapping[str, float] | None
"""A number, several named numbers, or None: the reward comes later, from somebody else."""

Outcome = Literal["completed", "failed", "abandoned", "replaced"]
"""As the gateway records it. replaced: failed, and another rollout takes its place."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rollout ended. reward: their sum, if there are several; None: without reward."""

    outcome: Outcome
    reward: float | None = None
    reason: str | None = None


def checked_reward(value: Any) -> Reward:
    """Return what a flow returned as a reward.

    Raises:
        RolloutFailed: It is neither a finite number, a mapping of names to such, nor None.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not value:
            raise RolloutFailed("the flow returned an empty mapping; return None for no reward")
        return {
            str(name): checked_number(number, f"reward {name!r}") for name, number in value.items()
        }
    return checked_number(value, "the reward")


def total(reward: Reward) -> float | None:
    """Return the sum of the rewards; None without any."""
    if reward is None:
        return None
    return sum(reward.values()) if isinstance(reward, Mapping) else reward


def checked_number(value: Any, what: str) -> float:
    """Return a finite number. what: the value's name, for errors. Raises RolloutFailed."""
    try:
        number = float(number_of(value))
    except TypeError as error:
        raise RolloutFailed(f"{what} is {value!r:.80}, not a number") from error
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RolloutFailed(f"{what} is {value!r:.80}, not a finite number")
    return number
