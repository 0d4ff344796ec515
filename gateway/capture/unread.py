"""What of a reply the gateway could not read: the client got its bytes all the same, and its steps keep them. Pure.

A step's message then has a field `unread`, a list of `{"reason", "encoding", "bytes", "size_bytes"}`. Bytes that are no UTF-8 are written as
Latin-1, so that nothing is lost and redaction finds what it looks for.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.protocols.reply_fields import dumps

MAX_UNREAD = 4 << 20
"""Bytes kept of a stream's unread events. Of those beyond only the size is known. A plain reply has its own limit."""
MAX_ENTRIES = 256
MAX_REASON = 300
"""Characters."""


class Unread:
    """The unread parts of one reply, in order. False when there is none."""

    __slots__ = ("_entries", "_left", "reason")

    def __init__(self, most: int = MAX_UNREAD) -> None:
        self._entries: list[dict[str, Any]] = []
        self._left = most
        self.reason: str | None = None
        """Of the first one."""

    def __bool__(self) -> bool:
        return self.reason is not None

    def add(self, data: bytes, reason: str) -> None:
        """Keep bytes, as far as there is room."""
        reason = reason[:MAX_REASON]
        self.reason = self.reason or reason
        if len(self._entries) >= MAX_ENTRIES:
            return
        kept, self._left = data[: self._left], max(0, self._left - len(data))
        try:
            text, encoding = kept.decode(), "utf-8"
        except UnicodeDecodeError:
            text, encoding = kept.decode("latin-1"), "latin-1"
        self._entries.append(
            {"reason": reason, "encoding": encoding, "bytes": text, "size_bytes": len(data)}
        )

    def beside(self, message_json: bytes) -> bytes:
        """A step's message with the unread parts in it."""
        message = orjson.loads(message_json)
        return dumps((message if isinstance(message, dict) else {}) | {"unread": self._entries})
