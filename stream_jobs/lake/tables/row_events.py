"""Convert rows to records: `clawstream.stream_jobs.lake.tables.arrow_columns` backwards. Pure."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pyarrow as pa

from clawstream.schemas.codec.single_object import shipped

_MICROS = {"timestamp-millis": 1000, "timestamp-micros": 1}


def events_of(record: type, rows: pa.Table) -> Iterator[Any]:
    """Yield the records of a table's rows, in order.

    A missing column has the default of its field. Invalid UTF-8 comes back as stored in the lake.
    """
    names = [f.name for f in dataclasses.fields(record) if f.name in rows.column_names]
    columns = [_values(record, name, rows.column(name)) for name in names]
    for values in zip(*columns, strict=True):
        given = {n: v for n, v in zip(names, values, strict=True) if v is not None}
        yield record(**given)


def _values(record: type, name: str, column: pa.ChunkedArray) -> list[Any]:
    """Convert the values of a column to those of the record's field; None is absent."""
    field = next(f for f in shipped(record.__name__)["fields"] if f["name"] == name)
    kind = field["type"]
    if isinstance(kind, list):
        kind = next(k for k in kind if k != "null")
    if "packing" in field:
        return [v for chunk in column.chunks for v in _packed(chunk)]
    if isinstance(kind, dict) and "logicalType" in kind:
        per = _MICROS[kind["logicalType"]]
        return [None if v is None else v // per for v in column.cast(pa.int64()).to_pylist()]
    if isinstance(kind, dict) and kind["type"] == "map":
        return [None if v is None else dict(v) for v in column.to_pylist()]
    if kind == "bytes" and name.endswith("_json"):
        return [None if v is None else v.encode() for v in column.to_pylist()]
    convert = _converter(typing.get_type_hints(record)[name])
    return [None if v is None else convert(v) for v in column.to_pylist()]


def _packed(lists: pa.ListArray) -> Iterator[bytes | None]:
    """Yield each list as packed bytes: slices of the item buffer, 4 bytes per item."""
    values = lists.values
    _, data = values.buffers()
    whole = memoryview(data if data is not None else b"")
    ends = lists.offsets.to_pylist()
    for index, valid in enumerate(lists.is_valid().to_pylist()):
        first, end = (4 * (values.offset + ends[index + at]) for at in (0, 1))
        yield bytes(whole[first:end]) if valid else None


@cache
def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return a function from Arrow values to record values: structs to records, lists to tuples."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        return _converter(inner)
    if typing.get_origin(hint) is tuple:
        item = _converter(typing.get_args(hint)[0])
        return lambda values: tuple(item(v) for v in values)
    if dataclasses.is_dataclass(hint):
        inner_of = {n: _converter(h) for n, h in typing.get_type_hints(hint).items()}
        make = typing.cast("Callable[..., Any]", hint)

        def build(value: Mapping[str, Any]) -> Any:
            return make(
                **{n: inner_of[n](v) for n, v in value.items() if v is not None and n in inner_of}
            )

        return build
    return lambda value: value
