"""Bound the number of items in a record of any schema before decoding it. Pure.

Thirty bytes can announce a billion items. This is for schemas that `schemas.codec.compiled_reader`
does not support and fastavro decodes as a whole; it costs as much as decoding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schemas.codec.avro_schema import Schema, size_of
from schemas.codec.compiled_reader import ITEMS_MAX, long, size

_VISITS = 8
"""Maximum values per byte, nested and empty ones included. Real records have two or three."""

_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}


def check_items(schema: Schema, named: Mapping[str, Schema], data: bytes, at: int) -> None:
    """Step over a record as fastavro does.

    Args:
        named: The types that the schema names.

    Raises:
        ValueError: All arrays together have more than ITEMS_MAX records or empty items, or there
            are far more values than bytes. Also one of `Read`'s errors, or RecursionError, for a
            malformed record.
    """
    _Walk(named, data).value(schema, at)


class _Walk:
    def __init__(self, named: Mapping[str, Schema], data: bytes) -> None:
        self._named, self._data, self._left = named, data, ITEMS_MAX
        self._visits = ITEMS_MAX + _VISITS * len(data)

    def value(self, schema: Any, at: int) -> int:
        """The position behind a value. Bytes that are missing are noticed at the next one."""
        self._visits -= 1
        if self._visits < 0:
            raise ValueError(f"far more values than the {len(self._data)} bytes have room for")
        if isinstance(schema, list):
            branch, at = size(self._data, at)
            return self.value(schema[branch], at)
        kind = schema if isinstance(schema, str) else schema["type"]
        match kind:
            case "string" | "bytes":
                n, at = size(self._data, at)
                return at + n
            case "int" | "long" | "enum":
                return long(self._data, at)[1]
            case "null" | "boolean" | "float" | "double":
                return at + _SIZES[kind]
            case "fixed":
                return at + size_of(schema)
            case "record" | "error":
                for field in schema["fields"]:
                    at = self.value(field["type"], at)
                return at
            case "array":
                return self._blocks((schema["items"],), at)
            case "map":
                return self._blocks(("string", schema["values"]), at)
            case _:
                return self.value(self._named[kind], at)

    def _blocks(self, types: tuple[Schema, ...], at: int) -> int:
        """types: of an item, or of a key and its value."""
        left, at = long(self._data, at)
        while left:
            end = None
            if (
                left < 0
            ):  # then the block's size follows, by which it is skipped where it is not wanted
                left, (n, at) = -left, size(self._data, at)
                end = at + n
            for _ in range(left):
                at = self._item(types, at)
            if end is not None and at != end:
                raise ValueError(f"a block that ends at byte {at} and says {end}")
            left, at = long(self._data, at)
        return at

    def _item(self, types: tuple[Schema, ...], begin: int) -> int:
        at = begin
        for one in types:
            at = self.value(one, at)
        if at > len(self._data):
            raise IndexError(f"an item that ends at byte {at} of {len(self._data)}")
        if at == begin or self._is_record(types[-1]):
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {ITEMS_MAX} records in arrays")
        return at

    def _is_record(self, schema: Schema) -> bool:
        one = self._named.get(schema, schema) if isinstance(schema, str) else schema
        return isinstance(one, dict) and one["type"] == "record"
