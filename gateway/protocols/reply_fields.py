"""Reading values of an engine's reply that must have a type. Pure; all raise TypeError when they have another one.

What a reply says goes into records and sums, so an accumulator checks it where it is read: what was read can always be added.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

MOST = 2**31
"""What an index is below."""


def loads(data: bytes) -> Any:
    """The JSON value. Raises ValueError.

    Half a surrogate pair and NaN, which orjson refuses, are read as the official clients read them.
    """
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as first:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise first from None


def dumps(value: Any) -> bytes:
    """A value that `loads` gave, as JSON that orjson can read. Raises ValueError.

    Two halves of a surrogate pair that came in different pieces become their character; half a pair alone becomes U+FFFD.
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
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"a string was expected, not {type(value).__name__}")
    return value


def text_or_none(value: object) -> str | None:
    """A string or null."""
    return None if value is None else text(value)


def number(value: object) -> int:
    """A whole number as indexes are: not negative, 31 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise TypeError(f"an index was expected, not {value!r:.40}")
    return value


def choice_index(choice: dict[str, Any], choices: list[Any]) -> int:
    """The index of a choice; without one, its place in the list."""
    index = choice.get("index")
    if index is None:
        return next(at for at, other in enumerate(choices) if other is choice)
    if type(index) is int and 0 <= index < MOST:
        return index
    raise TypeError(f"an index was expected, not {index!r:.40}")


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


def error_of(payload: dict[str, Any]) -> Any:
    """The error that an engine tells with a status of 200, and nothing else of a reply; None when there is none."""
    error = payload.get("error")
    return None if not error or payload.get("choices") or payload.get("output") else error
