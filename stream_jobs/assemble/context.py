"""What the partitions of a worker share, and the topics at the start of an owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clawstream.runtime.kafka import Cluster, Producer
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.state.trajectories import STEPS, SourceTopic

SLICE_BYTES = 32 << 20
"""Payload and candidates in memory at once, bytes. A single trajectory is never split."""


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """Dependencies shared by the partitions of a worker. cache_bytes: per partition. slice_bytes:
    see `SLICE_BYTES`.
    """

    cluster: Cluster
    producer: Producer
    decoder: Decoder
    topics: Topics
    limits: Limits
    worker: str
    cache_bytes: int
    snapshot_min_bytes: int
    slice_bytes: int = SLICE_BYTES

    def input(self, source: SourceTopic) -> str:
        """Return the topic of an input."""
        return self.topics.steps if source == STEPS else self.topics.rewards


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """The topics at the start of an owner: ids by name, and (first, end) offsets of the partition
    by topic name.
    """

    topic_ids: Mapping[str, str]
    watermarks: Mapping[str, tuple[int, int]]
