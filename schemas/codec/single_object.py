"""Encode records in Avro single-object encoding, and decode values of any release.

A value is `C3 01`, the CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian),
then the Avro body (https://avro.apache.org/docs/1.12.0/specification/#single-object-encoding).
Confluent framing (`00`, schema id as big-endian int32, body) is decoded as well, for ids that were
announced to the codec. The schema of a value is a shipped one (current or archived) or one
announced on the schemas topic.
"""

from __future__ import annotations

import io
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

import fastavro
from fastavro.schema import fingerprint, to_parsing_canonical_form

from schemas import records
from schemas.codec.avro_schema import Schema, check, check_extent, expanded, plain_name
from schemas.codec.compiled_reader import Read, Records, reader_of
from schemas.codec.compiled_writer import Write, writer_of
from schemas.codec.item_count import check_items
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


def fingerprint_of(schema: Any) -> str:
    """Return the CRC-64-AVRO of the parsing canonical form: 16 hex digits, in header byte order."""
    return fingerprint(to_parsing_canonical_form(schema), "CRC-64-AVRO")  # type: ignore[no-any-return]


@cache
def shipped(name: str) -> dict[str, Any]:
    """The current schema of a record, as its file says it."""
    return json.loads((AVRO_DIR / f"{name}.avsc").read_text())  # type: ignore[no-any-return]


@cache
def archived() -> tuple[dict[str, Any], ...]:
    """Return every released schema, the current ones included."""
    return tuple(json.loads(p.read_text()) for p in sorted((AVRO_DIR / "archive").glob("*/*.avsc")))


def _parse(schema: Any, named: dict[str, Any] | None = None) -> Any:
    """Parse a schema for fastavro, without logical types: times stay integers.

    Fingerprints ignore logical types. `named` collects the types that the schema names.
    """

    def strip(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: strip(v) for k, v in node.items() if k != "logicalType"}
        return [strip(v) for v in node] if isinstance(node, list) else node

    return fastavro.parse_schema(strip(schema), {} if named is None else named)


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


@cache
def _written(cls: type) -> Write:
    return writer_of(shipped(cls.__name__))


_RECORDS = Records(partial(getattr, records))
_PARSED = frozenset(("__fastavro_parsed", "__named_schemas"))
"""By these fastavro knows a schema that it has checked. It would believe anybody's."""


@cache
def _wanted(name: str) -> Schema:
    return expanded(shipped(name))


@cache
def _reading(name: str) -> Read:
    return reader_of(_wanted(name), _wanted(name), _RECORDS)


def _reading_of(writer: Schema, named: Mapping[str, Schema], cls: type) -> Read:
    """Return the reader for a foreign schema; fastavro reads types that the compiler lacks."""
    try:
        return reader_of(expanded(writer), _wanted(cls.__name__), _RECORDS)
    except (ValueError, RecursionError):
        return partial(_by_fastavro, writer, named, _parse(shipped(cls.__name__)), _builder(cls))


def _by_fastavro(
    writer: Schema,
    named: Mapping[str, Schema],
    wanted: Schema,
    build: Callable[[Any], Any],
    data: bytes,
    at: int,
) -> Any:
    check_items(writer, named, data, at)
    stream = io.BytesIO(data)
    stream.seek(at)
    record = build(fastavro.schemaless_reader(stream, writer, wanted))
    if stream.tell() != len(data):
        raise ValueError(f"the record ends at byte {stream.tell()} of {len(data)}")
    return record


@dataclass(slots=True)
class _Writer:
    """A writer's schema. read: None until first needed, and for names without a record class."""

    parsed: Schema
    named: Mapping[str, Schema]
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
            schema = shipped(cls.__name__)
            header = self._headers[cls.__name__] = bytes.fromhex(fingerprint_of(schema))
            self._current[cls] = (MAGIC + header, _written(cls))
            self._writers[header] = _Writer(schema, {}, cls.__name__)
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
            if not isinstance(schema, dict) or schema.keys() & _PARSED:
                raise ValueError("no record, or one that says that it is parsed")
            if confluent_id is not None and not -(1 << 31) <= confluent_id < 1 << 31:
                raise ValueError(f"an id of {confluent_id}, which has more than 32 bits")
            header = bytes.fromhex(fingerprint_of(schema))
            if header not in self._writers:
                named: dict[str, Schema] = {}
                parsed = _parse(schema, named)
                check_extent(parsed)
                self._writers[header] = _Writer(parsed, named, plain_name(parsed["name"]))
        except (
            *(ValueError, TypeError, KeyError, OverflowError, RecursionError),
            fastavro.schema.SchemaParseException,
        ) as e:
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
            return (writer.read or self._reading(writer))(value, body)
        except (
            *(EOFError, ValueError, TypeError, IndexError, KeyError, OverflowError),
            *(struct.error, RecursionError),
        ) as e:
            raise Undecodable(f"not a {name}: {type(e).__name__}: {e}") from e
        except fastavro.read.SchemaResolutionError as e:
            raise Undecodable(f"a {name} whose schema can't be read as today's: {e}") from e

    def _reading(self, writer: _Writer) -> Read:
        if writer.name not in self._headers:
            raise UnknownSchema(fingerprint_of(writer.parsed))
        current = self._writers[self._headers[writer.name]]
        writer.read = (
            _reading(writer.name)
            if writer is current
            else _reading_of(writer.parsed, writer.named, getattr(records, writer.name))
        )
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
