"""Splits a byte stream into server-sent events.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. Events keep their bytes,
blank line included.
"""

from __future__ import annotations

import codecs
import re

ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""Blank lines."""
_END = re.compile(b"|".join(ENDS))

DONE = b"[DONE]"
"""Data of the event that ends a stream of OpenAI's protocols."""
TAIL = len(b"\r\n\r\n") - 1
MAX_EVENT = 8 << 20
"""Maximum bytes of an event; enough for the ids of a prompt of a million tokens."""
FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
LONGEST_FIELD = max(map(len, FIELDS))


def begins_events(start: bytes) -> bool:
    """Return whether a body that starts with these bytes is a stream of events."""
    return start.lstrip(b"\r\n").startswith(FIELDS)


class EventSplitter:
    """Splits chunks of any size into events. size: Bytes of the incomplete event."""

    __slots__ = ("_rest", "_tail", "size")

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._tail = b""  # the last bytes of the rest, where a blank line may begin
        self.size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that this chunk completes, each with its blank line."""
        if not self._rest:
            return self._split(piece)
        new = self._tail + piece
        if b"\n\n" not in new and (b"\r" not in new or _END.search(new) is None):
            # Join nothing before the event is complete: its pieces may be many.
            self._keep(piece)
            return []
        return self._split(self.take() + piece)

    def take(self) -> bytes:
        """Remove and return the incomplete event."""
        rest, self._rest, self._tail, self.size = b"".join(self._rest), [], b"", 0
        return rest

    def _split(self, buffer: bytes) -> list[bytes]:
        events, at = [], 0
        if b"\r" in buffer:
            for found in _END.finditer(buffer):
                events.append(buffer[at : found.end()])
                at = found.end()
        else:  # the usual case: a string search is much cheaper than a pattern
            end = buffer.find(b"\n\n")
            while end >= 0:
                events.append(buffer[at : end + 2])
                at = end + 2
                end = buffer.find(b"\n\n", at)
        if at < len(buffer):
            self._keep(buffer[at:])
        return events

    def _keep(self, piece: bytes) -> None:
        self._rest.append(piece)
        self._tail = (self._tail + piece[-TAIL:])[-TAIL:]
        self.size += len(piece)


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event, its data lines joined by line feeds; None without data."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].rstrip(b"\r\n")
    # A stream may begin with a byte order mark.
    found = event.removeprefix(codecs.BOM_UTF8).splitlines()
    lines = [line[5:].removeprefix(b" ") for line in found if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
