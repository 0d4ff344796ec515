"""Columns of the lake's tables: Arrow types from Avro schemas, and how many values become one Arrow array. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import pyarrow as pa

from schemas.codec import shipped

TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True, slots=True)
class Column:
    """A column and how its values become an Arrow array."""

    field: pa.Field
    convert: Callable[[Sequence[Any]], pa.Array]


def unpacked(item: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Packed little-endian values as lists: the joined bytes are the items' buffer, no value is touched by Python."""
    data = b"".join(v for v in values if v)
    items = pa.Array.from_buffers(item, len(data) // 4, [None, pa.py_buffer(data)])
    offsets = pa.array([0, *accumulate(len(v) // 4 if v else 0 for v in values)], pa.int32())
    return pa.ListArray.from_arrays(offsets, items, mask=pa.array([v is None for v in values], pa.bool_()))


def text(values: Sequence[bytes | None]) -> pa.Array:
    """JSON bytes as text; what is no UTF-8 becomes U+FFFD rather than an error, the bytes stay on Kafka."""
    return pa.array([None if v is None else v.decode("utf-8", "replace") for v in values], pa.string())


def time(unit: str, values: Sequence[int | None]) -> pa.Array:
    """Integers since the epoch in `unit` as UTC times in microseconds, the only unit that Delta has."""
    return pa.array(values, pa.timestamp(unit, "UTC")).cast(TIME)


def number_map(values: Sequence[Mapping[str, float] | None]) -> pa.Array:
    """Names with numbers."""
    return pa.array([None if v is None else list(v.items()) for v in values], pa.map_(pa.string(), pa.float64()))


_UNITS = {"timestamp-millis": "ms", "timestamp-micros": "us"}
_PACKED = {"i32le": pa.int32(), "f32le": pa.float32()}
_PRIMITIVE = {
    "string": pa.string(),
    "bytes": pa.binary(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
}


def column(
    name: str, kind: pa.DataType, doc: str, convert: Callable[[Sequence[Any]], pa.Array] | None = None
) -> Column:
    """A nullable column; its doc becomes Delta's comment."""
    return Column(pa.field(name, kind, metadata={"comment": doc}), convert or partial(pa.array, type=kind))


def avro_columns(record: type, omit: Iterable[str] = ()) -> tuple[Column, ...]:
    """The columns of a record, one a field, in order. omit: paths of fields that the table leaves out, e.g. `steps.marks`.

    Packed bytes become typed lists, bytes whose name ends in `_json` text, times microseconds, nested records structs.
    """
    schema = shipped(record.__name__)
    types = _ArrowTypes(schema, frozenset(omit))
    return tuple(_of_field(f, types) for f in schema["fields"] if f["name"] not in types.omit)


def _of_field(field: Mapping[str, Any], types: _ArrowTypes) -> Column:
    name, doc, kind = field["name"], field["doc"], _not_null(field["type"])
    if "packing" in field:
        item = _PACKED[field["packing"]]
        return column(name, pa.list_(item), doc, partial(unpacked, item))
    if kind == "bytes" and name.endswith("_json"):
        return column(name, pa.string(), doc, text)
    if isinstance(kind, dict) and "logicalType" in kind:
        return column(name, TIME, doc, partial(time, _UNITS[kind["logicalType"]]))
    if isinstance(kind, dict) and kind["type"] == "map":
        return column(name, pa.map_(pa.string(), pa.float64()), doc, number_map)
    return column(name, types.of(kind, name), doc)


class _ArrowTypes:
    """Arrow types of one schema's fields. Avro defines a named type once and then refers to it."""

    def __init__(self, schema: Any, omit: frozenset[str]) -> None:
        self.omit = omit
        self._named: dict[str, Any] = {}
        self._collect(schema)

    def _collect(self, node: Any) -> None:
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            self._collect(child)
        if isinstance(node, dict) and node.get("type") in ("record", "enum"):
            self._named[node["name"]] = node

    def of(self, kind: Any, path: str) -> pa.DataType:
        kind = _not_null(kind)
        if isinstance(kind, str):
            return _PRIMITIVE[kind] if kind in _PRIMITIVE else self.of(self._named[kind.rpartition(".")[2]], path)
        match kind["type"]:
            case "array":
                return pa.list_(self.of(kind["items"], path))
            case "enum":
                return pa.string()
            case "record":
                inner = [(f, f"{path}.{f['name']}") for f in kind["fields"]]
                return pa.struct([(f["name"], self.of(f["type"], p)) for f, p in inner if p not in self.omit])
            case other:
                return self.of(other, path)


def _not_null(kind: Any) -> Any:
    return next(k for k in kind if k != "null") if isinstance(kind, list) else kind
