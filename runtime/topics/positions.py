"""Positions that processes store: where each goes on reading a topic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPosition:
    """Where a process goes on reading.

    process: who reads. place: where it keeps this, e.g. `table steps`. topic: its name; ends in `*` when only the id is known.
    topic_id: the one stored; None: Kafka itself keeps this position and forgets it with the topic. offset: the next one to read.
    flaw: why the position can't be read or gone on from; then the other values say where that was found.
    """

    process: str
    place: str
    topic: str
    topic_id: str | None
    partition: int
    offset: int
    flaw: str | None = None
