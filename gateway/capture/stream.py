"""Relays a streamed reply from engine to client, for any protocol. Pure: bytes in, bytes out.

1. Split the bytes into events; the accumulator of the protocol parses each one. SSE comments of our
   middleware carry the tokens of the next event.
2. Forward each event at once and add it to the accumulator. `sent` is the reply that a
   disconnecting client has received.
3. Hold an event in which a choice ends, and all that follow it, until one brings more of a message:
   some providers name a finish reason in every chunk, and one choice ends before another. The last
   of these events, the end marker and an error are held until the caller makes the steps durable:
   `whole`, then `held`. So the client never has the end of a reply before its steps are durable.
4. Forward an unreadable event like any other; keep it in `unread`. After an oversized event, stop
   parsing and hold the rest of the stream, because it may contain the end of a choice. An event of
   an unknown type is kept in `unread`, too, unless the end of the stream repeats the whole reply.
"""

from __future__ import annotations

from typing import Any

from clawstream.gateway.asgi.sse import DONE, ENDS, MAX_EVENT, EventSplitter, data_of
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.unread import Unread
from clawstream.gateway.errors import GatewayError, UpstreamFailed
from clawstream.gateway.protocols.adapter import ReplyAccumulator
from clawstream.gateway.protocols.base import NOT_THE_PROTOCOL, ParsedEvent, ParsedReply
from clawstream.gateway.protocols.reply_fields import EngineError, named_error
from clawstream.schemas import engine_frames

MAX_STREAM = 256 << 20
"""Maximum bytes of a stream, which is kept until its steps are recorded."""


class EventStream:
    """State of one relayed stream.

    Attributes:
        ended: The end marker has arrived.
        failure: The engine's error event, or an error of the stream.

    Args:
        capturing: SSE comments of the engine carry tokens. Otherwise comments are forwarded.
    """

    def __init__(
        self, accumulator: ReplyAccumulator, captured: CapturedTokens, capturing: bool = True
    ) -> None:
        self._accumulator, self._captured, self._capturing = accumulator, captured, capturing
        self._room = MAX_STREAM
        self._splitter = EventSplitter()
        self._frames: list[bytes] = []  # of the next event
        self._held: list[bytes] = []
        self._unsent: list[tuple[list[bytes], Any]] = []
        self._choice_ended = self._holding = self._opaque = self._unparsed = False
        self._unknown: list[tuple[bytes, str]] = []
        self.ended = False
        self.failure: EngineError | GatewayError | None = None
        self.unread = Unread()

    def feed(self, piece: bytes) -> bytes:
        """Process bytes from the engine; return bytes for the client."""
        self._room -= len(piece)
        if self._room < 0:
            self.fail(UpstreamFailed(f"the engine's stream is larger than {MAX_STREAM} bytes"))
            return b""
        if self._opaque:
            self.unread.add(piece, "after an oversized event")
            self._held.append(piece)
            return b""
        events = self._splitter.feed(piece)
        out = (
            self._event(events[0])
            if len(events) == 1
            else b"".join([self._event(e) for e in events])
        )
        if self._splitter.size > MAX_EVENT:
            self._stop_parsing()
        return out

    def _stop_parsing(self) -> None:
        """Stop parsing events after an oversized one."""
        self._opaque = self._holding = self._unparsed = True
        rest = self._splitter.take()
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
            parsed = ParsedEvent(None, event)
            if (failure := named_error(event, data)) is None:
                self.unread.add(event, repr(error))
                self._unparsed = True
        else:
            failure = parsed.failure or named_error(event, data)
        if failure is not None:
            self.failure = failure
        elif parsed.unknown is not None:
            self._unknown.append((event, parsed.unknown))
        out = b""
        if parsed.last or failure is not None:
            self._holding = True
            self.ended = self.ended or parsed.last
        elif self._choice_ended and not self._holding and self._goes_on(parsed):
            out = self._release()
        self._choice_ended = self._choice_ended or parsed.ends
        frames, self._frames = self._frames, []  # a new list: held events keep the old one
        if self._holding or self._choice_ended:
            self._unsent.append((frames, parsed.update))
            self._held.append(parsed.client_bytes)
            return out
        self._add(frames, parsed.update)
        return out + parsed.client_bytes if out else parsed.client_bytes

    def _goes_on(self, parsed: ParsedEvent) -> bool:
        return parsed.update is not None and self._accumulator.has_content(parsed.update)

    def _release(self) -> bytes:
        """Return the events that were held since a choice ended."""
        frames, self._frames = self._frames, []  # those of the event that goes on
        self._add_unsent()
        self._frames, self._choice_ended = frames, False
        held, self._held = self._held, []
        return b"".join(held)

    def _add(self, frames: list[bytes], update: Any) -> None:
        for frame in frames:
            self._captured.comment(frame)
        if update is not None:
            try:
                self._accumulator.add(update)
            except NOT_THE_PROTOCOL as error:
                self.unread.add(b"", repr(error))

    def _pass(self, event: bytes) -> bytes:
        if not (self._holding or self._choice_ended):
            return event
        self._held.append(event)
        return b""

    def close(self) -> None:
        """Handle the end of the stream; a failure when choices have not ended."""
        self._add_unsent()
        if rest := self._splitter.take():
            self._held.append(rest)
            if data_of(rest) not in (None, DONE):  # clients ignore an event without a blank line
                self._unknown.append((rest, "an event that is not complete"))
        unfinished = self._accumulator.unfinished()
        if self.failure is None and not self.ended and unfinished and not self._unparsed:
            self.fail(
                UpstreamFailed(
                    f"the engine closed the stream too early: {unfinished} choices had not ended"
                )
            )

    def fail(self, error: GatewayError) -> None:
        """End the stream with an error event, which is held, and set `failure`."""
        self.failure, self.ended, self._holding = error, True, True
        if self._held and not self._held[-1].endswith(ENDS):
            self._held.append(b"\n\n")  # complete the engine's partial event
        self._held.append(self._accumulator.error(error))

    def error(self, error: GatewayError) -> bytes:
        """Format an error as the last event, instead of the held events."""
        return self._accumulator.error(error)

    def held(self) -> bytes:
        """Return the held events."""
        return b"".join(self._held)

    def sent(self) -> ParsedReply | None:
        """Return the reply forwarded so far; None when it cannot be assembled (see `unread`)."""
        if not self._accumulator.whole:
            for event, reason in self._unknown:
                self.unread.add(event, reason)
        self._unknown.clear()
        try:
            return self._accumulator.reply()
        except NOT_THE_PROTOCOL as error:
            self.unread.add(b"", f"the stream cannot be assembled: {error!r}")
            return None

    def whole(self) -> ParsedReply | None:
        """Return the complete reply, held events included; None when it cannot be assembled."""
        self._add_unsent()
        return self.sent()

    def _add_unsent(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._frames:
            unsent.append((self._frames, None))
            self._frames = []
        for frames, update in unsent:
            self._add(frames, update)
