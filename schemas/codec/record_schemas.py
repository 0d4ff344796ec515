"""Derive the Avro schemas from the record classes, which are the one definition of a record.

Run `python -m clawstream.schemas.codec.record_schemas` after a change of a record: it writes
`schemas/avro/NAME.avsc`. The doc of a field is the string below it in the class, or else the string
below the alias that is its type.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import Schema
from clawstream.schemas.codec.single_object import AVRO_DIR, NAMESPACE, TOP_LEVEL
from clawstream.schemas.records.parts import Int32, Micros, Millis, PackedFloats, PackedInts

_PLAIN: Mapping[Any, Schema] = {
    bool: "boolean",
    Int32: "int",
    int: "long",
    Millis: {"type": "long", "logicalType": "timestamp-millis"},
    Micros: {"type": "long", "logicalType": "timestamp-micros"},
    float: "double",
    str: "string",
    bytes: "bytes",
    PackedInts: "bytes",
    PackedFloats: "bytes",
    type(None): "null",
}
_PACKINGS = {PackedInts: "i32le", PackedFloats: "f32le"}


def avsc_of(record: type) -> str:
    """Return the text of a record's schema file."""
    return json.dumps(_record(record, set()), indent=1, ensure_ascii=False) + "\n"


def _record(record: type, defined: set[str]) -> Schema:
    """defined: Names of the types that the schema has defined so far; later uses only name them."""
    hints = typing.get_type_hints(record, include_extras=True)
    return {
        "type": "record",
        "name": record.__name__,
        "namespace": NAMESPACE,
        "doc": " ".join((record.__doc__ or "").split()),
        "fields": [
            _field(record, field, hints[field.name], defined)
            for field in dataclasses.fields(record)
        ],
    }


def _field(record: type, field: dataclasses.Field[Any], hint: Any, defined: set[str]) -> Schema:
    doc = _docs().get(f"{record.__name__}.{field.name}")
    if not doc:
        raise ValueError(f"{record.__name__}.{field.name} has no doc: a string below it")
    schema = {"name": field.name, "type": _type(hint, defined), "doc": doc}
    for branch in _branches(hint):
        if branch in _PACKINGS:
            schema["packing"] = _PACKINGS[branch]
    if field.default is not dataclasses.MISSING:
        schema["default"] = field.default
    return schema


def _type(hint: Any, defined: set[str]) -> Schema:
    branches = _branches(hint)
    if len(branches) > 1:  # null comes first in the schema, as its default does
        return ["null", *(_type(kind, defined) for kind in branches if kind is not type(None))]
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return {"type": "array", "items": _type(inside[0], defined)}
    if origin is Mapping:
        return {"type": "map", "values": _type(inside[1], defined)}
    name = _enums()[hint] if origin is typing.Literal else hint.__name__
    if name in defined:  # Avro allows one definition of a name
        return f"{NAMESPACE}.{name}"
    defined.add(name)
    if origin is typing.Literal:
        return {"type": "enum", "name": name, "namespace": NAMESPACE, "symbols": inside}
    return _record(hint, defined)


def _branches(hint: Any) -> Sequence[Any]:
    """Return the types of a union; any other type alone."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


@cache
def _enums() -> Mapping[Any, str]:
    """Return the names of the enums, which are Literals."""
    named = vars(records).items()
    return {kind: name for name, kind in named if typing.get_origin(kind) is typing.Literal}


@cache
def _docs() -> Mapping[str, str]:
    """Return the docs of all fields, by `Class.field`."""
    modules = [ast.parse(path.read_text()) for path in Path(records.__file__).parent.glob("*.py")]
    of_aliases = {
        alias.id: doc
        for module in modules
        for statement, doc in _documented(module.body)
        if isinstance(statement, ast.Assign) and isinstance(alias := statement.targets[0], ast.Name)
    }
    docs = {}
    for record in (node for module in modules for node in module.body):
        if isinstance(record, ast.ClassDef):
            for field, doc in _documented(record.body):
                if isinstance(field, ast.AnnAssign):
                    name = f"{record.name}.{ast.unparse(field.target)}"
                    docs[name] = doc or of_aliases.get(ast.unparse(field.annotation), "")
    return docs


def _documented(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each statement with the string below it, which is empty where there is none."""
    for statement, below in pairwise([*body, ast.Pass()]):
        match below:
            case ast.Expr(ast.Constant(str(doc))):
                yield statement, " ".join(doc.split())
            case _:
                yield statement, ""


def main() -> None:
    """Write the schema files."""
    for record in TOP_LEVEL:
        (AVRO_DIR / f"{record.__name__}.avsc").write_text(avsc_of(record))


if __name__ == "__main__":
    main()
