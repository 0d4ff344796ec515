"""Write marks to `claw.rewards`, and remember them until the lake has them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from clawstream.inspector.errors import LogAbsent
from clawstream.inspector.marks.mark import Event
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import publish_schemas
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.topics import Topics

KEPT = 20_000
"""Newest events that pages show although the lake may not have them yet."""
TARGETS_MAX = 10_000
"""Most targets of one mark: all its events are remembered."""
ACKNOWLEDGED_S = 10.0
"""Longest wait of a page for Kafka."""


class Producer(Protocol):
    """The part of `clawstream.runtime.kafka.Producer` that is used here."""

    def put(self, topic: str, key: bytes | None, value: bytes | None) -> None: ...

    def flush(self, timeout_s: float = ...) -> None: ...


class MarkWriter:
    """Writes the marks of one process. Thread-safe.

    Args:
        topic: `claw.rewards`.
        connect: Returns a producer; called at the first mark.
        connected: Whether a broker answers.
    """

    def __init__(
        self, topic: str, connect: Callable[[], Producer], connected: Callable[[], bool]
    ) -> None:
        self._topic, self._connect, self.connected = topic, connect, connected
        self._producer: Producer | None = None
        self._codec, self._lock = Codec(), threading.Lock()
        self._written: deque[Event] = deque(maxlen=KEPT)

    def write(self, events: Sequence[Event]) -> None:
        """Write events; all are durable on return.

        Raises:
            LogAbsent: No broker answers; nothing was written.
            Unavailable: A broker did not acknowledge in time; some may be written.
        """
        if not self.connected():
            raise LogAbsent("marks need Kafka, which does not answer: this inspector only reads")
        with self._lock:
            self._producer = self._producer or self._connect()
            for event in events:
                key = event.trajectory_key.encode()
                self._producer.put(self._topic, key, self._codec.encode(event))
            self._producer.flush(ACKNOWLEDGED_S)
            self._written.extend(events)

    def written(self, run_id: str | None = None, keys: Iterable[str] = ()) -> list[Event]:
        """Return the newest events in order: all of them, or those of trajectory keys of a run."""
        with self._lock:
            found = list(self._written)
        wanted = set(keys)
        return [
            e
            for e in found
            if run_id is None or (e.run_id == run_id and e.trajectory_key in wanted)
        ]

    def forget(self, event_ids: Collection[str]) -> None:
        """Forget events that the lake has: an erasure reaches them there."""
        with self._lock:
            left = [event for event in self._written if event.event_id not in event_ids]
            self._written = deque(left, maxlen=KEPT)


def producer_of(cluster: Cluster, topics: Topics) -> Callable[[], Producer]:
    """Return what connects a `MarkWriter`. It raises Unavailable when no broker answers."""

    def connect() -> Producer:
        publish_schemas(cluster, topics.schemas)
        return cluster.producer()

    return connect
