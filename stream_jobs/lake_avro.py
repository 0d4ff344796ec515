"""Avro binary as plain tuples, compiled once for a pair of schemas: the lake wants columns, not records, and few of a large record.

Fields that are not wanted are stepped over. Only the types that our schemas use; a pair of schemas that needs more is a ValueError.

Format: https://avro.apache.org/docs/1.12.0/specification/#binary-encoding, and #schema-resolution there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any

Schema = Any
"""An Avro schema as parsed JSON."""
Read = Callable[[bytes, int], tuple[Any, ...]]
"""(data, where the body begins) to the wanted fields in order. Records inside are tuples as well, arrays lists, maps lists of pairs."""

MALFORMED = (IndexError, ValueError, struct.error, MemoryError, OverflowError)
"""What a `Read` raises for bytes that are no such record."""


def expanded(schema: Schema, named: dict[str, Schema] | None = None) -> Schema:
    """The schema with each named type written out where it is used. Raises ValueError when a type is unknown or contains itself."""
    named = {} if named is None else named
    if isinstance(schema, list):
        return [expanded(branch, named) for branch in schema]
    if isinstance(schema, str):
        if schema in _PLAIN:
            return schema
        if (known := named.get(schema.rpartition(".")[2])) is None:
            raise ValueError(f"Avro type {schema} is unknown, or contains itself")
        return known
    out = dict(schema)
    match schema["type"]:
        case "record":
            out["fields"] = [{**f, "type": expanded(f["type"], named)} for f in schema["fields"]]
        case "enum":
            pass
        case "array":
            out["items"] = expanded(schema["items"], named)
        case "map":
            out["values"] = expanded(schema["values"], named)
        case inner:
            out["type"] = expanded(inner, named)
    if "name" in schema:
        named[schema["name"].rpartition(".")[2]] = out
    return out


_PLAIN = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


def not_null(schema: Schema) -> Schema:
    """The type of a value that is there."""
    return next((k for k in schema if k != "null"), "null") if isinstance(schema, list) else schema


def kind_of(schema: Schema) -> str:
    """`string`, `record`, ...: the name of a type that is no union, without logical types."""
    while isinstance(schema, dict):
        schema = schema["type"]
    return str(schema)


def reader_of(writer: Schema, wanted: Schema) -> Read:
    """Compile. writer, wanted: record schemas, `expanded`. What the writer did not write has the default that `wanted` gives it.

    Raises ValueError for a pair that is not read here.
    """
    source = _Source()
    fields = source.record(writer, wanted, 1)
    source.add(1, "if i != len(b): raise ValueError(f'the record ends at byte {i} of {len(b)}')")
    source.add(1, f"return {fields}")
    names: dict[str, Any] = source.constants | {
        "rest": _rest, "counted": _counted, "bad": _bad, "float_at": _float, "double_at": _double,
    }  # fmt: skip
    try:
        exec("def read(b, i):\n" + "\n".join(source.lines), names)
    except (SyntaxError, RecursionError, MemoryError) as e:  # Python nests at most 20 loops, and two are an array
        raise ValueError(f"types nested so deeply are not read here: {e}") from e
    return names["read"]  # type: ignore[no-any-return]


_SIZES = {"boolean": 1, "float": 4, "double": 8}
_float, _double = struct.Struct("<f").unpack_from, struct.Struct("<d").unpack_from


def _rest(n: int, b: bytes, i: int) -> tuple[int, int]:
    """The rest of a varint whose first byte says that it goes on: its bits, still zig-zag, and where it ends."""
    n &= 127
    shift = 7
    while True:
        byte = b[i]
        i += 1
        n |= (byte & 127) << shift
        if byte < 128:
            return n, i
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than ten bytes at byte {i}")


def _counted(b: bytes, i: int) -> tuple[int, int]:
    """The count of a block and where its items begin; 0: no more blocks."""
    n = b[i]
    i += 1
    if n > 127:
        n, i = _rest(n, b, i)
    if n & 1:  # a negative count is followed by the size of the block
        while b[i] > 127:
            i += 1
        i += 1
        n += 1
    count = n >> 1
    if count > len(b) - i:
        raise ValueError(f"a block of {count} items at byte {i} of {len(b)}")
    return count, i


def _bad(what: str, i: int) -> None:
    raise ValueError(f"{what} at byte {i}")


class _Source:
    """Lines of a function's body, and the constants that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._names = 0

    def add(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def record(self, writer: Schema, wanted: Schema, depth: int) -> str:
        """Lines that read a record; returns the expression of its tuple."""
        there = {f["name"]: f for f in wanted["fields"]}
        found: dict[str, str] = {}
        for field in writer["fields"]:
            if field["name"] in there:
                found[field["name"]] = self._name()
                self._value(field["type"], there[field["name"]]["type"], found[field["name"]], depth)
            else:
                self._skip(field["type"], depth)
        for name in [name for name in there if name not in found]:
            found[name] = self._constant(_default(there[name]))
        return "(" + "".join(f"{found[name]}, " for name in there) + ")"

    def _value(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        """Lines that read one value into a variable."""
        if isinstance(writer, list):
            if len(writer) != 1 + ("null" in writer):
                raise ValueError(f"a union of {[kind_of(b) for b in writer]} is not read here")
            self._union(writer, depth, lambda branch, d: self._value(branch, wanted, to, d), f"{to} = None")
            return
        kind, aim = kind_of(writer), not_null(wanted)
        if kind != kind_of(aim) and (kind, kind_of(aim)) != ("int", "long"):
            raise ValueError(f"{kind} as {kind_of(aim)} is not read here")
        match kind:
            case "string" | "bytes":
                self._length(depth)
                self.add(depth, f"{to} = b[i - n:i]" + (".decode()" if kind == "string" else ""))
            case "int" | "long":
                self._varint(depth)
                self.add(depth, f"{to} = (n >> 1) ^ -(n & 1)")
            case "boolean":
                self.add(depth, f"{to} = b[i] == 1; i += 1")
            case "float" | "double":
                self.add(depth, f"({to},) = {kind}_at(b, i); i += {_SIZES[kind]}")
            case "enum":
                self._varint(depth)
                self.add(depth, "if n & 1: bad('a negative index', i)")
                self.add(depth, f"{to} = {self._constant(tuple(writer['symbols']))}[n >> 1]")
            case "record":
                self.add(depth, f"{to} = {self.record(writer, aim, depth)}")
            case "array":
                self._items(to, depth, lambda one, d: self._value(writer["items"], aim["items"], one, d))
            case "map":
                self._pairs(writer, aim, to, depth)
            case other:
                raise ValueError(f"Avro type {other} is not read here")

    def _skip(self, writer: Schema, depth: int) -> None:
        """Lines that step over one value."""
        if isinstance(writer, list):
            self._union(writer, depth, self._skip, "pass")
            return
        match kind_of(writer):
            case "string" | "bytes":
                self._length(depth)
            case "int" | "long" | "enum":
                self._varint(depth)
            case "boolean" | "float" | "double" as kind:
                self.add(depth, f"i += {_SIZES[kind]}")
            case "record":
                self.add(depth, "pass")
                for field in writer["fields"]:
                    self._skip(field["type"], depth)
            case "array":
                self._blocks(depth, lambda d: self._skip(writer["items"], d))
            case "map":
                pair = {"type": "record", "fields": [{"type": "string"}, {"type": writer["values"]}]}
                self._blocks(depth, lambda d: self._skip(pair, d))
            case other:
                raise ValueError(f"Avro type {other} is not read here")

    def _varint(self, depth: int) -> None:
        self.add(depth, "n = b[i]; i += 1")
        self.add(depth, "if n > 127: n, i = rest(n, b, i)")

    def _length(self, depth: int) -> None:
        """Leaves a length in `n`, and `i` behind that many bytes."""
        self._varint(depth)
        self.add(depth, "if n & 1: bad('a negative length', i)")
        self.add(depth, "n >>= 1; i += n")

    def _union(self, writer: list[Schema], depth: int, inner: Callable[[Schema, int], None], null: str) -> None:
        self.add(depth, "n = b[i]; i += 1")
        for at, branch in enumerate(writer):
            self.add(depth, f"{'elif' if at else 'if'} n == {2 * at}:")
            if branch == "null":
                self.add(depth + 1, null)
            else:
                inner(branch, depth + 1)
        self.add(depth, "else: bad('a union branch that is not there', i)")

    def _blocks(self, depth: int, item: Callable[[int], Any]) -> None:
        count = self._name()
        self.add(depth, f"{count}, i = counted(b, i)")
        self.add(depth, f"while {count}:")
        self.add(depth + 1, f"for _ in range({count}):")
        item(depth + 2)
        self.add(depth + 1, f"{count}, i = counted(b, i)")

    def _items(self, to: str, depth: int, item: Callable[[str, int], None]) -> None:
        one = self._name()
        self.add(depth, f"{to} = []")

        def each(inner: int) -> None:
            item(one, inner)
            self.add(inner, f"{to}.append({one})")

        self._blocks(depth, each)

    def _pairs(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        key = self._name()

        def pair(one: str, inner: int) -> None:
            self._value("string", "string", key, inner)
            self._value(writer["values"], wanted["values"], one, inner)
            self.add(inner, f"{one} = ({key}, {one})")

        self._items(to, depth, pair)


def _default(field: Mapping[str, Any]) -> Any:
    """What a field is that nobody wrote. Raises ValueError when its schema has no default that is read here."""
    value, kind = field.get("default", _default), field["type"]
    kind = kind_of(kind[0] if isinstance(kind, list) else kind)
    if value is None or (
        kind in ("string", "int", "long", "float", "double", "boolean", "enum") and value is not _default
    ):
        return value
    if kind in ("array", "map") and not value:
        return ()
    raise ValueError(f"field {field['name']} has no default that is read here, and the writer did not write it")
