"""What a wire protocol has to give the gateway: one small pure file a protocol, no I/O. The shell is `calls`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import GatewayError

VERSIONS = "x-clawstream-versions"
VERSION_START = "x-clawstream-version-start"
VERSION_END = "x-clawstream-version-end"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's call. model: None when it named none. body: what is sent to the engine. keep_*: the client asked for it itself."""

    model: str | None
    stream: bool
    n: int
    body: bytes
    keep_logprobs: bool
    keep_ids: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled choice, as far as it came. token_ids, logprobs: None when the engine did not give them. spans: as the engine wrote them."""

    index: int
    message_json: bytes
    finish_reason: str | None
    token_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    spans: object = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole reply. body: for the client, without what we added. prompt_ids: None when the engine did not give them."""

    choices: tuple[Choice, ...]
    prompt_ids: Sequence[int] | None
    model: str | None
    body: bytes


class Stream(Protocol):
    """A reply that is coming in, event by event.

    `feed` returns what may be sent now; from the first finish reason on everything is held. `held` is that, once the steps are durable.
    """

    ended: bool
    """The end marker came: nothing follows."""
    failure: str | None
    """The engine's own error event, or what was wrong with the stream."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the engine, return bytes for the client."""
        ...

    def close(self) -> None:
        """The engine has closed the stream. A failure when it should not have yet."""
        ...

    def fail(self, error: GatewayError) -> None:
        """The stream ends here: an error event is held, and sets `failure`."""
        ...

    def held(self) -> bytes:
        """What was held back, in order."""
        ...

    def sent(self) -> Answer:
        """What the client has got so far, nothing held; body empty."""
        ...

    def whole(self) -> Answer:
        """All that came, the held part too; body empty."""
        ...


class Dialect(Protocol):
    """A wire protocol."""

    name: str
    """As it stands in `Step.protocol`."""
    path: str
    """Where the engine serves it."""

    def request(self, body: bytes) -> Request:
        """Check what the gateway relies on, ask the engine for tokens. Raises BadRequest that names the field."""
        ...

    def answer(self, request: Request, body: bytes, spans: bytes | None) -> Answer:
        """Read a whole reply. spans: the engine's version header. Raises UpstreamFailed when it is none."""
        ...

    def stream(self, request: Request) -> Stream:
        """Begin to read a streamed reply."""
        ...

    def error_event(self, error: GatewayError) -> bytes:
        """The error as an event of a stream."""
        ...
