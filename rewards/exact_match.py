"""Reward 1.0 if the last answer equals the metadata's `gold`, ignoring white space and case.

Of a list of golds any may match. A gold that JSON has as a number also equals an answer that is
the same number, written in another way.
"""

from __future__ import annotations

import unicodedata

from clawstream.rewards.answer import Gold, golds, last_answer
from clawstream.schemas.numbers.text import number_in
from clawstream.schemas.records import Trajectory


def exact_match(trajectory: Trajectory) -> float:
    """Return 1.0 or 0.0.

    Raises:
        ValueError: There is no `gold` or no answer.
    """
    answer = last_answer(trajectory)
    return float(any(_equal(answer, gold) for gold in golds(trajectory)))


def _equal(answer: str, gold: Gold) -> bool:
    if _folded(answer) == _folded(str(gold)):
        return True
    if isinstance(gold, str | bool):
        return False
    try:
        return number_in(answer).equals(number_in(gold))
    except ValueError:
        return False


def _folded(text: str) -> str:
    """Return the text for a comparison without regard to case: Unicode, section 3.13, D145."""
    decomposed = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", " ".join(decomposed.split()).casefold())
