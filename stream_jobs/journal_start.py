"""Whether a journal of admission still has its beginning. Reads only."""

from __future__ import annotations

from runtime.kafka import Cluster
from stream_jobs.errors import UnreadableJournal


def first_offset(cluster: Cluster, journal: str) -> int:
    """Where it begins now; 0: it is whole."""
    return cluster.watermarks(journal, [0])[0][0]


def check_whole(cluster: Cluster, journal: str) -> None:
    """Raises UnreadableJournal when decisions at the beginning of a journal are gone: they would be made again."""
    first = first_offset(cluster, journal)
    if first > 0:
        raise UnreadableJournal(
            f"{journal} begins at offset {first}, what was decided before can't be known. Its run has ended and `clawstream "
            "topics trim` was here: take another run_id. Or retention took it from a run that lives: that can't go on either"
        )
