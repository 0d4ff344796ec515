"""Positions that processes store: where each goes on reading a topic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Where a process resumes reading.

    process: The reader. place: Where the position is stored, e.g. `table steps`. topic: Its name;
    ends in `*` when only the id is known. topic_id: The stored id; None when Kafka itself stores
    the position and deletes it with the topic. offset: The next offset to read. error: Why the
    position is unreadable or unusable; the other values then say where it was found.
    """

    process: str
    place: str
    topic: str
    topic_id: str | None
    partition: int
    offset: int
    error: str | None = None
