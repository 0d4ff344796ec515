"""What a wire protocol has to give the gateway: one small pure file a protocol, no I/O. The shell is `calls`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from gateway.asgi.error_replies import ErrorFormat
from gateway.errors import GatewayError
from schemas.records import Usage, VersionSpan

NOT_THE_PROTOCOL = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What reading a reply raises that is not what its protocol says."""

EngineKind = Literal["captured", "vllm", "text"]
"""What an engine can tell of its tokens.

captured: it runs our middleware (`schemas.engine_frames`), which tells ids, log-probabilities and version spans beside the reply of any
endpoint; requests and replies go through as they are. vllm: a vLLM without it, asked for ids and log-probabilities in the request
where its protocol has fields for that. text: any other provider; no tokens.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one choice, packed as in `Step`. absent: why ids or log-probabilities are missing."""

    prompt_ids: bytes | None = None
    ids: bytes | None = None
    logprobs: bytes | None = None
    spans: tuple[VersionSpan, ...] = ()
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A client's call. model: None when it named none. n: choices it will get, of all its prompts. body: its own bytes; payload: what they say."""

    model: str | None
    stream: bool
    n: int
    body: bytes
    payload: Mapping[str, Any]
    prompts: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled choice, as far as it came.

    message_json: the assistant's message in the protocol's own shape. finish_reason: in OpenAI's words (stop, length, tool_calls,
    content_filter, abort), whatever the protocol's; None: it did not end. tokens: None when the reply itself does not tell them.
    """

    index: int
    message_json: bytes
    finish_reason: str | None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A whole reply. body: for the client, without what we added; empty for a stream.

    unread: why the reply could not be read; the body is the engine's. failure: the engine's own error, told with a status of 200.
    usage: what the reply says of it.
    """

    choices: tuple[Choice, ...]
    model: str | None
    body: bytes
    unread: str | None = None
    failure: str | None = None
    usage: Usage | None = None


class ParsedEvent(NamedTuple):
    """One event of a stream, read.

    update: for `ReplyAccumulator.add`; None: nothing to add. shown: what the client gets of it. ends: a choice has ended, this event and all
    behind it wait for the steps to be durable. last: nothing follows. failure: the engine's own error.
    """

    update: Any
    client_bytes: bytes
    ends: bool = False
    last: bool = False
    failure: str | None = None


class ReplyAccumulator(Protocol):
    """A streamed reply, growing. What was read is added when it is sent."""

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        """Parse an event. event: its bytes with the blank line; data: its data. Pure.

        Raises one of NOT_THE_PROTOCOL when it is not what the protocol says.
        """
        ...

    def add(self, update: Any) -> None:
        """Add an update into the reply."""
        ...

    def reply(self) -> ParsedReply:
        """What was added so far."""
        ...

    def error(self, error: GatewayError) -> bytes:
        """The error as the next event of this stream."""
        ...

    def unfinished(self) -> int:
        """How many choices have not ended yet."""
        ...


class ProtocolAdapter(Protocol):
    """A wire protocol."""

    name: str
    """As it stands in `Step.protocol`."""
    path: str
    """Where the engine serves it."""
    errors: ErrorFormat

    def parse_request(self, body: bytes) -> Request:
        """Check what the gateway relies on. Raises BadRequest that names the field."""
        ...

    def engine_body(self, request: Request, kind: EngineKind) -> bytes:
        """What an engine of this kind is sent. The client's own bytes unless it must be asked for tokens."""
        ...

    def parse_reply(self, request: Request, kind: EngineKind, body: bytes) -> ParsedReply:
        """Read a whole reply. One that can't be read passes on as it is, and says so."""
        ...

    def accumulator(self, request: Request, kind: EngineKind) -> ReplyAccumulator:
        """Begin to read a streamed reply."""
        ...
