"""Records as they are read, and acknowledgements as they come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import Message


class Record(NamedTuple):
    """One record as read. timestamp_ms: the log's. headers: last value of each name."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes]


class Ack(NamedTuple):
    """Where an acknowledged record lies."""

    partition: int
    offset: int


def record_of(m: Message) -> Record:
    headers = m.headers()
    return Record(
        m.topic(),
        m.partition(),
        m.offset(),
        m.timestamp()[1],
        m.key(),
        m.value(),
        dict(headers) if headers else {},
    )
