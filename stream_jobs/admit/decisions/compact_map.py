"""Three whole numbers by name, for tens of millions of names, in a fifth of what a dict of tuples
takes.

No I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b

BUCKETS = 1 << 15
"""More take more memory below some millions of names, for small objects are rounded up; fewer take
longer to search above.
"""
CHUNK = 256
"""Buckets that are written at once."""
_KEY_BYTES = 14
_ENTRY = struct.Struct("<14sqqi")
_VALUES = struct.Struct("<qqi")
_LENGTHS = struct.Struct(f"<{BUCKETS}I")
WIDTH = _ENTRY.size
LARGEST_THIRD = (1 << 31) - 1

Values = tuple[int, int, int]
"""Two of 64 bits, one of 32, all signed."""


class CompactMap:
    """A name is known by 127 bits of its BLAKE2b: two that are alike are not met in any run.

    It can't be found out from them.

    15 bits of the hash choose a bucket, which is entries of 34 bytes one behind the other, searched
    by `bytes.find`. Nothing is ever built anew, so there is no pause; and as buckets are immutable,
    a list of them is a picture of one moment.
    """

    def __init__(self, buckets: list[bytes] | None = None) -> None:
        self._buckets = [b""] * BUCKETS if buckets is None else buckets
        self._count = 0 if buckets is None else sum(map(len, buckets)) // WIDTH

    def __len__(self) -> int:
        return self._count

    def get(self, name: str) -> Values | None:
        """The numbers of a name."""
        number, key = _place(name)
        bucket = self._buckets[number]
        at = _find(bucket, key)
        if at < 0:
            return None
        first, second, third = _VALUES.unpack_from(bucket, at + _KEY_BYTES)
        return first, second, third

    def put(self, name: str, values: Values) -> None:
        """Set the numbers of a name. Raises struct.error when one is too large."""
        number, key = _place(name)
        bucket, entry = self._buckets[number], _ENTRY.pack(key, *values)
        at = _find(bucket, key)
        if at < 0:
            self._buckets[number] = bucket + entry
            self._count += 1
        else:
            self._buckets[number] = bucket[:at] + entry + bucket[at + WIDTH :]

    def discard(self, name: str) -> None:
        """Forget a name; no effect on one that is not there."""
        number, key = _place(name)
        bucket = self._buckets[number]
        at = _find(bucket, key)
        if at >= 0:
            self._buckets[number] = bucket[:at] + bucket[at + WIDTH :]
            self._count -= 1

    def copy(self) -> CompactMap:
        """As it is now, whatever is put into this one later. Costs half a millisecond."""
        twin = CompactMap.__new__(CompactMap)
        twin._buckets, twin._count = self._buckets.copy(), self._count
        return twin

    def chunks(self) -> Iterator[bytes]:
        """All of it as bytes, for `of_bytes`: the length of each bucket, then the buckets."""
        yield _LENGTHS.pack(*map(len, self._buckets))
        for first in range(0, BUCKETS, CHUNK):
            yield b"".join(self._buckets[first : first + CHUNK])

    @classmethod
    def of_bytes(cls, data: memoryview) -> tuple[CompactMap, memoryview]:
        """What `chunks` gave, and what follows it.

        Raises struct.error or ValueError when it is not all there.
        """
        buckets, at = list[bytes](), _LENGTHS.size
        for length in _LENGTHS.unpack_from(data):
            buckets.append(bytes(data[at : at + length]) if length else b"")
            at += length
        if at > len(data):
            raise ValueError(f"{at} bytes of packed numbers, {len(data)} are there")
        return cls(buckets), data[at:]


def _place(name: str) -> tuple[int, bytes]:
    """Its bucket, and its key there."""
    digest = blake2b(name.encode(), digest_size=16).digest()
    return (digest[0] | digest[1] << 8) % BUCKETS, digest[2:]


def _find(bucket: bytes, key: bytes) -> int:
    """Where the entry of a key begins; -1 when there is none.

    What only looks like the key lies across two entries or in the numbers.
    """
    at = bucket.find(key)
    while at > 0 and at % WIDTH:
        at = bucket.find(key, at + 1)
    return at
