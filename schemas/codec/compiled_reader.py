"""Compile a pair of schemas, writer's and reader's, to a Python function that decodes Avro binary.

Decoding takes a fifth of fastavro's time. The values equal fastavro's (a test compares both), but
the reader is stricter: it rejects negative union branches, numbers of more than 64 bits, and arrays
of more than 100,000 records. It supports the types that the shipped schemas use; any other pair is
a ValueError. One function is generated for each pair, as `dataclasses` does, because a call per
field would cost more than the field. Unwanted fields are skipped, missing fields get their default.
Announced schemas are untrusted: their parts reach the source only through
`schemas.codec.avro_source`.

Format: https://avro.apache.org/docs/1.12.0/specification/#binary-encoding, and #schema-resolution.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Protocol

from schemas.codec.avro_schema import Schema, kind_of, not_null, plain_name, size_of, takes_nothing
from schemas.codec.avro_source import identifier, literal

Read = Callable[[bytes, int], Any]
"""Decodes the record at a position; the record must end with the bytes. Raises MALFORMED errors."""
ClassOf = Callable[[str], type]
"""Maps a record name to its dataclass: frozen, with slots, fields in the order of the schema."""

MALFORMED = (IndexError, ValueError, struct.error, OverflowError)
"""What a `Read` raises for bytes that are no such record."""
ITEMS_MAX = 100_000
"""Records in one array. What we write has far fewer: its records have a bound of bytes."""
LINES_MAX = 20_000
"""Maximum lines of one reader; shipped ones have about 350.

Types are inlined at each use; compiling 20,000 lines takes a second.
"""

_SIZES = {"boolean": 1, "float": 4, "double": 8}
_float, _double = struct.Struct("<f").unpack_from, struct.Struct("<d").unpack_from


class Made(Protocol):
    """Generates code for the decoded values.

    empty: Code of an empty array. strict: No null for a non-null type, no other type names.
    """

    empty: str
    strict: bool

    def record(
        self, code: Code, schema: Schema, depth: int
    ) -> tuple[str, dict[str, str], list[str]]:
        """Code of it; where each wanted field goes; lines behind them."""

    def array(self, found: str) -> str:
        """Code of an array, from that of a list."""

    def map(self) -> tuple[str, str]:
        """Return code of an empty map, and a format of code that adds a key and value to a map."""


class Records:
    """Generates dataclasses, tuples and dicts. class_of: Maps a name to its class.

    Filling a frozen record through object.__setattr__ takes longer than decoding it. So the code
    fills a mutable twin class with the same slots and then sets `__class__`.
    """

    empty, strict = "()", True

    def __init__(self, class_of: ClassOf) -> None:
        self._class_of = class_of

    def record(
        self, code: Code, schema: Schema, depth: int
    ) -> tuple[str, dict[str, str], list[str]]:
        name, cls = plain_name(schema["name"]), self._class_of(plain_name(schema["name"]))
        names = [f["name"] for f in schema["fields"]]
        if names != [f.name for f in fields(cls)]:
            raise ValueError(f"{cls.__name__} and its schema have other fields")
        record, twin = code.name(), code.constant(type(name, (), {"__slots__": tuple(names)}))
        code.add(depth, f"{record} = new({twin})")
        return (
            record,
            {n: f"{record}.{identifier(n)}" for n in names},
            [f"{record}.__class__ = {code.constant(cls)}"],
        )

    def array(self, found: str) -> str:
        return f"tuple({found})"

    def map(self) -> tuple[str, str]:
        return "{}", "{0}[{1}] = {2}"


def reader_of(writer: Schema, wanted: Schema, made: Made) -> Read:
    """Compile a reader.

    Args:
        writer: The writer's record schema, `expanded`.
        wanted: The reader's record schema, `expanded`.

    Raises:
        ValueError: The pair is not supported.
    """
    code = Code(made)
    record = code.record(writer, wanted, 1)
    code.add(
        1, "if at != len(data): raise ValueError(f'the record ends at byte {at} of {len(data)}')"
    )
    code.add(1, f"return {record}")
    names: dict[str, Any] = code.constants | {
        "long": long,
        "size": size,
        "items": items,
        "bad": _bad,
        "float_at": _float,
        "double_at": _double,
        "new": object.__new__,
    }
    source = "def read(data, at):\n" + "\n".join(code.lines)
    try:
        exec(
            compile(source, f"<reader of {identifier(plain_name(wanted['name']))}>", "exec"), names
        )
    # Python nests at most 20 loops, and two are an array; its parser calls a stack of its own that
    # is full a MemoryError
    except (SyntaxError, RecursionError, MemoryError) as e:
        raise ValueError(f"types nested so deeply are not read here: {e}") from e
    return names["read"]  # type: ignore[no-any-return]


def long(data: bytes, at: int) -> tuple[int, int]:
    """A long, zig-zag, seven bits a byte, and the position behind it."""
    n = data[at]
    if n < 128:
        return (n >> 1) ^ -(n & 1), at + 1
    byte = data[at + 1]
    n = n & 127 | (byte & 127) << 7
    if byte < 128:
        return (n >> 1) ^ -(n & 1), at + 2
    shift = 14
    for end in range(at + 2, at + 10):
        byte = data[end]
        n |= (byte & 127) << shift
        if byte < 128 and n < 1 << 64:
            return (n >> 1) ^ -(n & 1), end + 1
        shift += 7
    raise ValueError(f"a number of more than 64 bits at byte {at}")


def size(data: bytes, at: int) -> tuple[int, int]:
    """A length: as a rule of text or tokens."""
    low = data[at]
    if low < 128 or low & 1:
        n, at = long(data, at)
        if n < 0:
            raise ValueError(f"a length of {n}")
        return n, at
    high = data[at + 1]
    if high < 128:
        return (low & 127 | high << 7) >> 1, at + 2
    top = data[at + 2]
    if top < 128:
        return (low & 127 | (high & 127) << 7 | top << 14) >> 1, at + 3
    return long(data, at)


def items(data: bytes, at: int) -> tuple[int, int]:
    """The number of items in a block of an array or a map, each of a byte at least."""
    n, at = long(data, at)
    if n < 0:  # then its size follows, for those who skip it
        n, (_, at) = -n, long(data, at)
    if n > len(data) - at:
        raise ValueError(f"a block of {n} items at byte {at} of {len(data)}")
    return n, at


def _bad(what: str, at: int) -> None:
    raise ValueError(f"{what} at byte {at}")


def _is_value(kind: str, value: Any) -> bool:
    """Return whether a default fits a primitive type.

    Raises ValueError for text that is not UTF-8.
    """
    match kind:
        case "string" | "enum":
            return type(value) is str and value.encode() is not None
        case "int" | "long":
            return type(value) is int and value.bit_length() < (32 if kind == "int" else 64)
        case "float" | "double":
            return type(value) is float or (type(value) is int and value.bit_length() < 64)
    return kind == "boolean" and type(value) is bool


class Code:
    """Lines of a reader and the constants that they use.

    In the code, `data` and `at` are the bytes and the position; `n` is a scratch variable.
    """

    def __init__(self, made: Made) -> None:
        self._made = made
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._names = 0

    def add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]
        if len(self.lines) > LINES_MAX:
            raise ValueError(f"a reader of more than {LINES_MAX} lines is not made")

    def name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def record(self, writer: Schema, wanted: Schema, depth: int) -> str:
        """Lines that read a record; returns the code of it."""
        record, targets, behind = self._made.record(self, wanted, depth)
        if self._made.strict and plain_name(writer["name"]) != plain_name(wanted["name"]):
            raise ValueError(f"a {writer['name']} is not read as {wanted['name']}")
        types = {f["name"]: f["type"] for f in wanted["fields"]}
        for field in writer["fields"]:
            if field["name"] in targets:
                self._value(field["type"], types[field["name"]], targets[field["name"]], depth)
            else:
                self._skip(field["type"], depth)
        written = {f["name"] for f in writer["fields"]}
        for field in wanted["fields"]:
            if field["name"] not in written:
                self.add(depth, f"{targets[field['name']]} = {self._default(field)}")
        self.add(depth, *behind)
        return record

    def _value(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        """Lines that read one value into a variable."""
        if isinstance(writer, list):
            if len(writer) != 1 + ("null" in writer):
                raise ValueError(f"a union of {[kind_of(b) for b in writer]} is not read here")
            if (
                self._made.strict
                and "null" in writer
                and not (isinstance(wanted, list) and "null" in wanted)
            ):
                raise ValueError("what can be null is not read as what can't")
            self._union(
                writer, depth, lambda branch, d: self._value(branch, wanted, to, d), f"{to} = None"
            )
            return
        kind, aim = kind_of(writer), not_null(wanted)
        if kind != kind_of(aim) and (kind, kind_of(aim)) != ("int", "long"):
            raise ValueError(f"{kind} as {kind_of(aim)} is not read here")
        match kind:
            case "string":
                self._size(depth)
                self.add(depth, "at += n", f"{to} = data[at - n:at].decode()")
            case "bytes":
                self._size(depth)
                self.add(depth, "at += n", f"{to} = data[at - n:at]")
            case "int" | "long":
                self.add(depth, "n = data[at]", f"if n < 128: {to} = (n >> 1) ^ -(n & 1); at += 1")
                self.add(depth, f"else: {to}, at = long(data, at)")
            case "boolean":
                self.add(depth, f"{to} = data[at] != 0", "at += 1")
            case "float" | "double":
                self.add(depth, f"{to}, = {kind}_at(data, at)", f"at += {_SIZES[kind]}")
            case "enum":
                self._enum(writer, aim, to, depth)
            case "record":
                self.add(depth, f"{to} = {self.record(writer, aim, depth)}")
            case "array":
                self._array(writer["items"], aim["items"], to, depth)
            case "map":
                self._map(writer["values"], aim["values"], to, depth)
            case other:
                raise ValueError(f"Avro type {other} is not read here")

    def _enum(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        if self._made.strict and not set(writer["symbols"]) <= set(wanted["symbols"]):
            raise ValueError(f"{writer['name']} has symbols that are not read here")
        self._size(depth)
        self.add(depth, f"{to} = {self.constant(tuple(writer['symbols']))}[n]")

    def _array(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        found, item = self.name(), self.name()
        self.add(depth, f"if data[at] == 0: {to} = {self._made.empty}; at += 1", "else:")
        self.add(depth + 1, f"{found} = []")

        def one(d: int) -> None:
            self._value(writer, wanted, item, d)
            self.add(d, f"{found}.append({item})")

        self._blocks(
            writer, depth + 1, one, found if kind_of(not_null(writer)) == "record" else None
        )
        self.add(depth + 1, f"{to} = {self._made.array(found)}")

    def _map(self, writer: Schema, wanted: Schema, to: str, depth: int) -> None:
        found, key, item = self.name(), self.name(), self.name()
        empty, more = self._made.map()
        self.add(depth, f"{to} = {found} = {empty}")

        def one(d: int) -> None:
            self._value("string", "string", key, d)
            self._value(writer, wanted, item, d)
            self.add(d, more.format(found, key, item))

        self._blocks("string", depth, one, None)

    def _skip(self, writer: Schema, depth: int) -> None:
        """Lines that step over one value."""
        if isinstance(writer, list):
            self._union(writer, depth, self._skip, "pass")
            return
        match kind_of(writer):
            case "string" | "bytes":
                self._size(depth)
                self.add(depth, "at += n")
            case "int" | "long" | "enum":
                self.add(depth, "if data[at] < 128: at += 1", "else: n, at = long(data, at)")
            case "boolean" | "float" | "double" as kind:
                self.add(depth, f"at += {_SIZES[kind]}")
            case "fixed":
                self.add(depth, f"at += {literal(size_of(writer))}")
            case "record":
                self.add(depth, "pass")
                for field in writer["fields"]:
                    self._skip(field["type"], depth)
            case "array":
                self._blocks(writer["items"], depth, lambda d: self._skip(writer["items"], d), None)
            case "map":
                pair = {
                    "type": "record",
                    "fields": [{"type": "string"}, {"type": writer["values"]}],
                }
                self._blocks(pair, depth, lambda d: self._skip(pair, d), None)
            case other:
                raise ValueError(f"Avro type {other} is not read here")

    def _size(self, depth: int) -> None:
        """Leaves a length in `n`."""
        self.add(
            depth,
            "n = data[at]",
            "if n > 127 or n & 1: n, at = size(data, at)",
            "else: n >>= 1; at += 1",
        )

    def _union(
        self, writer: list[Schema], depth: int, inner: Callable[[Schema, int], None], null: str
    ) -> None:
        self.add(depth, "n = data[at]", "at += 1")
        for at, branch in enumerate(writer):
            self.add(depth, f"{'elif' if at else 'if'} n == {2 * at}:")
            if branch == "null":
                self.add(depth + 1, null)
            else:
                inner(branch, depth + 1)
        self.add(depth, "else: bad('a union branch that is not there', at)")

    def _blocks(
        self, one: Schema, depth: int, item: Callable[[int], None], found: str | None
    ) -> None:
        """Generate code for the blocks of an array or map.

        found: The list whose length is bounded; None when the number of bytes bounds it.
        """
        if takes_nothing(one):
            raise ValueError(
                "items that take no bytes are not read here: nothing bounds their number"
            )
        left = self.name()
        self.add(depth, f"{left}, at = items(data, at)", f"while {left}:")
        if found is not None:
            self.add(
                depth + 1,
                f"if len({found}) + {left} > {ITEMS_MAX}: bad('more than {ITEMS_MAX} records in "
                "an array', at)",
            )
        self.add(depth + 1, f"for _ in range({left}):")
        item(depth + 2)
        self.add(
            depth + 1, f"if data[at]: {left}, at = items(data, at)", f"else: {left} = 0; at += 1"
        )

    def _default(self, field: Mapping[str, Any]) -> str:
        """Return code of the default of a field that the writer lacks.

        Raises:
            ValueError: The field has no default, or one that is not supported.
        """
        value, kind = field.get("default", self), field["type"]
        kind = kind_of(kind[0] if isinstance(kind, list) else kind)
        if value is None or _is_value(kind, value):
            return self.constant(value)
        if kind in ("array", "map") and not value:
            return self._made.empty if kind == "array" else self._made.map()[0]
        raise ValueError(
            f"field {field['name']} has no default that is read here, and the writer did not "
            "write it"
        )
