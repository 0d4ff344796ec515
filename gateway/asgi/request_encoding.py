"""Decodes gzip, deflate and zstd request bodies; refuses other encodings.

Decodes gzip and deflate in small chunks, so the reader can enforce its size limit. zstd is decoded
as a whole, at most to that limit: cramjam does not decode a part of a frame.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import MutableMapping
from typing import Any

import cramjam

from clawstream.gateway.asgi.client_disconnect import Receive
from clawstream.gateway.asgi.content_encoding import READABLE, WINDOW_BITS
from clawstream.gateway.asgi.in_flight_limits import InFlightLimits
from clawstream.gateway.errors import BadRequest, BodyTooLarge, WrongEncoding

PIECE = 1 << 16
"""Maximum bytes per decoded chunk."""


class RequestDecoder:
    """Decodes request bodies.

    Args:
        limit: Maximum bytes of a zstd body, compressed and decoded: gateway.max_body_bytes.
        in_flight: Counts a compressed zstd body until it is decoded.
    """

    def __init__(self, limit: int, in_flight: InFlightLimits) -> None:
        self._limit, self._in_flight = limit, in_flight

    def decoded(self, receive: Receive, encoding: str) -> Receive:
        """Wrap `receive` to decode a body with this content-encoding.

        The returned callable raises WrongEncoding for other encodings, BadRequest for corrupt data,
        BodyTooLarge and Overloaded for a zstd body.
        """
        name = encoding.strip().lower()
        if name in ("", "identity"):
            return receive
        if name == "zstd":
            return _Zstd(receive, self._limit, self._in_flight).receive
        return _Decoded(receive, name).receive


class _Zstd:
    def __init__(self, receive: Receive, limit: int, in_flight: InFlightLimits) -> None:
        self._receive, self._limit, self._in_flight = receive, limit, in_flight
        self._ended = False

    async def receive(self) -> MutableMapping[str, Any]:
        if self._ended:
            return await self._receive()
        parts, size, more = [], 0, True
        try:
            while more:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                part, more = message.get("body", b""), message.get("more_body", False)
                if size + len(part) > self._limit:
                    raise self._too_large()
                self._in_flight.reserve(len(part))
                size += len(part)
                parts.append(part)
            body = self._whole(b"".join(parts))
        finally:
            self._in_flight.release(size)
        self._ended = True
        return {"type": "http.request", "body": body, "more_body": False}

    def _whole(self, packed: bytes) -> bytes:
        # The system gives memory only to what is written; a bytearray is written as a whole.
        room = mmap.mmap(-1, self._limit + 1)
        try:
            size = cramjam.zstd.decompress_into(packed, memoryview(room))
        except cramjam.DecompressionError as error:
            if "whole buffer" in str(error):
                raise self._too_large() from error
            raise BadRequest(f"body: not one whole zstd frame: {error}", "body") from error
        if size > self._limit:
            raise self._too_large()
        return room[:size]

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"body: larger than gateway.max_body_bytes={self._limit}", "body")


class _Decoded:
    def __init__(self, receive: Receive, name: str) -> None:
        self._receive, self._name = receive, name
        self._inflater = zlib.decompressobj(WINDOW_BITS) if name in READABLE else None
        self._waiting = b""
        self._whole = self._ended = self._more = False

    async def receive(self) -> MutableMapping[str, Any]:
        name = self._name
        if self._inflater is None:
            raise WrongEncoding(
                f"content-encoding: {name[:40]!r} is not supported, "
                "use gzip, deflate, zstd or no encoding",
                "content-encoding",
            )
        if self._ended:
            return await self._receive()
        while not (self._waiting or self._more or self._whole):
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._waiting, self._whole = (
                message.get("body", b""),
                not message.get("more_body", False),
            )
        try:
            piece = self._inflater.decompress(self._waiting, PIECE)
        except zlib.error as error:
            raise BadRequest(f"body: not {name}: {error}", "body") from error
        self._waiting = self._inflater.unconsumed_tail
        self._more = len(piece) == PIECE
        self._ended = self._whole and not self._waiting and not self._more
        if self._ended and (not self._inflater.eof or self._inflater.unused_data):
            raise BadRequest(f"body: not one whole {name} stream", "body")
        return {"type": "http.request", "body": piece, "more_body": not self._ended}
