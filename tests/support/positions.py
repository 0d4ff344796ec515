"""Commit consumer group positions for tests that need them."""

from __future__ import annotations

from collections.abc import Mapping

from support.patience import Patience

from clawstream.runtime.kafka import Cluster


def tell(
    cluster: Cluster, group: str, positions: Mapping[tuple[str, int], int], timeout_s: float = 180.0
) -> None:
    """Commit positions as a reader does, and repeat the commit until Kafka has stored it.

    The reader's commits are asynchronous and may be lost, so one commit is not enough.
    """
    reader, patience = cluster.reader(group, {}), Patience()
    while not positions.items() <= cluster.committed(group).items():
        patience.check((group, positions, cluster.committed(group)))
        reader.commit(positions)
        reader.poll(1, 0.1)
    reader.close()
