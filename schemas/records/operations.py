"""Records of `claw.schemas` and `claw.dead-letters`."""

from __future__ import annotations

from dataclasses import dataclass

from clawstream.schemas.records.parts import CreatedAt, Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPublished:
    """An Avro schema, before its first record. Key: fingerprint in hex."""

    fingerprint: str
    """CRC-64-AVRO, 16 hex digits as in the header of a value."""
    name: str
    """Full name of the record."""
    schema_json: str
    """Avro schema."""
    created_at: CreatedAt
    confluent_id: Int32 | None = None
    """Id that a Confluent schema registry gave it; values framed with this id are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be handled, with everything to repair and replay it.

    Key: the original key.
    """

    topic: str
    """Name of the topic that the record was on."""
    topic_id: str
    """Id of that topic."""
    partition: Int32
    """Partition."""
    offset: int
    """Offset."""
    key: bytes | None = None
    """Original key."""
    value: bytes | None = None
    """Original value."""
    timestamp_ms: int
    """The log's timestamp of the record, in milliseconds since the epoch."""
    process: str
    """Process that could not handle it."""
    reason: str
    """undecodable, unknown_schema, unknown_target, invalid, too_large."""
    detail: str
    """Error or traceback."""
    created_at: CreatedAt


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterResolved:
    """The resolution of a dead letter: replayed or dismissed. Key: the dead letter's.

    Written in one transaction with the record that was sent.
    """

    topic: str
    """Name of the topic of the original record. Its position names the dead letter."""
    topic_id: str
    """Id of that topic."""
    partition: Int32
    """Partition."""
    offset: int
    """Offset."""
    action: str
    """replayed: sent again; dismissed: not sent."""
    sent_topic_id: str | None = None
    """Id of the topic, of the same name, that the record was sent to; null: dismissed."""
    sent_partition: Int32 | None = None
    """Partition it was sent to; null: dismissed."""
    sent_offset: int | None = None
    """Its offset there; null: dismissed."""
    by: str
    """Person who did it, user@host."""
    note: str | None = None
    """Why, in their words."""
    created_at: CreatedAt
