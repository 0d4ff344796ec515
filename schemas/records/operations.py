"""Records of `claw.schemas` and `claw.dead-letters`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaPublished:
    """An Avro schema, before its first record. Key: fingerprint in hex."""

    fingerprint: str
    name: str
    schema_json: str
    created_at: int
    confluent_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that could not be handled, with everything to repair and replay it.

    Key: original key.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    key: bytes | None = None
    value: bytes | None = None
    timestamp_ms: int
    process: str
    reason: str
    detail: str
    created_at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterResolved:
    """The resolution of a dead letter: replayed, repaired or dismissed. Key: the dead letter's.

    Written in one transaction with the record that was sent.
    """

    topic: str
    topic_id: str
    partition: int
    offset: int
    action: str
    sent_topic_id: str | None = None
    sent_partition: int | None = None
    sent_offset: int | None = None
    by: str
    note: str | None = None
    created_at: int
