"""Convert records to JSON that a person can read. Pure.

Bytes fields named `*_json` become the JSON they hold; packed token ids and log-probabilities become
lists of numbers; other bytes, and invalid content, become `{"base64": "..."}`. Numbers that JSON
lacks are the strings NaN, Infinity and -Infinity. Times stay integers in the unit of the field's
doc.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from clawstream.schemas.codec.single_object import (
    Event,
    as_dict,
    shipped,
)

_WIDTH = 4
_PACKED = {"i32le": "i", "f32le": "f"}
_ABSENT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(event: Event) -> dict[str, Any]:
    """The record's fields, in order, as JSON values."""
    schema = _Schema.of(type(event).__name__)
    return {f["name"]: schema.shown(f, v) for f, v in schema.fields(schema.root, as_dict(event))}


class _Schema(NamedTuple):
    """A record's schema, and the named types in it by name."""

    root: Mapping[str, Any]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, name: str) -> _Schema:
        found: dict[str, Any] = {}

        def collect(node: Any) -> None:
            for child in (
                node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
            ):
                collect(child)
            if isinstance(node, dict) and node.get("type") in ("record", "enum"):
                found[node["name"]] = node

        root = shipped(name)
        collect(root)
        return cls(root, found)

    @staticmethod
    def fields(
        record: Mapping[str, Any], plain: Mapping[str, Any]
    ) -> list[tuple[Mapping[str, Any], Any]]:
        return [(f, plain[f["name"]]) for f in record["fields"]]

    def kind(self, node: Any) -> Any:
        """A type without its null, names followed."""
        if isinstance(node, list):
            return self.kind(next(k for k in node if k != "null"))
        if isinstance(node, str):
            return (
                self.kind(self.named[node.rpartition(".")[2]])
                if node.rpartition(".")[2] in self.named
                else node
            )
        return (
            self.kind(node["type"])
            if isinstance(node["type"], dict | list) or "logicalType" in node
            else node
        )

    def shown(self, field: Mapping[str, Any], value: Any) -> Any:
        return self._shown(self.kind(field["type"]), value, field)

    def _shown(self, kind: Any, value: Any, field: Mapping[str, Any]) -> Any:
        if value is None:
            return None
        if kind == "bytes":
            return _bytes_shown(value, field)
        if kind in ("float", "double"):
            return (
                value
                if math.isfinite(value)
                else next(n for n, v in _ABSENT_NUMBERS.items() if str(v) == str(value))
            )
        match kind:
            case {"type": "array", "items": items}:
                return [self._shown(self.kind(items), v, {}) for v in value]
            case {"type": "map", "values": values}:
                return {n: self._shown(self.kind(values), v, {}) for n, v in value.items()}
            case {"type": "record"}:
                return {f["name"]: self.shown(f, v) for f, v in self.fields(kind, value)}
        return value


def _bytes_shown(value: bytes, field: Mapping[str, Any]) -> Any:
    packing = _PACKED.get(field.get("packing", ""))
    if packing is not None and len(value) % _WIDTH == 0:
        numbers = struct.unpack(f"<{len(value) // _WIDTH}{packing}", value)
        if all(map(math.isfinite, numbers)):
            return list(numbers)
    if field.get("name", "").endswith("_json"):
        try:
            given = orjson.loads(value)
        except ValueError:
            pass
        else:
            if not (isinstance(given, dict) and given.keys() == {"base64"}):
                return given
    return {"base64": base64.b64encode(value).decode()}
