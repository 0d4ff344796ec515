"""Encode records in Avro single-object encoding, and decode values of any release.

A value is `C3 01`, the CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian),
then the Avro body (https://avro.apache.org/docs/1.12.0/specification/#single-object-encoding).
Confluent framing (`00`, schema id as big-endian int32, body) is decoded as well, for ids that were
announced to the codec. The schema of a value is a shipped one (current or archived) or one
announced on the schemas topic.
"""

from __future__ import annotations

import json
import struct
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from schemas import records
from schemas.codec.avro_schema import Schema, check, check_extent, expanded, plain_name
from schemas.codec.compiled_reader import MALFORMED, Read, Records, reader_of
from schemas.codec.compiled_writer import Write, writer_of
from schemas.codec.foreign import MALFORMED_SCHEMA, fingerprint_of, parse
from schemas.codec.foreign import reader_of as foreign_reader_of
from schemas.errors import Undecodable, UnknownSchema

MAGIC = b"\xc3\x01"
AVRO_DIR = Path(__file__).parents[1] / "avro"
NAMESPACE = "clawstream"
Event = Any  # any class of schemas.records; the union of all of them would say no more

TOP_LEVEL: tuple[type, ...] = (
    records.Step,
    records.SessionEvent,
    records.Tick,
    records.Reward,
    records.Curation,
    records.Assessment,
    records.AssemblyMarker,
    records.AssemblyDelta,
    records.AssemblySnapshot,
    records.Trajectory,
    records.StepMark,
    records.Candidate,
    records.AdmissionPolicy,
    records.RunEnded,
    records.ReadyBatch,
    records.Refused,
    records.Late,
    records.PolicyApplied,
    records.WeightVersion,
    records.WorkerStatus,
    records.SchemaPublished,
    records.DeadLetter,
    records.DeadLetterResolved,
    records.FailedCall,
)


@cache
def shipped(name: str) -> dict[str, Any]:
    """The current schema of a record, as its file says it."""
    return json.loads((AVRO_DIR / f"{name}.avsc").read_text())  # type: ignore[no-any-return]


@cache
def _compiled_reader(name: str) -> Read:
    schema = expanded(shipped(name))
    return reader_of(schema, schema, _RECORDS)


@cache
def _compiled_writer(name: str) -> Write:
    return writer_of(expanded(shipped(name)))


@cache
def archived() -> tuple[dict[str, Any], ...]:
    """Return every released schema, the current ones included."""
    return tuple(json.loads(p.read_text()) for p in sorted((AVRO_DIR / "archive").glob("*/*.avsc")))


def _record_type(hint: Any) -> type | None:
    """Return the record class in a field type (`X`, `X | None`, `tuple[X, ...]`), or None."""
    for t in typing.get_args(hint) or (hint,):
        if is_dataclass(t):
            return typing.cast(type, t)
    return None


@cache
def _flattener(cls: type) -> Callable[[Any], dict[str, Any]]:
    """A function from the record to the dict that fastavro takes, compiled once for the class."""
    hints = typing.get_type_hints(cls)
    names = tuple(f.name for f in fields(cls))
    get = attrgetter(*names) if len(names) > 1 else lambda v, g=attrgetter(names[0]): (g(v),)
    # fastavro takes a tuple inside a union for (branch, value).
    plain_lists = [
        n for n in names if _is_list(hints[n]) and type(None) in typing.get_args(hints[n])
    ]
    nested = [
        (n, _flattener(r), _is_list(hints[n]))
        for n in names
        if (r := _record_type(hints[n])) is not None
    ]

    def flatten(record: Any) -> dict[str, Any]:
        d = dict(zip(names, get(record), strict=True))
        for name, inner, is_list in nested:
            value = d[name]
            if value:
                d[name] = [inner(v) for v in value] if is_list else inner(value)
        for name in plain_lists:
            if d[name] is not None:
                d[name] = list(d[name])
        return d

    return flatten


@cache
def _builder(cls: type) -> Callable[[dict[str, Any]], Any]:
    """Return a function from fastavro's dict to the record; drops unknown fields, makes tuples."""
    hints = typing.get_type_hints(cls)
    names = frozenset(hints)
    convert: dict[str, Callable[[Any], Any]] = {}
    for name, hint in hints.items():
        inner = _record_type(hint)
        is_list = _is_list(hint)
        if inner is not None:
            build = _builder(inner)
            convert[name] = (lambda b: lambda v: tuple(map(b, v)))(build) if is_list else build
        elif is_list:
            convert[name] = tuple

    def build_record(d: dict[str, Any]) -> Any:
        if d.keys() - names:
            d = {k: v for k, v in d.items() if k in names}
        for name, conv in convert.items():
            if d.get(name) is not None:
                d[name] = conv(d[name])
        return cls(**d)

    return build_record


def _is_list(hint: Any) -> bool:
    if typing.get_origin(hint) is tuple:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_list(a) for a in typing.get_args(hint))
    return False


_RECORDS = Records(partial(getattr, records))


@dataclass(slots=True)
class _Writer:
    """A writer's schema, parsed by fastavro. read: None until first needed."""

    parsed: Schema
    name: str
    read: Read | None = None


class Codec:
    """Encodes records and decodes values with the known writer schemas; `announce` adds one.

    One codec per process.
    """

    def __init__(self) -> None:
        self._writers: dict[bytes, _Writer] = {}
        self._confluent: dict[int, bytes] = {}
        self._current: dict[type, tuple[bytes, Write]] = {}
        self._headers: dict[str, bytes] = {}
        for cls in TOP_LEVEL:
            header = self._headers[cls.__name__] = bytes.fromhex(
                fingerprint_of(shipped(cls.__name__))
            )
            self._current[cls] = (MAGIC + header, _compiled_writer(cls.__name__))
            self._writers[header] = _Writer(shipped(cls.__name__), cls.__name__)
        for schema in archived():
            self.announce(json.dumps(schema))

    def announce(self, schema_json: str, confluent_id: int | None = None) -> str:
        """Register a writer's schema and return its fingerprint in hex.

        Raises:
            Undecodable: It is no record schema, or expands too far. Its records raise
                UnknownSchema.
        """
        try:
            schema = json.loads(schema_json)
            check(schema)
            if not isinstance(schema, dict):
                raise ValueError("not a record")
            if confluent_id is not None and not -(1 << 31) <= confluent_id < 1 << 31:
                raise ValueError(f"an id of {confluent_id}, which has more than 32 bits")
            header = bytes.fromhex(fingerprint_of(schema))
            if header not in self._writers:
                parsed = parse(schema)
                check_extent(parsed)
                self._writers[header] = _Writer(parsed, plain_name(parsed["name"]))
        except MALFORMED_SCHEMA as e:
            raise Undecodable(f"not an Avro record schema: {e}") from e
        if confluent_id is not None:
            self._confluent[confluent_id] = header
        return header.hex()

    def published(self, created_at: int) -> list[records.SchemaPublished]:
        """The current schemas, for the schemas topic. created_at: microseconds."""
        return [
            records.SchemaPublished(
                fingerprint=header.hex(), name=f"{NAMESPACE}.{name}",
                schema_json=json.dumps(shipped(name), separators=(",", ":")), created_at=created_at,
            )
            for name, header in self._headers.items()
        ]  # fmt: skip

    def encode(self, event: Event) -> bytes:
        """Encode a record with its current schema.

        Raises ValueError or TypeError on wrong field types.
        """
        header, write = self._current[type(event)]
        parts = [header]
        try:
            write(event, parts.append)
        except (AttributeError, struct.error, OverflowError) as e:
            raise TypeError(f"a {type(event).__name__} with a field of a wrong type: {e}") from e
        return b"".join(parts)

    def type_name(self, value: bytes) -> str:
        """Return the record name of `value` without decoding it.

        Raises Undecodable or UnknownSchema.
        """
        return self._writer_of(value)[0].name

    def knows(self, value: bytes | None) -> bool:
        """Return whether the writer's schema is known; True for values that name no schema."""
        try:
            return value is None or bool(self._writer_of(value))
        except UnknownSchema:
            return False
        except Undecodable:
            return True

    def is_tick(self, value: bytes | None) -> bool:
        """Whether the record is one, without decoding it. What can't be read is none."""
        try:
            return value is not None and self.type_name(value) == "Tick"
        except (Undecodable, UnknownSchema):
            return False

    def decode(self, value: bytes | None) -> Event:
        """The record in `value`, in today's shape. Raises Undecodable or UnknownSchema."""
        if value is None:
            raise Undecodable("no value (a tombstone) where a record was expected")
        writer, body = self._writer_of(value)
        name = writer.name
        try:
            return (writer.read or self._reader_of(writer))(value, body)
        except MALFORMED as e:
            raise Undecodable(f"not a {name}: {type(e).__name__}: {e}") from e

    def _reader_of(self, writer: _Writer) -> Read:
        """Return the reader of a writer's schema: compiled for the current schemas only."""
        if writer.name not in self._headers:
            raise UnknownSchema(fingerprint_of(writer.parsed))
        if writer is self._writers[self._headers[writer.name]]:
            writer.read = _compiled_reader(writer.name)
        else:
            fields_of = foreign_reader_of(writer.parsed, parse(shipped(writer.name)))
            build = _builder(getattr(records, writer.name))
            writer.read = lambda data, at: build(dict(fields_of(data, at)))
        return writer.read

    def _writer_of(self, value: bytes) -> tuple[_Writer, int]:
        if value[:2] == MAGIC and len(value) >= 10:
            found = self._writers.get(value[2:10])
            if found is None:
                raise UnknownSchema(value[2:10].hex())
            return found, 10
        if value[:1] == b"\x00" and len(value) >= 5:
            (number,) = struct.unpack_from(">i", value, 1)
            header = self._confluent.get(number)
            if header is None:
                raise UnknownSchema(f"confluent id {number}")
            return self._writers[header], 5
        raise Undecodable(
            f"{len(value)} bytes that begin with {value[:10].hex()}: no Avro single-object header"
        )


def as_dict(event: Event) -> Mapping[str, Any]:
    """The record as plain dicts and lists, its bytes as they are."""
    return _flattener(event.__class__)(event)


def record_from(name: str, plain: Mapping[str, Any]) -> Event:
    """Build a record from plain dicts and lists. Raises TypeError for a missing field."""
    return _builder(next(cls for cls in TOP_LEVEL if cls.__name__ == name))(dict(plain))
