"""Validate, inspect and expand Avro schemas in parsed JSON form. Pure."""

from __future__ import annotations

import re
from typing import Any

Schema = Any
"""An Avro schema as parsed JSON."""
PLAIN = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
TYPES_MAX = 20_000
"""Maximum number of types in an expanded schema.

Shipped schemas have a few hundred; 3 KB of nested names can expand to a million.
"""

VALUES_PER_BYTE = 8
"""Maximum values for each byte of repeated items. Shipped schemas have at most one.

Items without bytes have no bound: of these, any number fits anywhere.
"""

_SIZES = {"null": 0, "float": 4, "double": 8}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXTS = ("doc", "logicalType", "namespace", "packing")


def is_name(text: str) -> bool:
    """Whether it is a name as the specification has them, without a namespace."""
    return _NAME.fullmatch(text) is not None


def check(schema: Schema) -> None:
    """Reject malformed schemas before any code is derived from an announced one.

    Whether types are known and defaults fit their types is not checked here.

    Raises:
        ValueError: Wrong names, sizes or texts, or types without their parts.
        RecursionError: The schema is nested too deeply.
    """
    if isinstance(schema, list):
        for branch in schema:
            if isinstance(branch, list):
                raise ValueError("a union right inside a union")
            check(branch)
    elif isinstance(schema, dict):
        _check_type(schema)
    else:
        _check_name(schema)


def _check_type(schema: dict[str, Any]) -> None:
    _check_texts(schema)
    match kind := schema.get("type"):
        case "record" | "error":
            _check_name(schema.get("name"))
            names = set[str]()
            for field in _list_of(dict, schema, "fields"):
                _check_texts(field)
                if (
                    not isinstance(name := field.get("name"), str)
                    or not is_name(name)
                    or name in names
                ):
                    raise ValueError(f"{name!r:.40} is no name of a field, or of two")
                names.add(name)
                check(field.get("type"))
        case "enum":
            _check_name(schema.get("name"))
            if not all(map(is_name, _list_of(str, schema, "symbols"))):
                raise ValueError(f"a symbol of {schema['name']} is no name")
        case "fixed":
            _check_name(schema.get("name"))
            size_of(schema)
        case "array":
            check(schema.get("items"))
        case "map":
            check(schema.get("values"))
        case _ if kind not in PLAIN:
            raise ValueError(f"{kind!r:.40} is no type")


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not all(map(is_name, name.split("."))):
        raise ValueError(f"{name!r:.40} is no name of a type")


def _check_texts(part: dict[str, Any]) -> None:
    """part: a type or a field."""
    for key in _TEXTS:
        if not isinstance(part.get(key, ""), str | None):
            raise ValueError(f"{key} is text, not {part[key]!r:.40}")
        # Half a surrogate pair is a ValueError here, rather than in a reader that shows the text.
        (part.get(key) or "").encode()
    if "aliases" in part:
        for alias in _list_of(str, part, "aliases"):
            _check_name(alias)


def _list_of(kind: type, schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise ValueError(f"{key} of {schema.get('name')!r:.40} is no list of {kind.__name__}")
    return found


def check_extent(schema: Schema) -> None:
    """Check that small records stay small when decoded.

    The expanded schema has at most TYPES_MAX types and symbols. Items of arrays and maps, and types
    that contain themselves, have at most VALUES_PER_BYTE values for each of their bytes.

    Args:
        schema: With full names everywhere.

    Raises:
        ValueError: It has more.
    """
    _measure(schema, {}, set())


def _measure(
    schema: Schema, named: dict[str, tuple[int, int] | None], recursive: set[str]
) -> tuple[int, int]:
    """Return the number of types, and the most values of a datum beyond those its bytes allow.

    Args:
        named: Results for the named types; None for a type that is being measured.
        recursive: Gets the names of types that contain themselves.
    """
    if isinstance(schema, str):
        known = named.get(schema, (1, 1 - VALUES_PER_BYTE * _SIZES.get(schema, 1)))
        if known is None:
            recursive.add(schema)
        return known or (1, 0)
    if isinstance(schema, list):
        inner = [_measure(branch, named, recursive) for branch in schema]
        types = 1 + sum(n for n, _ in inner)
        excess = max((e for _, e in inner), default=0) - VALUES_PER_BYTE
    else:
        name = schema.get("name", "")
        match schema["type"]:
            case "record" | "error":
                named[name] = None
                inner = [_measure(f["type"], named, recursive) for f in schema["fields"]]
                types, excess = 1 + sum(n for n, _ in inner), 1 + sum(e for _, e in inner)
                if name in recursive:
                    _check_density(excess)
            case "array":
                types, excess = _measure(schema["items"], named, recursive)
                _check_density(excess)
                types, excess = types + 1, 1 - VALUES_PER_BYTE
            case "map":
                types, excess = _measure(schema["values"], named, recursive)
                _check_density(excess + 1 - VALUES_PER_BYTE)
                types, excess = types + 1, 1 - VALUES_PER_BYTE
            case "enum":
                types, excess = 1 + len(schema["symbols"]), 1 - VALUES_PER_BYTE
            case "fixed":
                types, excess = 1, 1 - VALUES_PER_BYTE * size_of(schema)
            case inner_type:
                return _measure(inner_type, named, recursive)
        if name:
            named[name] = types, excess
    if types > TYPES_MAX:
        raise ValueError(f"more than {TYPES_MAX} types, written out where they are used")
    return types, excess


def _check_density(excess: int) -> None:
    if excess > 0:
        raise ValueError(f"items with more than {VALUES_PER_BYTE} values for each of their bytes")


def size_of(fixed: Schema) -> int:
    """Bytes of a `fixed`. Raises ValueError when its schema does not say them."""
    size = fixed.get("size")
    if type(size) is not int or not 0 <= size < 1 << 31:
        raise ValueError(f"{size!r:.40} is no number of bytes")
    return size


def plain_name(name: str) -> str:
    """The name of a type without its namespace."""
    return name.rpartition(".")[2]


def expanded(schema: Schema, named: dict[str, Schema] | None = None) -> Schema:
    """Replace each reference to a named type by its definition.

    Raises:
        ValueError: A type is unknown or recursive, or two namespaces define the same name.
    """
    named = {} if named is None else named
    if isinstance(schema, list):
        return [expanded(branch, named) for branch in schema]
    if isinstance(schema, str):
        if schema in PLAIN:
            return schema
        if (known := named.get(plain_name(schema))) is None:
            raise ValueError(f"Avro type {schema} is unknown, or contains itself")
        return known
    out = dict(schema)
    match schema["type"]:
        case "record":
            out["fields"] = [{**f, "type": expanded(f["type"], named)} for f in schema["fields"]]
        case "enum":
            pass
        case "fixed":
            size_of(schema)
        case "array":
            out["items"] = expanded(schema["items"], named)
        case "map":
            out["values"] = expanded(schema["values"], named)
        case inner:
            out["type"] = expanded(inner, named)
    if schema["type"] in ("record", "enum", "fixed"):
        if (name := plain_name(schema["name"])) in named:
            raise ValueError(f"two types of the name {name} are not told apart here")
        named[name] = out
    return out


def not_null(schema: Schema) -> Schema:
    """The type of a value that is there."""
    return next((k for k in schema if k != "null"), "null") if isinstance(schema, list) else schema


def kind_of(schema: Schema) -> str:
    """`string`, `record`, ...: the name of a type that is no union, without logical types."""
    while isinstance(schema, dict):
        schema = schema["type"]
    return str(schema)
