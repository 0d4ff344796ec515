"""A streamed reply between engine and client, for any protocol. Pure: bytes in, bytes out.

1. Bytes become events; each is read by the protocol's accumulator. Comments of our middleware carry the tokens of the event that follows.
2. Until a choice ends, an event goes out as soon as it came, and only then counts as sent: `sent` is what a client that leaves had got.
3. From the first end on everything is held, until the shell has made the steps durable: `whole`, then `held`.
4. An event that can't be read goes out like any other and is kept in `unread`. Behind an event too long to wait for nothing is
   read any more: the rest of the stream is held, for an end may be in it.
"""

from __future__ import annotations

from typing import Any

from gateway.asgi.sse import ENDS, MAX_EVENT, EventSplitter, data_of
from gateway.capture.engine_tokens import CapturedTokens
from gateway.capture.unread import Unread
from gateway.errors import GatewayError, UpstreamFailed
from gateway.protocols.base import NOT_THE_PROTOCOL, ParsedEvent, ParsedReply, ReplyAccumulator
from schemas import engine_frames

MAX_STREAM = 256 << 20
"""Bytes of a stream: all of it is kept until its steps are recorded."""


class EventStream:
    """ended: the end marker came, nothing follows. failure: the engine's own error event, or what was wrong with the stream.

    capturing: the engine is one whose comments tell tokens; anybody else's are comments.
    """

    def __init__(
        self, accumulator: ReplyAccumulator, captured: CapturedTokens, capturing: bool = True
    ) -> None:
        self._accumulator, self._captured, self._capturing = accumulator, captured, capturing
        self._room = MAX_STREAM
        self._splitter = EventSplitter()
        self._frames: list[bytes] = []  # of the event that comes next
        self._held: list[bytes] = []
        self._unsent: list[tuple[list[bytes], Any]] = []
        self._holding = self._opaque = False
        self.ended = False
        self.failure: str | None = None
        self.unread = Unread()

    def feed(self, piece: bytes) -> bytes:
        """Take bytes from the engine, return bytes for the client."""
        self._room -= len(piece)
        if self._room < 0:
            self.fail(UpstreamFailed(f"the engine's stream is larger than {MAX_STREAM} bytes"))
            return b""
        if self._opaque:
            self.unread.add(piece, "behind an event that is too long")
            self._held.append(piece)
            return b""
        events = self._splitter.feed(piece)
        out = (
            self._event(events[0])
            if len(events) == 1
            else b"".join([self._event(e) for e in events])
        )
        if len(self._splitter.rest) > MAX_EVENT:
            self._give_up()
        return out

    def _give_up(self) -> None:
        """Read no more events."""
        self._opaque = self._holding = True
        rest, self._splitter.rest = self._splitter.rest, b""
        self.unread.add(rest, f"an event of more than {MAX_EVENT} bytes")
        self._held.append(rest)

    def _event(self, event: bytes) -> bytes:
        if self._capturing and engine_frames.is_comment(event):
            self._frames.append(event)
            return b""
        data = data_of(event)
        if data is None or self.ended:
            return self._pass(event)
        try:
            parsed = self._accumulator.read(event, data)
        except NOT_THE_PROTOCOL as error:
            self.unread.add(event, repr(error))
            parsed = ParsedEvent(None, event)
        if parsed.failure is not None:
            self.failure = parsed.failure
        if parsed.ends or parsed.last or parsed.failure is not None:
            self._holding = True
            self.ended = self.ended or parsed.last
        frames, self._frames = self._frames, []  # a list of its own: what waits keeps it
        if self._holding:
            self._unsent.append((frames, parsed.update))
            self._held.append(parsed.client_bytes)
            return b""
        self._add(frames, parsed.update)
        return parsed.client_bytes

    def _add(self, frames: list[bytes], update: Any) -> None:
        for frame in frames:
            self._captured.comment(frame)
        if update is not None:
            try:
                self._accumulator.add(update)
            except NOT_THE_PROTOCOL as error:
                self.unread.add(b"", repr(error))

    def _pass(self, event: bytes) -> bytes:
        if not self._holding:
            return event
        self._held.append(event)
        return b""

    def close(self) -> None:
        """The engine has closed the stream. A failure when it should not have yet."""
        self._take_unsent()
        if self._splitter.rest:
            self._held.append(self._splitter.rest)
        unfinished = self._accumulator.unfinished()
        if self.failure is None and not self.ended and unfinished and not self.unread:
            self.fail(
                UpstreamFailed(
                    f"the engine closed the stream before its end: {unfinished} choices had not ended"
                )
            )

    def fail(self, error: GatewayError) -> None:
        """The stream ends here: an error event is held, and sets `failure`."""
        self.failure, self.ended, self._holding = error.message, True, True
        if self._held and not self._held[-1].endswith(ENDS):
            self._held.append(b"\n\n")  # the engine left an event unfinished
        self._held.append(self._accumulator.error(error))

    def error(self, error: GatewayError) -> bytes:
        """The error as the stream's last event, in place of what is held."""
        return self._accumulator.error(error)

    def held(self) -> bytes:
        """What was held back, in order."""
        return b"".join(self._held)

    def sent(self) -> ParsedReply | None:
        """What the client has got so far, nothing held. None: it cannot be put together, and `unread` says why."""
        try:
            return self._accumulator.reply()
        except NOT_THE_PROTOCOL as error:
            self.unread.add(b"", f"the stream cannot be put together: {error!r}")
            return None

    def whole(self) -> ParsedReply | None:
        """All that came, the held part too. None: it cannot be put together, and `unread` says why."""
        self._take_unsent()
        return self.sent()

    def _take_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._frames:
            unsent.append((self._frames, None))
            self._frames = []
        for frames, update in unsent:
            self._add(frames, update)
