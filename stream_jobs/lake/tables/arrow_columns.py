"""Derive Arrow columns from Avro schemas and convert values to Arrow arrays. Pure.

Values come as `clawstream.stream_jobs.lake.tables.avro_values` reads them: nested records are
tuples in the order of their fields. A column is composed of columns, down to the fields of a record
inside a list, so no row needs a lookup by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa

from clawstream.schemas.codec.avro_schema import Schema, kind_of, not_null

TIME = pa.timestamp("us", "UTC")
Convert = Callable[[Sequence[Any]], pa.Array]
MAX_DEPTH = 16
"""Depth of nested types in a new column; readers of Delta logs and Parquet allow little more."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and the conversion of its values to an Arrow array."""

    field: pa.Field
    convert: Convert


def unpacked(item: pa.DataType, values: Sequence[bytes | None]) -> pa.Array:
    """Convert packed little-endian 4-byte values to lists.

    The joined bytes are the buffer of the items: Python touches no value.
    """
    data = b"".join(v for v in values if v)
    items = pa.Array.from_buffers(item, len(data) // 4, [None, pa.py_buffer(data)])
    return _lists(items, [None if v is None else len(v) // 4 for v in values])


def text(values: Sequence[bytes | None]) -> pa.Array:
    """Convert JSON bytes to text; invalid UTF-8 becomes U+FFFD, the bytes stay on Kafka."""
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [None if v is None else v.decode("utf-8", "replace") for v in values], pa.string()
        )


def time(unit: str, values: Sequence[int | None]) -> pa.Array:
    """Convert integers since the epoch in `unit` to UTC microseconds, Delta's only unit."""
    return pa.array(values, pa.timestamp(unit, "UTC")).cast(TIME)


def column(name: str, kind: pa.DataType, doc: str, convert: Convert | None = None) -> Column:
    """Make a nullable column; its doc becomes Delta's comment."""
    return Column(_field_with_doc(name, kind, doc), convert or partial(pa.array, type=kind))


def avro_columns(schema: Schema) -> tuple[Column, ...]:
    """Return one column per field of an `expanded` record schema, in order.

    Packed bytes become typed lists, bytes whose name ends in `_json` text, times microseconds and
    nested records structs.

    Raises:
        ValueError: no column can hold a type.
    """
    return tuple(
        Column(_field_with_doc(f["name"], kind, f.get("doc", "")), convert)
        for f, kind, convert in _of_fields(schema)
    )


def pruned(schema: Schema, omit: Iterable[str], path: str = "") -> Schema:
    """Remove fields from an `expanded` schema.

    Args:
        omit: paths of fields, e.g. `steps.marks`.
    """
    omit = frozenset(omit)
    if isinstance(schema, list):
        return [pruned(branch, omit, path) for branch in schema]
    match kind_of(schema) if isinstance(schema, dict) else None:
        case "record":
            named = [(f, f"{path}{f['name']}") for f in schema["fields"]]
            return {
                **schema,
                "fields": [
                    {**f, "type": pruned(f["type"], omit, f"{p}.")}
                    for f, p in named
                    if p not in omit
                ],
            }
        case "array":
            return {**schema, "items": pruned(schema["items"], omit, path)}
    return schema


def evolved(ours: Schema, theirs: Schema) -> Schema:
    """Add the fields that another version of a record has, nullable, at the end of each record.

    Fields of both versions stay as they are in ours, except for the fields of nested records.
    Omits fields that no column can hold or that are nested deeper than MAX_DEPTH.
    """
    if isinstance(ours, list):
        return [
            branch if branch == "null" else evolved(branch, not_null(theirs)) for branch in ours
        ]
    theirs = not_null(theirs)
    if kind_of(ours) != kind_of(theirs) or not isinstance(ours, dict):
        return ours
    if kind_of(ours) == "array":
        return {**ours, "items": evolved(ours["items"], theirs["items"])}
    if kind_of(ours) != "record":
        return ours
    other = {f["name"]: f for f in theirs["fields"]}
    fields = [
        {**f, "type": evolved(f["type"], other[f["name"]]["type"])} if f["name"] in other else f
        for f in ours["fields"]
    ]
    names = {f["name"] for f in fields}
    for name in [name for name in other if name not in names]:
        their_type = other[name]["type"]
        new = {**other[name], "type": ["null", not_null(their_type)], "default": None}
        if _has_column(new) and (
            not isinstance(their_type, list) or len(their_type) == 1 + ("null" in their_type)
        ):
            fields.append(new)
    return {**ours, "fields": fields}


def merged(ours: pa.Schema, theirs: pa.Schema) -> pa.Schema:
    """Return our columns and fields of structs, then those that only the others have."""
    return pa.schema(_merged_fields(list(ours), list(theirs)))


def fields_of(kind: pa.Schema | pa.DataType) -> int:
    """Return the number of fields, including those of nested structs."""
    if isinstance(kind, pa.Schema) or pa.types.is_struct(kind):
        return sum(1 + fields_of(f.type) for f in kind)
    if pa.types.is_list(kind):
        return fields_of(kind.value_type)
    return fields_of(kind.item_type) if pa.types.is_map(kind) else 0


def _merged_fields(ours: Sequence[pa.Field], theirs: Sequence[pa.Field]) -> list[pa.Field]:
    other = {f.name: f for f in theirs}
    both = [
        f.with_type(_combined(f.type, other[f.name].type, _merged_fields)) if f.name in other else f
        for f in ours
    ]
    names = {f.name for f in ours}
    return both + [f for f in theirs if f.name not in names]


def commented(ours: pa.Schema, theirs: pa.Schema) -> pa.Schema:
    """Return our schema with the comments of theirs, including fields of structs."""
    return pa.schema(_commented_fields(list(ours), list(theirs)), ours.metadata)


def _commented_fields(ours: Sequence[pa.Field], theirs: Sequence[pa.Field]) -> list[pa.Field]:
    other = {f.name: f for f in theirs}
    return [
        pa.field(f.name, _combined(f.type, t.type, _commented_fields), f.nullable, t.metadata)
        if (t := other.get(f.name))
        else f
        for f in ours
    ]


def _combined(
    ours: pa.DataType,
    theirs: pa.DataType,
    fields: Callable[[Sequence[pa.Field], Sequence[pa.Field]], list[pa.Field]],
) -> pa.DataType:
    """Return our type; `fields` combines the fields of structs, also inside lists."""
    if pa.types.is_struct(ours) and pa.types.is_struct(theirs):
        return pa.struct(fields(list(ours), list(theirs)))
    if pa.types.is_list(ours) and pa.types.is_list(theirs):
        return pa.list_(
            ours.value_field.with_type(_combined(ours.value_type, theirs.value_type, fields))
        )
    return ours


def named(schema: Schema, value: Any) -> Any:
    """Convert tuples to dicts with the names of the `expanded` schema."""
    schema = not_null(schema)
    match kind_of(schema) if value is not None else None:
        case "record":
            return {
                f["name"]: named(f["type"], v) for f, v in zip(schema["fields"], value, strict=True)
            }
        case "array":
            return [named(schema["items"], v) for v in value]
    return value


def tupled(schema: Schema, value: Any) -> Any:
    """Convert dicts to tuples, the inverse of `named`; a missing field is null."""
    schema = not_null(schema)
    match kind_of(schema) if value is not None else None:
        case "record":
            return tuple(tupled(f["type"], value.get(f["name"])) for f in schema["fields"])
        case "array":
            return [tupled(schema["items"], v) for v in value]
        case "map":
            return list(value.items()) if isinstance(value, Mapping) else value
    return value


_UNITS = {"timestamp-millis": "ms", "timestamp-micros": "us"}
_PACKED = {"i32le": pa.int32(), "f32le": pa.float32()}
_PRIMITIVE = {
    "string": pa.string(),
    "enum": pa.string(),
    "bytes": pa.binary(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
}


def _of_fields(schema: Schema) -> list[tuple[Mapping[str, Any], pa.DataType, Convert]]:
    return [(f, *_of_field(f)) for f in schema["fields"]]


def _of_field(field: Mapping[str, Any]) -> tuple[pa.DataType, Convert]:
    kind = not_null(field["type"])
    if field.get("packing") in _PACKED and kind_of(kind) == "bytes":
        item = _PACKED[field["packing"]]
        return pa.list_(item), partial(unpacked, item)
    if kind == "bytes" and field["name"].endswith("_json"):
        return pa.string(), text
    return _of_type(kind)


def _of_type(schema: Schema) -> tuple[pa.DataType, Convert]:
    schema = not_null(schema)
    if (
        isinstance(schema, dict)
        and schema.get("logicalType") in _UNITS
        and kind_of(schema) in ("int", "long")
    ):
        return TIME, partial(time, _UNITS[schema["logicalType"]])
    match kind_of(schema):
        case "array":
            kind, convert = _of_type(schema["items"])
            return pa.list_(kind), partial(_list_array_of, convert)
        case "map":
            kind = pa.map_(pa.string(), _of_type(schema["values"])[0])
            return kind, partial(pa.array, type=kind)
        case "record":
            inner = _of_fields(schema)
            if not inner:
                raise ValueError(f"record {schema['name']} has no fields: no column can hold it")
            fields = [_field_with_doc(f["name"], kind, f.get("doc", "")) for f, kind, _ in inner]
            return pa.struct(fields), partial(
                _struct_array, fields, [convert for _, _, convert in inner]
            )
        case plain if plain in _PRIMITIVE:
            return _PRIMITIVE[plain], partial(pa.array, type=_PRIMITIVE[plain])
        case other:
            raise ValueError(f"no column can hold Avro's {other}")


def _has_column(field: Mapping[str, Any]) -> bool:
    try:
        _of_field(field)
    except (ValueError, KeyError):
        return False
    return _depth(field["type"]) <= MAX_DEPTH


def _depth(schema: Schema) -> int:
    schema = not_null(schema)
    match kind_of(schema):
        case "array":
            return 1 + _depth(schema["items"])
        case "map":
            return 1 + _depth(schema["values"])
        case "record":
            return 1 + max((_depth(f["type"]) for f in schema["fields"]), default=0)
    return 0


def _field_with_doc(name: str, kind: pa.DataType, doc: str) -> pa.Field:
    return pa.field(name, kind, metadata={"comment": doc} if doc else None)


def _lists(items: pa.Array, lengths: Sequence[int | None]) -> pa.Array:
    """Group consecutive items into lists of these lengths; None: a null."""
    offsets = pa.array([0, *accumulate(n or 0 for n in lengths)], pa.int32())
    mask = pa.array([n is None for n in lengths], pa.bool_()) if None in lengths else None
    return pa.ListArray.from_arrays(offsets, items, mask=mask)


def _list_array_of(convert: Convert, values: Sequence[Sequence[Any] | None]) -> pa.Array:
    items = convert(list(chain.from_iterable(v for v in values if v)))
    return _lists(items, [None if v is None else len(v) for v in values])


def _struct_array(
    fields: Sequence[pa.Field],
    converts: Sequence[Convert],
    values: Sequence[tuple[Any, ...] | None],
) -> pa.Array:
    blank = (None,) * len(fields)
    columns = list(zip(*(blank if v is None else v for v in values), strict=True)) or [()] * len(
        fields
    )
    arrays = [convert(column) for convert, column in zip(converts, columns, strict=True)]
    mask = pa.array([v is None for v in values], pa.bool_()) if None in values else None
    return pa.StructArray.from_arrays(arrays, fields=list(fields), mask=mask)
