"""Server-sent events on the wire: whole events out of pieces of a stream. Events keep their own bytes, the blank line included."""

from __future__ import annotations

import re

ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""Blank lines."""
_END = re.compile(b"|".join(ENDS))

MAX_EVENT = 8 << 20
"""Bytes: the ids of a prompt of a million tokens fit in."""


class EventSplitter:
    """Feed it pieces of any size; it returns the events that are whole. rest: the event that has begun."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completed, each with its blank line."""
        buffer = self.rest + piece if self.rest else piece
        events, at = [], 0
        # An end may have begun in the last three bytes of what was there before.
        begin = max(0, len(self.rest) - 3)
        if b"\r" in buffer:
            for found in _END.finditer(buffer, begin):
                events.append(buffer[at : found.end()])
                at = found.end()
        else:  # as a rule, and a search for one string costs a fraction of that for a pattern
            end = buffer.find(b"\n\n", begin)
            while end >= 0:
                events.append(buffer[at : end + 2])
                at = end + 2
                end = buffer.find(b"\n\n", at)
        self.rest = buffer[at:]
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment or an event without data. Several data lines are joined, as the standard says."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].rstrip(b"\r\n")
    lines = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
