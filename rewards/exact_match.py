"""Reward 1.0 if the last answer equals the metadata's `gold`, ignoring white space and case."""

from __future__ import annotations

from rewards.answer import gold, last_answer
from schemas.records import Trajectory


def exact_match(trajectory: Trajectory) -> float:
    """Return 1.0 or 0.0.

    Raises:
        ValueError: There is no `gold` or no answer.
    """
    return float(_folded(last_answer(trajectory)) == _folded(gold(trajectory)))


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
