"""Decompresses gzip and deflate bodies up to a size limit. Pure."""

from __future__ import annotations

import zlib

READABLE = frozenset({"gzip", "x-gzip", "deflate"})
WINDOW_BITS = 32 + zlib.MAX_WBITS
"""Accepts the header of gzip or of zlib."""


class TooMuch(ValueError):
    """The decompressed body exceeds the limit."""


class Inflater:
    """Decompresses a body in chunks.

    most: Maximum size of the decompressed body in bytes.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._unpacking = zlib.decompressobj(WINDOW_BITS)

    @property
    def ended(self) -> bool:
        """Tell whether the compressed body is complete."""
        return self._unpacking.eof

    def feed(self, data: bytes) -> bytes:
        """Decompress a chunk.

        Raises:
            TooMuch: The body exceeds the limit.
            ValueError: The data is neither gzip nor deflate.
        """
        try:
            found = self._unpacking.decompress(data, self._left + 1)
            while self._unpacking.eof and self._unpacking.unused_data and len(found) <= self._left:
                data, self._unpacking = self._unpacking.unused_data, zlib.decompressobj(WINDOW_BITS)
                found += self._unpacking.decompress(data, self._left + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"not gzip or deflate: {error}") from error
        self._left -= len(found)
        if self._left < 0:
            raise TooMuch("the decompressed body exceeds the limit")
        return found


def unpacked(body: bytes, most: int) -> bytes:
    """Decompress a complete body. Raises ValueError."""
    inflater = Inflater(most)
    found = inflater.feed(body)
    if not inflater.ended:
        raise ValueError("the compressed body is truncated")
    return found
