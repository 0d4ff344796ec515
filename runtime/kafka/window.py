"""A window of a topic: an offset range for each partition, and its records in log time order."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.kafka import Cluster, Reader, Record

POLL_RECORDS = 100
READ_AHEAD_KB = 64 << 10
"""Read-ahead of all partitions in total, in KiB."""
MOST_KB, LEAST_KB = 4096, 64
"""Read ahead of one partition. A record that is larger than that is read all the same."""


class WindowGone(PlumbingError):
    """The topic of a window was recreated, or retention has removed its beginning."""


@dataclass(frozen=True, slots=True)
class Window:
    """Offsets [first, end) of each partition of a topic."""

    topic: str
    topic_id: str
    ranges: Mapping[int, tuple[int, int]]

    @property
    def offsets(self) -> int:
        """How many there are; control records and ticks count."""
        return sum(end - first for first, end in self.ranges.values())

    def as_dict(self) -> dict[str, Any]:
        """For a plan's file."""
        ranges = {str(p): list(r) for p, r in self.ranges.items()}
        return {"topic": self.topic, "topic_id": self.topic_id, "ranges": ranges}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Window:
        """The window of `as_dict`."""
        ranges = {int(p): (first, end) for p, (first, end) in values["ranges"].items()}
        return cls(values["topic"], values["topic_id"], ranges)

    def check(self, cluster: Cluster) -> None:
        """Raises WindowGone unless the topic still has all of it."""
        if cluster.topic_ids([self.topic]).get(self.topic) != self.topic_id:
            raise WindowGone(
                f"{self.topic} was recreated since the window was chosen (it had id "
                f"{self.topic_id})"
            )
        for p, (low, _) in cluster.watermarks(self.topic, self.ranges).items():
            first, end = self.ranges[p]
            if first < end and low > first:
                raise WindowGone(
                    f"{self.topic}-{p} begins at {low}, the window at {first}: retention has "
                    "taken it"
                )


def window_of(
    cluster: Cluster, topic: str, since_ms: int | None = None, until_ms: int | None = None
) -> Window:
    """Everything that a topic has now, or of that only what came in [since, until) by log time."""
    topic_id = cluster.topic_id(topic)
    whole = cluster.watermarks(topic)
    first = cluster.offsets_at(topic, since_ms) if since_ms is not None else {}
    end = cluster.offsets_at(topic, until_ms) if until_ms is not None else {}
    ranges = {
        p: (max(low, first.get(p, low)), max(low, first.get(p, low), min(high, end.get(p, high))))
        for p, (low, high) in whole.items()
    }
    return Window(topic, topic_id, ranges)


class Timed(NamedTuple):
    """A record and its effective time: the running maximum of its partition's timestamps, in ms."""

    time: int
    record: Record


def merge_by_time(cluster: Cluster, windows: Sequence[Window]) -> Iterator[Timed]:
    """Yield all records of the windows by time, then partition, window and offset.

    The order depends only on the logs, and each partition keeps its own order.

    Raises:
        WindowGone: A topic no longer has the window.
        Unavailable: A partition could not be read in time.
    """
    for window in windows:
        window.check(cluster)
    options = read_ahead(
        sum(first < end for window in windows for first, end in window.ranges.values())
    )
    readers: list[Reader] = []
    parts: list[Iterator[tuple[int, int, int, Timed]]] = []
    try:
        for index, window in enumerate(windows):
            for p, (first, end) in sorted(window.ranges.items()):
                if first < end:
                    readers.append(
                        cluster.reader("clawstream-window", {(window.topic, p): first}, **options)
                    )
                    parts.append(_partition(readers[-1], window.topic, p, end, index))
        for _, _, _, timed in heapq.merge(*parts, key=lambda part: part[:3]):
            yield timed
    finally:
        for reader in readers:
            reader.close()


def read_ahead(partitions: int) -> dict[str, int]:
    """Return reader options that divide the read-ahead between `partitions` readers."""
    each = max(LEAST_KB, min(MOST_KB, READ_AHEAD_KB // max(1, partitions)))
    # A fetch begins when the queue is not full, so that a reader holds up to both.
    return {"queued_max_messages_kbytes": each // 2, "fetch_message_max_bytes": each * 512}


def _partition(
    reader: Reader, topic: str, partition: int, end: int, index: int
) -> Iterator[tuple[int, int, int, Timed]]:
    time = 0
    for record in reader.read_until((topic, partition), end, POLL_RECORDS):
        time = max(time, record.timestamp_ms)
        yield time, partition, index, Timed(time, record)
