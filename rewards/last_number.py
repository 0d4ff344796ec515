"""1.0 if the last number in the last answer equals the `gold` of the metadata."""

from __future__ import annotations

import re

from rewards.answer import gold, last_answer
from schemas.records import Trajectory

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_number(trajectory: Trajectory) -> float:
    """Raises ValueError without a numeric `gold` or an answer; an answer without a number is wrong,
    not missing.
    """
    numbers = _NUMBER.findall(last_answer(trajectory))
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(gold(trajectory)))
