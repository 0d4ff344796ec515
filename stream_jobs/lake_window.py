"""Which rows of a batch the lake does not have yet: by offset, and by id within a bounded window. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from stream_jobs.lake_tables import Row

Source = tuple[str, int]
"""(topic id, partition): where a position counts."""
Positions = Mapping[Source, int]
"""Source to the next offset: everything below was handled."""


class Window:
    """The keys of the newest rows of one table, at most `size`; the oldest goes first. No key columns: nothing is remembered."""

    def __init__(self, key: tuple[str, ...], size: int) -> None:
        self.key = key
        self._size = size
        self._seen: dict[bytes, None] = {}

    def digest(self, values: Iterable[Any]) -> bytes:
        """16 bytes that stand for a row's key, given the values of the key columns in order."""
        return blake2b("\x1f".join(map(str, values)).encode(), digest_size=16).digest()

    def of(self, row: Row) -> bytes:
        """Digest of a row."""
        return self.digest(row[c] for c in self.key)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, digests: Iterable[bytes]) -> None:
        """Remember keys, oldest first."""
        for d in digests:
            self._seen.pop(d, None)
            self._seen[d] = None
            if len(self._seen) > self._size:
                del self._seen[next(iter(self._seen))]


def fresh(rows: Sequence[Row], marks: Positions, window: Window) -> list[Row]:
    """The rows that the table does not have: offset at or past the mark of their source, key neither in the window nor earlier in `rows`.

    marks: what the table's snapshot says; a source without a mark has nothing in the table.
    """
    out, here = [], set()
    for row in rows:
        if row["kafka_offset"] < marks.get((row["kafka_topic_id"], row["kafka_partition"]), 0):
            continue
        if window.key:
            digest = window.of(row)
            if digest in window or digest in here:
                continue
            here.add(digest)
        out.append(row)
    return out
