"""Read Avro binary as plain tuples: the lake needs columns, and few of a large record."""

from __future__ import annotations

from schemas.codec import compiled_reader
from schemas.codec.avro_schema import Schema
from schemas.codec.compiled_reader import Code, Read


class _Tuples:
    """Build records as tuples of the wanted fields, arrays as lists, maps as lists of pairs."""

    empty, strict = "[]", False

    def record(
        self, code: Code, schema: Schema, depth: int
    ) -> tuple[str, dict[str, str], list[str]]:
        targets = {f["name"]: code.name() for f in schema["fields"]}
        return f"({''.join(f'{t}, ' for t in targets.values())})", targets, []

    def array(self, found: str) -> str:
        return found

    def map(self) -> tuple[str, str]:
        return "[]", "{0}.append(({1}, {2}))"


def reader_of(writer: Schema, wanted: Schema) -> Read:
    """Compile a reader.

    Args:
        writer: `expanded` schema of the bytes.
        wanted: `expanded` schema of the tuples.

    Raises:
        ValueError: the compiled reader does not support the pair.
    """
    return compiled_reader.reader_of(writer, wanted, _Tuples())
