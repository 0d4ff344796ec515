"""Reward 1.0 if the last number in the last answer equals the metadata's `gold`."""

from __future__ import annotations

from clawstream.rewards.answer import golds, last_answer
from clawstream.schemas.numbers.text import Number, last_number_in, number_in
from clawstream.schemas.records import Trajectory


def last_number(trajectory: Trajectory) -> float:
    """Return 1.0 or 0.0; an answer without a number is wrong, not missing.

    Both sides are read in the same way (`clawstream.schemas.numbers.text`). Of a list of golds any
    may match.

    Raises:
        ValueError: There is no answer, or no `gold`, or one that is no number.
    """
    given, accepted = last_number_in(last_answer(trajectory)), list[Number]()
    for gold in golds(trajectory):
        try:
            accepted.append(number_in(gold))
        except ValueError as e:
            raise ValueError(f"gold: {e}") from e
    return float(given is not None and any(given.equals(one) for one in accepted))
