"""Compile a schema to a Python function that encodes a record as Avro binary.

Encoding records of many small fields takes a fifth of fastavro's time. The bytes equal fastavro's
(a test compares both); only types that the shipped schemas use are supported. One function is
generated for each record, as `dataclasses` does, because a call per field would cost more than the
field. Parts of a schema reach the source only through `schemas.codec.avro_source`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from schemas.codec.avro_schema import plain_name
from schemas.codec.avro_source import identifier

Append = Callable[[bytes], None]
Write = Callable[[Any, Append], None]

_PACK = {"float": struct.Struct("<f").pack, "double": struct.Struct("<d").pack}
_LIMITS = {"int": (-(2**31), 2**31), "long": (-(2**63), 2**63)}


def _varint(value: int) -> bytes:
    """A long, zig-zag, seven bits a byte."""
    n = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    out.append(n)
    return bytes(out)


_SMALL = tuple(_varint(n) for n in range(8192))


def _whole(value: Any, low: int, high: int) -> bytes:
    if type(value) is not int or not low <= value < high:
        raise ValueError(f"{value!r:.40} is no whole number from {low} to {high - 1}")
    return _varint(value)


def _refuse(value: Any, wanted: str) -> None:
    raise TypeError(f"{wanted} expected, not {type(value).__name__}")


def writer_of(schema: Any) -> Write:
    """Compile the schema of a record: any object with its fields as attributes.

    Raises:
        ValueError: The schema has an unsupported type.
    """
    return _Compiler().record(schema)


class _Compiler:
    """Generates the writers of one schema.

    In the code, `append` takes the next bytes; `data` and `n` are scratch variables.
    """

    def __init__(self) -> None:
        self._types: dict[str, Any] = {}
        self._globals: dict[str, Any] = {
            "small": _SMALL,
            "varint": _varint,
            "whole": _whole,
            "refuse": _refuse,
        }
        self._numbers = count()

    def record(self, schema: Any) -> Write:
        """The writer of a record, which other records may use."""
        name = identifier(plain_name(schema["name"]))
        self._define(schema)
        lines: list[str] = []
        for field in schema["fields"]:
            value = self._new("value")
            lines += [
                f"{value} = record.{identifier(field['name'])}",
                *self._value(value, field["type"]),
            ]
        source = "\n ".join([f"def write_{name}(record, append):", *lines])
        exec(compile(source, f"<writer of {name}>", "exec"), self._globals)
        return self._globals[f"write_{name}"]  # type: ignore[no-any-return]

    def _define(self, schema: Any) -> None:
        if self._types.setdefault(plain_name(schema["name"]), schema) is not schema:
            raise ValueError(
                f"two types of the name {plain_name(schema['name'])} are not written here"
            )

    def _new(self, word: str) -> str:
        return f"{word}{next(self._numbers)}"

    def _global(self, value: Any) -> str:
        name = self._new("g")
        self._globals[name] = value
        return name

    def _value(self, of: str, schema: Any) -> list[str]:
        """Lines that write the value of a variable."""
        if isinstance(schema, list):
            if len(schema) != 2 or schema[0] != "null":
                raise ValueError(
                    f"the only unions written here are of null and a type, not {schema}"
                )
            inner = [" " + line for line in ["append(b'\\2')", *self._value(of, schema[1])]]
            return [f"if {of} is None:", " append(b'\\0')", "else:", *inner]
        if isinstance(schema, str):
            schema = self._types.get(plain_name(schema), {"type": schema})
        match schema["type"]:
            case "string":
                return [f"data = {of}.encode()", *_data("data")]
            case "bytes":
                return [f"if not isinstance({of}, bytes):", f" refuse({of}, 'bytes')", *_data(of)]
            case "int" | "long" as kind:
                low, high = _LIMITS[kind]
                return [
                    f"if type({of}) is int and 0 <= {of} < 8192:",
                    f" append(small[{of}])",
                    "else:",
                    f" append(whole({of}, {low}, {high}))",
                ]
            case "boolean":
                return [
                    f"if type({of}) is not bool:",
                    f" refuse({of}, 'a boolean')",
                    f"append(b'\\1' if {of} else b'\\0')",
                ]
            case "float" | "double" as kind:
                return [f"append({self._global(_PACK[kind])}({of}))"]
            case "enum":
                return self._enum(of, schema)
            case "record":
                name = identifier(plain_name(schema["name"]))
                if name in self._types:
                    self._define(schema)
                else:
                    self.record(schema)
                return [f"write_{name}({of}, append)"]
            case "array":
                item = self._new("item")
                one = [
                    " " + line
                    for line in [
                        f"for {item} in {of}:",
                        *(" " + x for x in self._value(item, schema["items"])),
                    ]
                ]
                return [f"if {of}:", *(" " + x for x in _length(of)), *one, "append(b'\\0')"]
            case "map":
                return self._map(of, schema["values"])
            case kind if not isinstance(kind, str):
                return self._value(of, kind)
            case kind:
                raise ValueError(f"Avro type {kind!r} is not written here")

    def _enum(self, of: str, schema: Mapping[str, Any]) -> list[str]:
        self._define(schema)
        symbols = self._global({symbol: _varint(at) for at, symbol in enumerate(schema["symbols"])})
        return [
            f"data = {symbols}.get({of})",
            "if data is None:",
            f" raise ValueError(f'{{{of}!r:.40}} is none of {{list({symbols})}}')",
            "append(data)",
        ]

    def _map(self, of: str, values: Any) -> list[str]:
        key, item = self._new("key"), self._new("item")
        one = [f"data = {key}.encode()", *_data("data"), *self._value(item, values)]
        return [
            f"if {of}:",
            *(" " + x for x in _length(of)),
            f" for {key}, {item} in {of}.items():",
            *("  " + x for x in one),
            "append(b'\\0')",
        ]


def _length(of: str) -> list[str]:
    return [f"n = len({of})", "append(small[n] if n < 8192 else varint(n))"]


def _data(of: str) -> list[str]:
    return [*_length(of), f"append({of})"]
