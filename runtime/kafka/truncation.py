"""Notices records that retention removed before they were read."""

from __future__ import annotations

from clawstream.runtime.kafka.cluster import Cluster
from clawstream.runtime.kafka.errors import SourceTruncated


def check_truncation(
    cluster: Cluster, topic: str, partition: int, expected: int, came: int
) -> None:
    """Check why offset `came` was delivered instead of `expected` (blocking).

    Control records of transactions also leave gaps, but inside the log. The consumer does not
    report truncation: it continues at the start of the log.

    Raises:
        SourceTruncated: Retention has removed records that were not read.
    """
    low = cluster.watermarks(topic, [partition])[partition][0]
    if low > expected:
        raise SourceTruncated(
            f"source truncated: {topic}-{partition} begins at offset {low}; {expected} was due "
            f"and {came} came: retention took records "
            "that were not read; run clawstream status --positions"
        )
