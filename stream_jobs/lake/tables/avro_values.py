"""Read Avro binary as plain tuples: the lake needs columns, and few of a large record."""

from __future__ import annotations

from typing import Any

from clawstream.schemas.codec import compiled_reader, foreign
from clawstream.schemas.codec.avro_schema import Schema, expanded, plain_name
from clawstream.schemas.codec.compiled_reader import Read
from clawstream.schemas.codec.single_object import shipped
from clawstream.schemas.codec.source import Source
from clawstream.stream_jobs.lake.tables.arrow_columns import tupled


class _Tuples:
    """Build records as tuples of the wanted fields, arrays as lists, maps as lists of pairs."""

    empty = "[]"

    def record(
        self, code: Source, schema: Schema, depth: int
    ) -> tuple[str, dict[str, str], list[str]]:
        targets = {f["name"]: code.name() for f in schema["fields"]}
        return f"({''.join(f'{t}, ' for t in targets.values())})", targets, []

    def array(self, found: str) -> str:
        return found

    def map(self) -> tuple[str, str]:
        return "[]", "{0}.append(({1}, {2}))"


def reader_of(writer: Schema, wanted: Schema) -> Read:
    """Return a reader: compiled for the shipped schema, fastavro's for the others.

    Args:
        writer: `expanded` schema of the bytes.
        wanted: `expanded` schema of the tuples.
    """
    if writer == expanded(shipped(plain_name(wanted["name"]))):
        return compiled_reader.reader_of(writer, wanted, _Tuples())
    fields_of = foreign.reader_of(
        *(foreign.parse(_defined_once(s, set())) for s in (writer, wanted))
    )
    return lambda data, at: tupled(wanted, fields_of(data, at))


def _defined_once(schema: Schema, seen: set[str]) -> Any:
    """Undo `expanded`: replace each further definition of a named type by its name."""
    if isinstance(schema, list):
        return [_defined_once(branch, seen) for branch in schema]
    if not isinstance(schema, dict):
        return schema
    if "name" in schema:
        name = plain_name(schema["name"])
        if name in seen:
            return name
        seen.add(name)
        schema = {**schema, "name": name, "namespace": ""}
    if "fields" in schema:
        fields = [{**f, "type": _defined_once(f["type"], seen)} for f in schema["fields"]]
        return {**schema, "fields": fields}
    inner = {k: _defined_once(schema[k], seen) for k in ("items", "values", "type") if k in schema}
    return {**schema, **inner}
