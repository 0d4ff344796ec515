"""Which rows of a batch the lake does not have yet: by offset, and by id within a bounded window. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from stream_jobs.lake.tables.catalog import Row, Table

TopicIdPartition = tuple[str, int]
"""(topic id, partition): where a position counts."""
Positions = Mapping[TopicIdPartition, int]
"""TopicIdPartition to the next offset: everything below was handled."""


class DedupeWindow:
    """The keys of the newest rows of one table, at most `size`; the oldest goes first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: dict[bytes, None] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, digests: Iterable[bytes]) -> None:
        """Remember keys, oldest first."""
        seen, size = self._seen, self._size
        for d in digests:
            seen.pop(d, None)
            seen[d] = None
            if len(seen) > size:
                del seen[next(iter(seen))]


def digest(key: Iterable[Any]) -> bytes:
    """16 bytes that stand for a row's key, given the values of its columns in order."""
    return blake2b("\x1f".join(map(str, key)).encode(), digest_size=16).digest()


def drop_duplicates(
    table: Table, rows: Sequence[Row], marks: Positions, window: DedupeWindow
) -> tuple[list[Row], list[bytes]]:
    """The rows that the table does not have, and the digests of their keys: offset at or past the mark of their source, key neither in
    the window nor earlier in `rows`. A table without key columns has no digests.

    marks: what the table's snapshot says; a source without a mark has nothing in the table.
    """
    new = [row for row in rows if row[-2] >= marks.get(row[-4:-2], 0)]
    if not table.key:
        return new, []
    found: dict[bytes, Row] = {}
    for row in new:
        one = digest(table.key_of(row))
        if one not in found and one not in window:
            found[one] = row
    return list(found.values()), list(found)
