"""Reading values of an engine's reply that must have a type. Pure; all raise TypeError when they have another one.

What a reply says goes into records and sums, so a fold checks it where it is read: what was read can always be added.
"""

from __future__ import annotations

from typing import Any


def text(value: object) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"a string was expected, not {type(value).__name__}")
    return value


def text_or_none(value: object) -> str | None:
    """A string or null."""
    return None if value is None else text(value)


def number(value: object) -> int:
    """A whole number as indexes are: not negative, 31 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise TypeError(f"an index was expected, not {value!r:.40}")
    return value


def mapping(value: object) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise TypeError(f"an object was expected, not {type(value).__name__}")
    return value


def array(value: object) -> list[Any]:
    """A JSON array; null is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"an array was expected, not {type(value).__name__}")
    return value


def array_or_none(value: object) -> list[Any] | None:
    """A JSON array or null."""
    return None if value is None else array(value)
