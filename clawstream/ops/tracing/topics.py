"""The topics that spans come from, read from the positions of the consumer group."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from clawstream.ops.tracing.spans import RecordPlace
from clawstream.runtime.kafka import Cluster, Record, SourceTruncated, Unavailable
from clawstream.runtime.logs import logger
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics

GROUP = "traces"
POLL_RECORDS = 500
POLL_S = 0.2
QUEUE_KB = 16 * 1024
"""Records that are fetched before they are read, in KiB."""
REFRESH_S = 5.0
"""Interval at which new topics are looked for."""
COMMIT_S = 1.0
COMMIT_ALL_S = 3600.0
"""Interval at which positions are committed that did not move: Kafka forgets them after a week."""
FIRST_MS = 3_600_000
"""A group without positions begins so far back, so that running trajectories are whole."""


def followed_topics(topics: Topics, there: Mapping[str, int]) -> list[str]:
    """Return the topics that spans come from. there: Existing topics."""
    wanted = (topics.steps, topics.candidates, topics.weights, topics.workers)
    return [t for t in there if t in wanted or topics.parse_ready_batches(t)]


def first_offset(committed: int | None, low: int, high: int) -> int:
    """Return where to read a partition from.

    Args:
        committed: The group's position; None: the topic is new.
        low, high: First and next offset of the log.
    """
    # A position past the end is that of a deleted topic of the same name.
    return committed if committed is not None and low <= committed <= high else low


class TracedTopics:
    """Reads records of all runs, and commits how far they are exported.

    Raises:
        Unavailable: Kafka does not answer.
    """

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._topics = cluster, settings.kafka.topics
        self.group = f"{settings.kafka.topic_prefix}-{GROUP}"
        self._reader = cluster.reader(
            self.group, {}, queued_max_messages_kbytes=QUEUE_KB, fetch_wait_max_ms=250
        )
        self._ids: dict[str, str] = {}
        self._committed: dict[tuple[str, int], int] = {}
        self._refreshed_at = self._committed_at = self._all_committed_at = float("-inf")
        try:
            self._begin()
            self._follow_new_topics()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Commit where to begin if the group has no position."""
        if self._cluster.committed(self.group):
            return
        since_ms, start = int(time.time() * 1000) - FIRST_MS, dict[tuple[str, int], int]()
        for topic in followed_topics(self._topics, self._cluster.topics()):
            for partition, offset in self._cluster.offsets_at(topic, since_ms).items():
                start[topic, partition] = offset
        logger().info("traces_begin", partitions=len(start), seconds_back=FIRST_MS // 1000)
        while start and not self._cluster.committed(self.group):
            self._reader.commit(start)
            self._reader.poll(1, POLL_S)  # nothing is assigned yet: only the answer is awaited

    def _starts(self, partitions: Mapping[str, int]) -> dict[tuple[str, int], int]:
        committed, start = self._cluster.committed(self.group), dict[tuple[str, int], int]()
        for topic, count in partitions.items():
            for partition, (low, high) in self._cluster.watermarks(topic, range(count)).items():
                position = committed.get((topic, partition))
                start[topic, partition] = first_offset(position, low, high)
                if position is not None and position < low:
                    logger().warning(
                        "traces_lost", topic=topic, partition=partition, records=low - position,
                        reason="removed from the log before their spans were exported",
                    )  # fmt: skip
        return start

    def _follow_new_topics(self) -> None:
        self._refreshed_at = time.monotonic()
        there = self._cluster.topics()
        found = followed_topics(self._topics, there)
        ids = self._cluster.topic_ids([*self._ids, *(t for t in found if t not in self._ids)])
        for topic, topic_id in self._ids.items():
            if ids.get(topic) != topic_id:
                raise SourceTruncated(f"{topic} had id {topic_id} and has it no more")
        if new := {topic: there[topic] for topic in ids if topic not in self._ids}:
            self._reader.add(self._starts(new))
        self._ids = ids

    def poll(self) -> Sequence[Record]:
        """Return the next records; empty after a while without any.

        Raises:
            SourceTruncated: A topic no longer has the position, or was recreated.
        """
        if time.monotonic() - self._refreshed_at >= REFRESH_S:
            try:
                self._follow_new_topics()
            except Unavailable as error:
                logger().warning("traces_wait_for_kafka", error=str(error))
        return self._reader.poll(POLL_RECORDS, POLL_S)

    def place(self, record: Record) -> RecordPlace:
        """Return where a record lies."""
        return RecordPlace(
            record.topic, self._ids[record.topic], record.partition, record.offset,
            record.timestamp_ms,
        )  # fmt: skip

    def commit(self, now: bool = False) -> None:
        """Commit that everything returned by `poll` is exported.

        At most every second, unless `now`.
        """
        if not now and time.monotonic() - self._committed_at < COMMIT_S:
            return
        self._committed_at = time.monotonic()
        if self._committed_at - self._all_committed_at >= COMMIT_ALL_S:
            self._all_committed_at, self._committed = self._committed_at, {}
        positions = self._reader.positions
        moved = {at: o for at, o in positions.items() if self._committed.get(at) != o}
        self._reader.commit(moved)
        self._committed |= moved

    def close(self) -> None:
        """Finish commits in flight, and leave."""
        self._reader.close()
