"""Reads values and errors in an engine's reply. Pure.

Every check of a type raises TypeError. Accumulators check values when they parse an event, so
`add` never fails on a parsed event.

An error is known by its key `error`, by `"object": "error"` or `"type": "error"`, by the name of
its event (`event: error`), and by its shape: a message or code without any output or usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

MOST = 2**31
"""Exclusive upper bound of an index."""
OUTPUT = ("choices", "usage", "output", "content")
"""Fields of replies and chunks that are no error."""
_NAMED = re.compile(rb"(?:\A|[\r\n])event: ?error[ \t]*(?=[\r\n])")
_MAX_TEXT = 8000
"""Characters kept of an error without a message."""


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


class EngineError(NamedTuple):
    """An error that an engine reported instead of a reply, or within it.

    status: HTTP status that the error names; None: it names none.
    """

    message: str
    type: str | None = None
    status: int | None = None


def engine_error(payload: Mapping[str, Any]) -> EngineError | None:
    """Return the error in a reply, chunk or event; None: it is none."""
    if error := payload.get("error"):
        return described(error)
    if payload.get("object") == "error" or payload.get("type") == "error":
        return described(payload.get("detail") or payload)
    if any(payload.get(name) for name in OUTPUT):
        return None
    if isinstance(payload.get("message"), str) or _is_code(payload.get("code")):
        return described(payload)
    detail = payload.get("detail")
    return described(detail) if detail else None


def _is_code(value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool) and bool(value)


def named_error(event: bytes, data: bytes) -> EngineError | None:
    """Return the error of an event that is named `error`; None: it has another name, or none."""
    if b"error" not in event or _NAMED.search(event) is None:
        return None
    try:
        payload = loads(data)
    except ValueError:
        return EngineError(data.decode(errors="replace")[:_MAX_TEXT])
    return (engine_error(payload) if isinstance(payload, dict) else None) or described(payload)


def described(error: object) -> EngineError:
    """Describe an error: an object with a message, or any other value."""
    if not isinstance(error, dict):
        return EngineError(str(error)[:_MAX_TEXT])
    message, kind = error.get("message"), error.get("type")
    text = message if isinstance(message, str) else str(error)
    statuses = (_status(error.get(name)) for name in ("code", "status", "status_code"))
    return EngineError(
        text[:_MAX_TEXT],
        kind if isinstance(kind, str) and kind != "error" else None,
        next((status for status in statuses if status is not None), None),
    )


def _status(code: object) -> int | None:
    """Return a code that is the status of an HTTP error."""
    if isinstance(code, str) and code.isascii() and code.isdigit() and len(code) == 3:
        code = int(code)
    return code if type(code) is int and 400 <= code < 600 else None
