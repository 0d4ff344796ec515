"""Reading records from Avro binary, compiled once for a schema: a fifth of what fastavro and a frozen dataclass take for a step.

Value for value what fastavro reads (a test holds both against each other), but strict: a negative branch of a union or a number of more
than 64 bits, which no writer writes, is refused, and so are more than 100,000 records in one array: one of two bytes would become
sixty. Only the types that our schemas use. For each record one
function is written out, as `dataclasses` does: a call for each field would cost more than the field. Every consumer reads every record
through here; only what an older version of us wrote goes through fastavro, which knows how schemas resolve.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from itertools import count
from typing import Any

Read = Callable[[bytes, int], tuple[Any, int]]
"""From bytes and a position: the value, and the position behind it, which may be behind the end where bytes are missing.

Raises IndexError, ValueError or struct.error.
"""
ClassOf = Callable[[str], type]
"""The dataclass of a record, by its name in the schema: frozen, with slots, with the fields of the schema in its order."""

ITEMS_MAX = 100_000
"""Records in one array. What we write has far fewer: its records have a bound of bytes."""

_PACKED = {"float": struct.Struct("<f"), "double": struct.Struct("<d")}


def reader_of(schema: Mapping[str, Any], class_of: ClassOf) -> Read:
    """Compile the schema of a record. Raises ValueError for a type that no schema of ours has."""
    return _Compiler(class_of).record(schema)


def _long(data: bytes, at: int) -> tuple[int, int]:
    """A long, zig-zag, seven bits a byte."""
    byte = data[at]
    n, shift = byte & 127, 7
    if byte < 128:
        return (n >> 1) ^ -(n & 1), at + 1
    for end in range(at + 1, at + 10):
        byte = data[end]
        n |= (byte & 127) << shift
        if byte < 128 and n < 1 << 64:
            return (n >> 1) ^ -(n & 1), end + 1
        shift += 7
    raise ValueError("a number of more than 64 bits")


def _size(data: bytes, at: int) -> tuple[int, int]:
    """A length: as a rule of text or tokens."""
    low = data[at]
    if low < 128 or low & 1:
        n, at = _long(data, at)
        if n < 0:
            raise ValueError(f"a length of {n}")
        return n, at
    high = data[at + 1]
    if high < 128:
        return (low & 127 | high << 7) >> 1, at + 2
    top = data[at + 2]
    if top < 128:
        return (low & 127 | (high & 127) << 7 | top << 14) >> 1, at + 3
    return _long(data, at)


def _items(data: bytes, at: int) -> tuple[int, int]:
    """The number of items in a block of an array or a map."""
    n, at = _long(data, at)
    if n < 0:  # then its size follows, for those who skip it
        n, (_, at) = -n, _long(data, at)
    return n, at


class _Compiler:
    """Writes the readers of one schema. In what it writes `data` and `at` are the bytes and the position; `n` is for the moment."""

    def __init__(self, class_of: ClassOf) -> None:
        self._class_of = class_of
        self._types: dict[str, Any] = {}
        self._globals: dict[str, Any] = {"long": _long, "size": _size, "items": _items, "new": object.__new__}
        self._numbers = count()

    def record(self, schema: Mapping[str, Any]) -> Read:
        """The reader of a record, which other records may use."""
        name = _plain(schema["name"])
        self._types[name] = schema
        cls, names = self._class_of(name), [f["name"] for f in schema["fields"]]
        if names != [f.name for f in fields(cls)]:
            raise ValueError(f"{cls.__name__} and its schema have other fields")
        # A frozen record is filled field by field through object.__setattr__: that takes longer than reading it. So a twin is filled,
        # whose slots lie in the same places, and then becomes the record.
        twin, made = self._global(type(name, (), {"__slots__": tuple(names)})), self._global(cls)
        lines = [line for f in schema["fields"] for line in self._value(f"record.{f['name']}", f["type"])]
        body = [f"record = new({twin})", *lines, f"record.__class__ = {made}", "return record, at"]
        source = "\n ".join([f"def read_{name}(data, at):", *body])
        exec(compile(source, f"<reader of {name}>", "exec"), self._globals)
        return self._globals[f"read_{name}"]  # type: ignore[no-any-return]

    def _global(self, value: Any) -> str:
        name = f"g{next(self._numbers)}"
        self._globals[name] = value
        return name

    def _value(self, to: str, schema: Any) -> list[str]:
        """Lines that read a value."""
        if isinstance(schema, list):
            return self._nullable(to, schema)
        if isinstance(schema, str):
            schema = self._types.get(_plain(schema), {"type": schema})
        match schema["type"]:
            case "string":
                return [*_size_of("n"), f"{to} = str(data[at:at + n], 'utf-8')", "at += n"]
            case "bytes":
                return [*_size_of("n"), f"{to} = data[at:at + n]", "at += n"]
            case "int" | "long":
                return [*_number(to), "if n > 127:", f" {to}, at = long(data, at)"]
            case "boolean":
                return [f"{to} = data[at] != 0", "at += 1"]
            case "float" | "double" as kind:
                unpack = self._global(_PACKED[kind].unpack_from)
                return [f"{to}, = {unpack}(data, at)", f"at += {_PACKED[kind].size}"]
            case "enum":
                return self._enum(to, schema)
            case "record":
                if _plain(schema["name"]) not in self._types:
                    self.record(schema)
                return [f"{to}, at = read_{_plain(schema['name'])}(data, at)"]
            case "array":
                return self._array(to, schema["items"])
            case "map":
                return self._map(to, schema["values"])
            case kind if not isinstance(kind, str):
                return self._value(to, kind)
            case kind:
                raise ValueError(f"Avro type {kind!r} is not read here")

    def _nullable(self, to: str, branches: list[Any]) -> list[str]:
        if len(branches) != 2 or branches[0] != "null":
            raise ValueError(f"the only unions read here are of null and a type, not {branches}")
        inner = [" " + line for line in self._value(to, branches[1])]
        return [
            "n = data[at]", "at += 1", "if not n:", f" {to} = None", "elif n != 2:", " raise ValueError('a union of two has no such branch')",
            "else:", *inner,
        ]  # fmt: skip

    def _enum(self, to: str, schema: Mapping[str, Any]) -> list[str]:
        self._types[_plain(schema["name"])] = schema
        symbols = self._global(dict(enumerate(schema["symbols"])))
        return ["n, at = size(data, at)", f"{to} = {symbols}[n]"]

    def _array(self, to: str, items: Any) -> list[str]:
        found, left, item = (f"{word}{next(self._numbers)}" for word in ("found", "left", "item"))
        one = ["  " + line for line in [*self._value(item, items), f"{found}.append({item})"]]
        known = self._types.get(_plain(items), {}) if isinstance(items, str) else items
        few = [
            f" if len({found}) + {left} > {ITEMS_MAX}:", f"  raise ValueError('more than {ITEMS_MAX} records in an array')",
        ] if isinstance(known, dict) and known.get("type") == "record" else []  # fmt: skip
        return [
            f"{to} = ()", "if data[at] == 0:", " at += 1", "else:",
            *(" " + line for line in [
                f"{found} = []", f"{left}, at = items(data, at)", f"while {left}:", *few, f" for _ in range({left}):", *one,
                f" {left}, at = items(data, at)", f"{to} = tuple({found})",
            ]),
        ]  # fmt: skip

    def _map(self, to: str, values: Any) -> list[str]:
        found, left, key, item = (f"{word}{next(self._numbers)}" for word in ("found", "left", "key", "item"))
        one = [
            "  " + line
            for line in [*self._value(key, "string"), *self._value(item, values), f"{found}[{key}] = {item}"]
        ]
        return [
            f"{to} = {found} = {{}}", f"{left}, at = items(data, at)", f"while {left}:", f" for _ in range({left}):", *one,
            f" {left}, at = items(data, at)",
        ]  # fmt: skip


def _plain(name: str) -> str:
    return name.rpartition(".")[2]


def _number(to: str) -> list[str]:
    """A number of one byte, if it is one."""
    return ["n = data[at]", "if n < 128:", f" {to} = (n >> 1) ^ -(n & 1)", " at += 1"]


def _size_of(to: str) -> list[str]:
    return [
        f"{to} = data[at]",
        f"if {to} > 127 or {to} & 1:",
        f" {to}, at = size(data, at)",
        "else:",
        f" {to} >>= 1",
        " at += 1",
    ]
