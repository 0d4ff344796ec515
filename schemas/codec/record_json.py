"""Convert records to JSON that a person can read. Pure.

Bytes fields named `*_json` become the JSON they hold; packed token ids and log-probabilities become
lists of numbers; other bytes, and invalid content, become `{"base64": "..."}`. Numbers that JSON
lacks are the strings NaN, Infinity and -Infinity. Times stay integers in the unit of the field's
doc.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

import orjson

from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.records.parts import PackedFloats, PackedInts
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

_ABSENT_NUMBERS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def to_json(event: Event) -> dict[str, Any]:
    """The record's fields, in order, as JSON values."""
    types = typing.get_type_hints(type(event), include_extras=True)
    return {
        field.name: _shown(getattr(event, field.name), field.name, types[field.name])
        for field in dataclasses.fields(event)
    }


def _shown(value: Any, name: str = "", kind: Any = None) -> Any:
    """name, kind: Of the field; items of lists and maps have none."""
    match value:
        case bytes():
            return _bytes_shown(value, name, kind)
        case float() if not math.isfinite(value):
            return _ABSENT_NUMBERS[str(value)]
        case tuple():
            return [_shown(item) for item in value]
        case Mapping():
            return {key: _shown(item) for key, item in value.items()}
    return to_json(value) if dataclasses.is_dataclass(value) else value


def _bytes_shown(value: bytes, name: str, kind: Any) -> Any:
    try:
        if kind in (PackedInts, PackedInts | None):
            return unpack_ids(value)
        if kind in (PackedFloats, PackedFloats | None):
            numbers = unpack_logprobs(value)
            if all(map(math.isfinite, numbers)):
                return numbers
        elif name.endswith("_json"):
            return orjson.loads(value)
    except ValueError:
        pass  # shown as it is
    return {"base64": base64.b64encode(value).decode()}
