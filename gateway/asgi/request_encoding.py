"""Decodes gzip and deflate request bodies; refuses other encodings.

Decodes in small chunks, so the reader can enforce its size limit.
"""

from __future__ import annotations

import zlib
from collections.abc import MutableMapping
from typing import Any

from gateway.asgi.client_disconnect import Receive
from gateway.asgi.content_encoding import READABLE, WINDOW_BITS
from gateway.errors import BadRequest, WrongEncoding

PIECE = 1 << 16
"""Maximum bytes per decoded chunk."""


def decoded(receive: Receive, encoding: str) -> Receive:
    """Wrap `receive` to decode a body with this content-encoding.

    The returned callable raises WrongEncoding for other encodings, BadRequest for corrupt data.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return receive
    return _Decoded(receive, name).receive


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
                "use gzip, deflate or no encoding",
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
