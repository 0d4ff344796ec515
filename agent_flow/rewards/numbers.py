"""Compare the number that a reply ends with."""

from __future__ import annotations

from clawstream.schemas.numbers.text import last_number_in, number_in


def last_number(text: str, answer: object) -> float:
    """Return 1.0 if the last number in a text is the answer, else 0.0.

    Both are read as `clawstream.schemas.numbers.text` describes, as by the built-in reward function
    `last_number`.

    Args:
        text: For example `reply.text`.
        answer: A number, or text that is one.

    Raises:
        ValueError: The answer is no number.
    """
    expected, given = number_in(answer), last_number_in(text)
    return float(given is not None and given.equals(expected))
