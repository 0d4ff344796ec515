"""Parse JSON that clients and engines wrote."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import orjson


def loaded(packed: bytes | str) -> Any:
    """Parse JSON.

    orjson rejects escaped lone surrogates, which are valid JSON; the standard library accepts them.

    Raises:
        ValueError: The text is no JSON.
    """
    try:
        return orjson.loads(packed)
    except orjson.JSONDecodeError as first:
        try:
            return json.loads(packed, parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise first from None


def _refuse(constant: str) -> NoReturn:
    """Refuse NaN and Infinity: they are Python's, not JSON's."""
    raise ValueError(constant)
