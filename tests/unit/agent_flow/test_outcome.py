"""What a flow may return as its reward."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from clawstream.agent_flow.errors import RolloutFailed
from clawstream.agent_flow.outcome import checked_reward, total


@pytest.mark.parametrize(
    ("returned", "reward", "value"),
    [
        (None, None, None),
        (True, 1.0, 1.0),
        (0, 0.0, 0.0),
        (np.float32(0.5), 0.5, 0.5),
        (np.bool_(True), 1.0, 1.0),
        (np.array([0.5]), 0.5, 0.5),
        (Fraction(1, 2), 0.5, 0.5),
        ({"exact": 1, "style": 0.5}, {"exact": 1.0, "style": 0.5}, 1.5),
    ],
)
def test_numbers_and_named_numbers_are_rewards(returned: Any, reward: Any, value: Any) -> None:
    assert checked_reward(returned) == reward
    assert total(checked_reward(returned)) == value


@pytest.mark.parametrize(
    "returned",
    [
        *("1.0", b"1", float("nan"), float("inf"), 10**400, 1j, [1.0]),
        *({}, {"a": None}, {"a": float("nan")}, np.array([1.0, 2.0])),
    ],
)
def test_all_else_fails_the_rollout(returned: Any) -> None:
    with pytest.raises(RolloutFailed):
        checked_reward(returned)
