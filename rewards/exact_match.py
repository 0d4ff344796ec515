"""1.0 if the last answer is, up to white space and case, the `gold` of the metadata."""

from __future__ import annotations

from rewards.answer import gold, last_answer
from schemas.records import Trajectory


def exact_match(trajectory: Trajectory) -> float:
    """Raises ValueError without a `gold` or an answer."""
    return float(_folded(last_answer(trajectory)) == _folded(gold(trajectory)))


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()
