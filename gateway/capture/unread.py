"""Keeps the parts of a reply that the gateway could not parse. Pure.

The client gets these bytes unchanged. The message of the step has a field `unread`, a list of
`{"reason", "encoding", "bytes", "size_bytes"}`. Bytes that are not UTF-8 are stored as Latin-1,
which loses nothing and keeps secrets visible to redaction.
"""

from __future__ import annotations

from typing import Any

import orjson

from clawstream.gateway.protocols.reply_fields import dumps

MAX_UNREAD = 4 << 20
"""Bytes kept of the unread events of a stream; beyond them only sizes are kept."""
MAX_ENTRIES = 256
MAX_REASON = 300
"""Characters."""


class Unread:
    """The unread parts of one reply, in order; false when there are none."""

    __slots__ = ("_entries", "_left", "reason")

    def __init__(self, most: int = MAX_UNREAD) -> None:
        self._entries: list[dict[str, Any]] = []
        self._left = most
        self.reason: str | None = None
        """Reason of the first unread part."""

    def __bool__(self) -> bool:
        return self.reason is not None

    def add(self, data: bytes, reason: str) -> None:
        """Add bytes, truncated to the remaining room."""
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
        """Return a step's message with the unread parts added."""
        message = orjson.loads(message_json)
        return dumps((message if isinstance(message, dict) else {}) | {"unread": self._entries})
