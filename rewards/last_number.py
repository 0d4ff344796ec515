"""Reward 1.0 if the last number in the last answer equals the metadata's `gold`."""

from __future__ import annotations

import re

from rewards.answer import gold, last_answer
from schemas.records import Trajectory

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(trajectory: Trajectory) -> float:
    """Return 1.0 or 0.0; an answer without a number is wrong, not missing.

    Raises:
        ValueError: There is no numeric `gold` or no answer.
    """
    numbers = _NUMBER.findall(last_answer(trajectory))
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(gold(trajectory)))
