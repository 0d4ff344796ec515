"""The source of one generated function.

Anyone may announce a schema, and generated source is executed: only the schemas of this package
become source. `clawstream.schemas.codec.foreign` reads all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import Any

from clawstream.schemas.codec.avro_schema import Schema, kind_of


class Source:
    """The lines of one generated function and the constants that they use."""

    def __init__(self, constants: Mapping[str, Any]) -> None:
        self._lines: list[str] = []
        self._constants = dict(constants)
        self._names = count()

    def add(self, depth: int, *lines: str) -> None:
        self._lines += [" " * depth + line for line in lines]

    def name(self) -> str:
        """Return a new name."""
        return f"v{next(self._names)}"

    def constant(self, value: Any) -> str:
        """Return the name of a constant."""
        name = self.name()
        self._constants[name] = value
        return name

    def function(self, name: str, arguments: str) -> Any:
        """Compile the lines to a function."""
        source = "\n".join([f"def {name}({arguments}):", *self._lines])
        exec(compile(source, f"<{name}>", "exec"), self._constants)
        return self._constants[name]


def optional(union: list[Schema]) -> Schema:
    """Return the type of a union of null and a type, the only union of the shipped schemas.

    Raises:
        ValueError: It is another union.
    """
    if len(union) != 2 or union[0] != "null":
        raise ValueError(f"a union of {[kind_of(b) for b in union]} is not compiled")
    return union[1]
