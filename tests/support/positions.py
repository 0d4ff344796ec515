"""Positions that a group has told Kafka, in tests that need them there."""

from __future__ import annotations

import time
from collections.abc import Mapping

from runtime.kafka import Cluster


def tell(
    cluster: Cluster, group: str, positions: Mapping[tuple[str, int], int], timeout_s: float = 180.0
) -> None:
    """Commit as a reader does, until it has landed: a commit is advice, and what has not landed is told again."""
    reader, deadline = cluster.reader(group, {}), time.monotonic() + timeout_s
    while not positions.items() <= cluster.committed(group).items():
        assert time.monotonic() < deadline, (group, positions, cluster.committed(group))
        reader.commit(positions)
        reader.poll(1, 0.1)
    reader.close()
