"""Avro schemas as parsed JSON: what a type is, and types written out where they are used. Pure."""

from __future__ import annotations

from typing import Any

Schema = Any
"""An Avro schema as parsed JSON."""
PLAIN = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")


def plain_name(name: str) -> str:
    """The name of a type without its namespace."""
    return name.rpartition(".")[2]


def expanded(schema: Schema, named: dict[str, Schema] | None = None) -> Schema:
    """The schema with each named type written out where it is used. Raises ValueError when a type is unknown or contains itself."""
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
        case "enum" | "fixed":
            pass
        case "array":
            out["items"] = expanded(schema["items"], named)
        case "map":
            out["values"] = expanded(schema["values"], named)
        case inner:
            out["type"] = expanded(inner, named)
    if "name" in schema:
        named[plain_name(schema["name"])] = out
    return out


def not_null(schema: Schema) -> Schema:
    """The type of a value that is there."""
    return next((k for k in schema if k != "null"), "null") if isinstance(schema, list) else schema


def kind_of(schema: Schema) -> str:
    """`string`, `record`, ...: the name of a type that is no union, without logical types."""
    while isinstance(schema, dict):
        schema = schema["type"]
    return str(schema)


def takes_nothing(schema: Schema) -> bool:
    """Whether values of an `expanded` type take no bytes: of such, any number fits anywhere."""
    match kind_of(schema) if not isinstance(schema, list) else "union":
        case "null":
            return True
        case "record":
            return all(takes_nothing(f["type"]) for f in schema["fields"])
        case "fixed":
            return not schema["size"]
    return False
