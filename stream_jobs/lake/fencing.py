"""Who may write: a writer's share of the lake, and the claims by which newer writers fence older ones. Pure.

A claim is a rise of app ids in a commit to a table. Commits that raise the same app id on one snapshot collide, those that raise
different ones do not, so writers of one layout never meet, and whoever is fenced fails in the very commit that came too late:

- each writer has an app id of its own, which all its commits repeat; the next process of its number raises it;
- the first to claim under another number of writers raises those of all writers of the former layout, whichever app ids theirs are.

`steps` is claimed first. What was decided there holds for all tables, so that of two layouts claimed at once one wins everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from runtime.kafka import Fenced

LAYOUT = "layout"
"""App id whose version is 1,000 times how often the number of writers has changed, and that number. None: one writer, never changed."""
_STRIDE = 1_000
REPAIR = "repair"
"""App id whose version is how often a table was repaired. A writer that finds another one than it claimed reads its topics again."""


class LakeFenced(Fenced):
    """A newer lake writer has claimed this lake. This one must end and must not be restarted."""


class PartitionShare(NamedTuple):
    """Writer `writer` of `writers`, from 0: it takes the partitions p of every topic with p % writers == writer."""

    writer: int = 0
    writers: int = 1

    @property
    def app_id(self) -> str:
        """What this writer's commits raise or repeat."""
        return writer_id(self.writer)

    def partitions(self, count: int) -> range:
        """Its own of a topic's partitions."""
        return range(self.writer, count, self.writers)

    def __str__(self) -> str:
        return f"writer {self.writer} of {self.writers}"


SINGLE_WRITER = PartitionShare()


class Lease(NamedTuple):
    """What a writer has decided at its first table. epoch: its version of its own app id."""

    epoch: int
    layout: int


def writer_id(writer: int) -> str:
    """The app id of a writer, in every layout."""
    return f"writer:{writer}" if writer else "writer"


def acquire_lease(
    share: PartitionShare, lease: Lease | None, version_of: Callable[[str], int | None]
) -> tuple[Lease, dict[str, int]]:
    """What to commit to a table to claim it, on the snapshot that `version_of` asks; and what then holds for the other tables.

    lease: None for the first table. Raises LakeFenced when a newer writer has claimed the table already.
    """
    held, layout = version_of(share.app_id) or 0, version_of(LAYOUT) or 1
    if lease is None:
        same = layout % _STRIDE == share.writers
        lease = Lease(
            held + 1, layout if same else (layout // _STRIDE + 1) * _STRIDE + share.writers
        )
    elif held > lease.epoch or layout > lease.layout:
        raise LakeFenced(
            f"lake: another writer took over from {lease.epoch} ({share}) while it was starting"
        )
    raised: dict[str, int] = {}
    if layout != lease.layout:
        raised = {
            name: (version_of(name) or 0) + 1 for name in map(writer_id, range(layout % _STRIDE))
        }
        raised[LAYOUT] = lease.layout
    return lease, {**raised, share.app_id: lease.epoch}
