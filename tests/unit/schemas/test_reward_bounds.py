"""Bounds of rewards: one rule for every way in."""

from __future__ import annotations

import math
import sys

import pytest

from clawstream.schemas.records import RewardValue
from clawstream.schemas.records.rewards import out_of_bounds
from clawstream.schemas.reward_matching import training_reward, weighted_sum

WORST = -sys.float_info.max
WITHIN = "is not in [-1e+06, 1e+06]"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1_000_001.0, "1e+06"), (-2e6, "-2e+06"), (WORST, "-1.79769e+308"), (math.nan, "nan"),
        (-math.inf, "-inf"), (3_000_000, "3e+06"), (10**400, "the number"),
    ],
)  # fmt: skip
def test_what_is_no_reward(value: float, shown: str) -> None:
    assert out_of_bounds(value) == f"{shown} {WITHIN}"


@pytest.mark.parametrize("value", [0.0, -0.0, 1e6, -1e6, 5e-324, 1_000_000, True])
def test_what_is_a_reward(value: float) -> None:
    assert out_of_bounds(value) is None


def test_a_sum_out_of_bounds_is_no_training_reward() -> None:
    def value(number: float) -> RewardValue:
        return RewardValue(
            source="rule", name="f", function_version="1", value=number, reward_revision=0
        )

    assert training_reward({}, [value(WORST), value(WORST)]) is None
    assert training_reward({}, [value(1e6), value(1e6)]) is None
    assert weighted_sum({}, [value(1e6), value(1e6)]) == 2e6
    assert training_reward({"rule/f": 0.5}, [value(1e6), value(1e6)]) == 1e6
