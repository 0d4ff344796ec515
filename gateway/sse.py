"""Server-sent events on the wire: whole events out of pieces of a stream. Events keep their own bytes, the blank line included."""

from __future__ import annotations

import re

_END = re.compile(rb"\r\n\r\n|\n\n")


MAX_EVENT = 8 << 20
"""Bytes: the ids of a prompt of a million tokens fit in."""


class Splitter:
    """Feed it pieces of any size; it returns the events that are whole. Raises ValueError when one never ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completed, each with its blank line."""
        buffer = self._rest + piece if self._rest else piece
        events, at = [], 0
        # An end may have begun in the last three bytes of what was there before.
        for end in _END.finditer(buffer, max(0, len(self._rest) - 3)):
            events.append(buffer[at : end.end()])
            at = end.end()
        self._rest = buffer[at:]
        if len(self._rest) > MAX_EVENT:
            raise ValueError(f"an event of more than {MAX_EVENT} bytes")
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None for a comment or an event without data. Several data lines are joined, as the standard says."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event.rstrip(b"\r\n")):
        return event[6:].rstrip(b"\r\n")
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
