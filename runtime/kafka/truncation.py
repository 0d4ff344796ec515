"""Notices records that retention removed before they were read."""

from __future__ import annotations

from runtime.kafka.cluster import Cluster
from runtime.kafka.errors import SourceTruncated


def check_truncation(
    cluster: Cluster, topic: str, partition: int, expected: int, came: int
) -> None:
    """Offset `came` was delivered where `expected` was due (blocking). Raises SourceTruncated when retention took what was due.

    Control records of transactions leave holes, too: those lie where the log still has its place. The consumer says nothing: out of
    the log's range it goes on at the log's start.
    """
    low = cluster.watermarks(topic, [partition])[partition][0]
    if low > expected:
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} begins at offset {low}; {expected} was due and {came} came: retention took records "
            "that were not read; run clawstream doctor"
        )
