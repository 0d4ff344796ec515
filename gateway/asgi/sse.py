"""Splits a byte stream into server-sent events.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html. Events keep their bytes,
blank line included.
"""

from __future__ import annotations

import re

ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
"""Blank lines."""
_END = re.compile(b"|".join(ENDS))

MAX_EVENT = 8 << 20
"""Maximum bytes of an event; enough for the ids of a prompt of a million tokens."""


class EventSplitter:
    """Splits chunks of any size into events. rest: Bytes of the incomplete event."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that this chunk completes, each with its blank line."""
        buffer = self.rest + piece if self.rest else piece
        events, at = [], 0
        # A blank line may begin in the last three bytes of the previous chunks.
        begin = max(0, len(self.rest) - 3)
        if b"\r" in buffer:
            for found in _END.finditer(buffer, begin):
                events.append(buffer[at : found.end()])
                at = found.end()
        else:  # the usual case: a string search is much cheaper than a pattern
            end = buffer.find(b"\n\n", begin)
            while end >= 0:
                events.append(buffer[at : end + 2])
                at = end + 2
                end = buffer.find(b"\n\n", at)
        self.rest = buffer[at:]
        return events


def data_of(event: bytes) -> bytes | None:
    """Return the data of an event, its data lines joined by line feeds; None without data."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].rstrip(b"\r\n")
    lines = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None
