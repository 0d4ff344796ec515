"""Write to topics that have no other writer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.kafka import Cluster, Producer

FLUSH_BYTES = 32 << 20
FLUSH_RECORDS = 20_000


class NotSoleWriter(PlumbingError):
    """The topics differ from what was written: another process writes to them."""


class TopicWriter:
    """Writes records with a bounded number in flight and counts offsets as the only writer."""

    def __init__(self, cluster: Cluster) -> None:
        self._producer: Producer = cluster.producer()
        self._cluster = cluster
        self.ends: Counter[tuple[str, int]] = Counter()
        """Next offset of each partition written to."""
        self._bytes = self._records = 0

    def put(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, time: int,
        headers: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Write a record."""
        self._producer.put(topic, key, value, headers, partition, time)
        self.ends[topic, partition] += 1
        self._bytes, self._records = self._bytes + len(value or b""), self._records + 1
        if self._bytes > FLUSH_BYTES or self._records > FLUSH_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Wait until everything is acknowledged."""
        self._producer.flush()
        self._bytes = self._records = 0

    def close(self) -> None:
        """Flush; raise NotSoleWriter unless the topics hold exactly the written records."""
        self.flush()
        self._producer.close()
        for topic in {t for t, _ in self.ends}:
            for partition, (low, high) in self._cluster.watermarks(topic).items():
                if (low, high) != (0, self.ends[topic, partition]):
                    raise NotSoleWriter(
                        f"{topic}-{partition} holds offsets {low} to {high - 1}, not "
                        f"{self.ends[topic, partition]} records"
                    )
