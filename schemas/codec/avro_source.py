"""Escape the parts of a schema that become Python source. Pure.

Anyone who can write to the schemas topic can announce a schema, and generated source is executed.
Every part of a schema in generated code passes through this module.
"""

from __future__ import annotations

from keyword import iskeyword

from schemas.codec.avro_schema import is_name


def literal(value: object) -> str:
    """Return the literal of an int or str; other types, subclasses included, raise ValueError."""
    if type(value) is not int and type(value) is not str:
        raise ValueError(f"{value!r:.40} has no place in a reader or writer")
    return repr(value)


def identifier(name: object) -> str:
    """A name as an identifier. Raises ValueError unless it is one."""
    if type(name) is not str or not is_name(name) or iskeyword(name):
        raise ValueError(f"{name!r:.40} is no name of a field or type")
    return name
