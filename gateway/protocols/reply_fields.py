"""Type checks of values in an engine's reply. Pure; every check raises TypeError.

Accumulators check values when they parse an event, so `add` never fails on a parsed event.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

MOST = 2**31
"""Exclusive upper bound of an index."""


def loads(data: bytes) -> Any:
    """Parse JSON. Accepts lone surrogates and NaN, as the official clients do.

    Raises:
        ValueError: The data is not JSON.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as first:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise first from None


def dumps(value: Any) -> bytes:
    """Serialize a value from `loads` as JSON that orjson can parse.

    Joins surrogate halves from different pieces; a lone surrogate becomes U+FFFD.

    Raises:
        ValueError: The value is NaN or nested too deeply.
    """
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise ValueError("nested too deeply") from error
        made = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        orjson.loads(made)
        return made


def text(value: object) -> str:
    """Check a string.

    Raises:
        TypeError: The value is no string.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {type(value).__name__}")
    return value


def text_or_none(value: object) -> str | None:
    """Check a string or null."""
    return None if value is None else text(value)


def number(value: object) -> int:
    """Check an index: a non-negative integer of at most 31 bits.

    Raises:
        TypeError: The value is no such integer.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise TypeError(f"expected an index, not {value!r:.40}")
    return value


def choice_index(choice: dict[str, Any], choices: list[Any]) -> int:
    """Return the index of a choice; its position in the list when it has none.

    Raises:
        TypeError: Its index is no such integer.
    """
    index = choice.get("index")
    if index is None:
        return next(at for at, other in enumerate(choices) if other is choice)
    if type(index) is int and 0 <= index < MOST:
        return index
    raise TypeError(f"expected an index, not {index!r:.40}")


def mapping(value: object) -> dict[str, Any]:
    """Check a JSON object.

    Raises:
        TypeError: The value is no object.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, not {type(value).__name__}")
    return value


def array(value: object) -> list[Any]:
    """Check a JSON array; null becomes an empty list.

    Raises:
        TypeError: The value is neither an array nor null.
    """
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"expected an array, not {type(value).__name__}")
    return value


def array_or_none(value: object) -> list[Any] | None:
    """Check a JSON array or null."""
    return None if value is None else array(value)
