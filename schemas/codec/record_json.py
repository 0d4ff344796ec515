"""Convert records to JSON that a person can read and edit, and back. Pure.

Bytes fields named `*_json` become the JSON they hold; packed token ids and log-probabilities become
lists of numbers; other bytes, and invalid content, become `{"base64": "..."}`. Numbers that JSON
lacks are the strings NaN, Infinity and -Infinity. Times stay integers in the unit of the field's
doc.
"""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from clawstream.schemas.codec.single_object import (
    TOP_LEVEL,
    Codec,
    Event,
    as_dict,
    record_from,
    shipped,
)
from clawstream.schemas.errors import NotARecord

_WIDTH = 4
_PACKED = {"i32le": "i", "f32le": "f"}
_ABSENT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_CODEC_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
}


def to_json(event: Event) -> dict[str, Any]:
    """The record's fields, in order, as JSON values."""
    schema = _Schema.of(type(event).__name__)
    return {f["name"]: schema.shown(f, v) for f, v in schema.fields(schema.root, as_dict(event))}


def from_json(codec: Codec, name: str, given: Mapping[str, Any], was: Event | None = None) -> Event:
    """Build the record `name` from JSON fields; fields that equal those of `was` keep its bytes.

    Raises:
        NotARecord: Names the field.
    """
    if name not in (cls.__name__ for cls in TOP_LEVEL):
        raise NotARecord(f"there is no record {name!r}")
    schema = _Schema.of(name)
    if was is not None and type(was).__name__ == name:
        before, plain = to_json(was), as_dict(was)
        kept = {n: plain[n] for n in plain if n in given and _same(given[n], before[n])}
    else:
        kept = {}
    made = schema.read_record(schema.root, given, "", kept)
    try:
        record = record_from(name, made)
        codec.encode(record)
    except (TypeError, ValueError) as e:
        raise NotARecord(f"no {name}: {e}") from e
    return record


def changed(given: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply changes `path=value` to the fields.

    path: Names and list indexes, separated by dots. value: JSON, or else text.

    Raises:
        NotARecord: A path does not exist.
    """
    out: dict[str, Any] = copy.deepcopy(dict(given))
    for change in changes:
        path, sep, text = change.partition("=")
        if not sep or not path:
            raise NotARecord(f"{change!r}: must be field=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        except RecursionError as e:
            raise NotARecord(f"{path}: the value is nested too deeply") from e
        *outer, last = path.split(".")
        node: Any = out
        try:
            for name in outer:
                node = node[int(name) if isinstance(node, list) else name]
            if isinstance(node, list):
                node[int(last)] = value
            else:
                node[last] = value
        except (KeyError, IndexError, ValueError, TypeError) as e:
            raise NotARecord(f"{path}: there is no such field or index") from e
    return out


def _same(a: Any, b: Any) -> bool:
    """As JSON: 1 is not true, and 1.0 is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


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

    # -- showing

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

    # -- reading

    def read_record(
        self, record: Mapping[str, Any], given: Any, path: str, kept: Mapping[str, Any]
    ) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise NotARecord(
                f"{path.rstrip('.') or record['name']}: an object was expected, not {given!r:.60}"
            )
        fields = {f["name"]: f for f in record["fields"]}
        if unknown := sorted(given.keys() - fields.keys()):
            raise NotARecord(
                f"{path}{unknown[0]}: no field of {record['name']}; there are {', '.join(fields)}"
            )
        out = {}
        for name, field in fields.items():
            if name in kept:
                out[name] = kept[name]
            elif name in given:
                out[name] = self._read(field["type"], given[name], path + name, field)
            elif "default" not in field:
                raise NotARecord(f"{path}{name}: is missing, and has no default")
        return out

    def _read(self, node: Any, given: Any, path: str, field: Mapping[str, Any]) -> Any:
        if given is None:
            if isinstance(node, list) and "null" in node:
                return None
            raise NotARecord(f"{path}: must not be null")
        kind = self.kind(node)
        if kind == "bytes":
            return _bytes_read(given, path, field)
        if kind in ("float", "double"):
            number = _ABSENT_NUMBERS.get(given, given) if isinstance(given, str) else given
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise NotARecord(f"{path}: a number was expected, not {given!r:.60}")
            try:
                return float(number)
            except OverflowError as e:
                raise NotARecord(f"{path}: {e}") from e
        match kind:
            case {"type": "array", "items": items}:
                return [
                    self._read(items, v, f"{path}.{i}", {})
                    for i, v in enumerate(_a(list, given, path))
                ]
            case {"type": "map", "values": values}:
                return {
                    n: self._read(values, v, f"{path}.{n}", {})
                    for n, v in _a(dict, given, path).items()
                }
            case {"type": "record"}:
                return self.read_record(kind, given, f"{path}.", {})
            case {"type": "enum", "symbols": symbols}:
                if given not in symbols:
                    raise NotARecord(
                        f"{path}: must be one of {', '.join(symbols)}, not {given!r:.60}"
                    )
                return given
        name = kind["type"] if isinstance(kind, dict) else kind
        if isinstance(given, bool) != (name == "boolean") or not isinstance(
            given, _CODEC_TYPES[name]
        ):
            raise NotARecord(f"{path}: {name} was expected, not {given!r:.60}")
        return given


def _a(kind: type, given: Any, path: str) -> Any:
    if not isinstance(given, kind):
        raise NotARecord(
            f"{path}: a {'list' if kind is list else 'object'} was expected, not {given!r:.60}"
        )
    return given


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


def _bytes_read(given: Any, path: str, field: Mapping[str, Any]) -> bytes:
    if isinstance(given, dict) and given.keys() == {"base64"}:
        try:
            return base64.b64decode(given["base64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as e:
            raise NotARecord(f"{path}: no base64: {e}") from e
    packing = _PACKED.get(field.get("packing", ""))
    if packing is not None:
        try:
            return struct.pack(f"<{len(given)}{packing}", *given)
        except (struct.error, TypeError, OverflowError) as e:
            raise NotARecord(
                f"{path}: no list of {'whole ' if packing == 'i' else ''}numbers: {e}"
            ) from e
    if field.get("name", "").endswith("_json"):
        return _json_read(given, path)
    raise NotARecord(f'{path}: bytes are {{"base64": "..."}}, not {given!r:.60}')


def _json_read(given: Any, path: str) -> bytes:
    """Parse JSON with numbers of any size; reject constants outside JSON and invalid UTF-8."""
    try:
        return json.dumps(
            given, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except (ValueError, RecursionError) as e:
        raise NotARecord(f"{path}: no JSON: {e}"[:300]) from e
