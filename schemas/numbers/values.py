"""Read the number that a function returned. Pure."""

from __future__ import annotations


def number_of(value: object) -> int | float:
    """Return a number as Python's own, for reward functions, quality rules and flows alike.

    Accepts truth values, the numbers of Python, and those of other libraries (numpy, torch): a
    scalar, or an array of one element.

    Raises:
        TypeError: It is something else; the message is its type. Text is no number.
    """
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    element = getattr(value, "item", None)
    if callable(element):
        try:
            value = element()
        except (TypeError, ValueError, RuntimeError) as e:
            raise TypeError(f"{type(value).__name__} of several elements") from e
        if isinstance(value, int | float):
            return value
    if hasattr(type(value), "__float__"):
        return float(value)  # type: ignore[arg-type]
    raise TypeError(type(value).__name__)
