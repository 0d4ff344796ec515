"""Encode records in Avro single-object encoding, and decode values of any release.

A value is `C3 01`, the CRC-64-AVRO fingerprint of the writer's schema (8 bytes, little-endian),
then the Avro body (https://avro.apache.org/docs/1.12.0/specification/#single-object-encoding).
Confluent framing (`00`, schema id as big-endian int32, body) is decoded as well, for ids that were
announced to the codec. The schema of a value is a shipped one or one announced on the schemas
topic.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from clawstream.schemas import records
from clawstream.schemas.codec.avro_schema import Schema, check, check_extent, expanded, plain_name
from clawstream.schemas.codec.compiled_reader import MALFORMED, Read, Records, reader_of
from clawstream.schemas.codec.compiled_writer import Write, writer_of
from clawstream.schemas.codec.foreign import MALFORMED_SCHEMA, fingerprint_of, parse
from clawstream.schemas.codec.foreign import reader_of as foreign_reader_of
from clawstream.schemas.errors import Undecodable, UnknownSchema

MAGIC = b"\xc3\x01"
AVRO_DIR = Path(__file__).parents[1] / "avro"
NAMESPACE = "clawstream"
Event = Any  # any class of clawstream.schemas.records; the union of all of them would say no more

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
    records.RolloutBudget,
    records.RunIndex,
    records.WeightVersion,
    records.TrainedTokens,
    records.TrainedTrajectory,
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
            writer.read = lambda data, at: record_from(writer.name, fields_of(data, at))
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


def as_dict(event: Event) -> dict[str, Any]:
    """Return the record as plain dicts and tuples, its bytes as they are."""
    return msgspec.to_builtins(event, builtin_types=(bytes,))  # type: ignore[no-any-return]


def record_from(name: str, plain: Mapping[str, Any]) -> Event:
    """Build a record from plain dicts and lists; unknown fields are ignored.

    Raises:
        ValueError: A field is missing or has a wrong type.
    """
    try:
        return msgspec.convert(plain, getattr(records, name))
    except msgspec.ValidationError as e:
        raise ValueError(str(e)) from e
