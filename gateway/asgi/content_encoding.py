"""Compressed bodies, as far as the standard library reads them. Pure. What is larger than a limit is no body to hold in memory."""

from __future__ import annotations

import zlib

READABLE = frozenset({"gzip", "x-gzip", "deflate"})
_EITHER = 32 + zlib.MAX_WBITS
"""With gzip's header or zlib's."""


class TooMuch(ValueError):
    """The body is larger than the limit when it is unpacked."""


class Inflater:
    """Unpacks a body that comes in pieces. most: bytes of the whole. Raises ValueError: TooMuch, or for what is not so packed."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._unpacking = zlib.decompressobj(_EITHER)

    @property
    def ended(self) -> bool:
        """Whether the packed body is whole."""
        return self._unpacking.eof

    def feed(self, data: bytes) -> bytes:
        """What a piece adds."""
        try:
            found = self._unpacking.decompress(data, self._left + 1)
            while self._unpacking.eof and self._unpacking.unused_data and len(found) <= self._left:
                data, self._unpacking = self._unpacking.unused_data, zlib.decompressobj(_EITHER)
                found += self._unpacking.decompress(data, self._left + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"not gzip or deflate: {error}") from error
        self._left -= len(found)
        if self._left < 0:
            raise TooMuch("the body is larger than the limit when it is unpacked")
        return found


def unpacked(body: bytes, most: int) -> bytes:
    """A whole body. Raises ValueError."""
    inflater = Inflater(most)
    found = inflater.feed(body)
    if not inflater.ended:
        raise ValueError("the packed body ends too early")
    return found
