"""Compute the lease by which a writer owns its share of the lake and fences older writers. Pure.

A lease raises app ids in a commit to a table. Commits that raise the same app id on one snapshot
collide, commits that raise different ones do not. So writers of one layout never collide, and a
fenced writer fails in the commit that came too late:

- each writer has an app id of its own, which all its commits repeat; the next process with the same
  writer number raises it;
- the first writer of a new layout (another number of writers) raises the app ids of all writers of
  the former layout.

The committed offsets alone would not do: a commit that moves an offset on an old snapshot collides,
but nothing says which of two writers is the newer one. Each would find, in another table, that the
other one was there, and both would end. A writer that went on instead would have to read its dedupe
window again, because the other writer's ids are not in it.

`steps` is leased first and its result holds for all tables, so of two layouts that start at once
the same one wins in every table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from clawstream.runtime.kafka import Fenced

LAYOUT = "layout"
"""App id of the layout: version = 1,000 * changes of the number of writers + that number.

A table without it has one writer and has never changed.
"""
_STRIDE = 1_000
REPAIR = "repair"
"""App id whose version counts the repairs of a table.

A writer that finds another version than it leased reads the topics of the table again.
"""


class LakeFenced(Fenced):
    """A newer lake writer has fenced this one, which must end and must not be restarted."""


class PartitionShare(NamedTuple):
    """Writer number `writer` (from 0) of `writers`: partitions p with p % writers == writer."""

    writer: int = 0
    writers: int = 1

    @property
    def app_id(self) -> str:
        """The app id that the commits of this writer raise or repeat."""
        return writer_id(self.writer)

    def partitions(self, count: int) -> range:
        """Return its partitions of a topic that has `count`."""
        return range(self.writer, count, self.writers)

    def __str__(self) -> str:
        return f"writer {self.writer} of {self.writers}"


SINGLE_WRITER = PartitionShare()


class Lease(NamedTuple):
    """The result of leasing the first table.

    epoch: version of the app id of the writer. layout: version of app id `layout`.
    """

    epoch: int
    layout: int


def writer_id(writer: int) -> str:
    """Return the app id of a writer, which is the same in every layout."""
    return f"writer:{writer}" if writer else "writer"


def acquire_lease(
    share: PartitionShare, lease: Lease | None, version_of: Callable[[str], int | None]
) -> tuple[Lease, dict[str, int]]:
    """Compute the app id versions that a commit must raise to lease a table.

    Args:
        lease: result of the first table; None for the first table itself.
        version_of: version of an app id in the snapshot that the commit builds on.

    Returns:
        The lease for the other tables, and app id to version for the commit.

    Raises:
        LakeFenced: a newer writer has leased the table already.
    """
    epoch, layout = version_of(share.app_id) or 0, version_of(LAYOUT) or 1
    if lease is None:
        same = layout % _STRIDE == share.writers
        lease = Lease(
            epoch + 1, layout if same else (layout // _STRIDE + 1) * _STRIDE + share.writers
        )
    elif epoch > lease.epoch or layout > lease.layout:
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
