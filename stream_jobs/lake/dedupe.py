"""Drop rows that a table has already, by offset and by id within a bounded window. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from clawstream.stream_jobs.lake.tables.table import Row, Table

TopicIdPartition = tuple[str, int]
"""(topic id, partition number): a recreated topic has another id, so its offsets are separate."""
Positions = Mapping[TopicIdPartition, int]
"""The next offset of each partition: all records below it are handled."""


class DedupeWindow:
    """The keys of the newest `size` rows of one table; evicts the oldest."""

    def __init__(self, size: int) -> None:
        self._size = size
        # The front of a plain dict is found by a search past all earlier evictions.
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, digests: Iterable[bytes]) -> None:
        """Add key digests, oldest first."""
        seen, size = self._seen, self._size
        for d in digests:
            seen.pop(d, None)
            seen[d] = None
            if len(seen) > size:
                seen.popitem(last=False)


def digest(key: Iterable[Any]) -> bytes:
    """Return a 16-byte digest of the values of a row's key columns, given in order."""
    return blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()


def drop_duplicates(
    table: Table, rows: Sequence[Row], committed: Positions, window: DedupeWindow
) -> tuple[list[Row], list[bytes]]:
    """Return the rows that the table does not have, and the digests of their keys.

    A row is new if its offset is not below the committed offset of its partition and its key is
    neither in the window nor earlier in `rows`. A table without key columns has no digests.

    Args:
        committed: offsets of the table's snapshot; a partition without one has no rows in it.
    """
    new = [row for row in rows if row[-2] >= committed.get(row[-4:-2], 0)]
    if not table.key:
        return new, []
    found: dict[bytes, Row] = {}
    for row in new:
        key = digest(table.key_of(row))
        if key not in found and key not in window:
            found[key] = row
    return list(found.values()), list(found)
