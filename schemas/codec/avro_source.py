"""What of a schema may become Python source. Schemas come from anybody who can write to the schemas topic, and source is executed. Pure.

Everything of a schema that is written into generated code goes through here; all else is a constant of that code or not in it at all.
"""

from __future__ import annotations

from keyword import iskeyword

from schemas.codec.avro_schema import is_name


def literal(value: object) -> str:
    """A value as a literal. Raises ValueError unless it is a whole number or text, and nothing that only looks like one."""
    if type(value) is not int and type(value) is not str:
        raise ValueError(f"{value!r:.40} has no place in a reader or writer")
    return repr(value)


def identifier(name: object) -> str:
    """A name as an identifier. Raises ValueError unless it is one."""
    if type(name) is not str or not is_name(name) or iskeyword(name):
        raise ValueError(f"{name!r:.40} is no name of a field or type")
    return name
