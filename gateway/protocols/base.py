"""The interface of a wire protocol adapter: one pure module per protocol, without I/O.

`gateway.proxy.call` does the I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from gateway.asgi.error_replies import ErrorFormat
from gateway.errors import GatewayError
from schemas.records import Usage, VersionSpan

NOT_THE_PROTOCOL = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""Exceptions raised while parsing a reply that does not follow its protocol."""

EngineKind = Literal["captured", "vllm", "text"]
"""How an engine reports tokens (`gateway.upstreams[].kind`).

captured: The engine runs our middleware (`schemas.engine_frames`). It sends token ids,
    log-probabilities and version spans next to the reply of any endpoint. Request and reply
    bodies pass unchanged.
vllm: vLLM without the middleware. The gateway requests ids and log-probabilities in the body,
    where the protocol has fields for them.
text: Any other provider. It reports no tokens.
"""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one choice, packed as in `Step`.

    absent: Why ids or log-probabilities are missing; None when both are present.
    """

    prompt_ids: bytes | None = None
    ids: bytes | None = None
    logprobs: bytes | None = None
    spans: tuple[VersionSpan, ...] = ()
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed model call.

    Attributes:
        model: None when the client names no model.
        n: Number of choices, over all prompts.
        body: The JSON bytes; `payload` is the parsed object.
        prompts: Number of prompts.
    """

    model: str | None
    stream: bool
    n: int
    body: bytes
    payload: Mapping[str, Any]
    prompts: int = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled choice, possibly incomplete.

    Attributes:
        message_json: The assistant's message in the shape of the protocol.
        finish_reason: One of OpenAI's values (stop, length, tool_calls, content_filter) or
            abort, for every protocol; None when the choice has not ended.
        tokens: None when the reply body carries no tokens.
    """

    index: int
    message_json: bytes
    finish_reason: str | None
    tokens: Tokens | None = None


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed reply, plain or accumulated from a stream.

    Attributes:
        body: Bytes for the client, without the fields that the gateway requested; empty for a
            stream.
        unread: Why the reply could not be parsed; `body` is then the engine's.
        failure: An error that the engine reported with status 200.
        usage: Token counts reported in the reply.
    """

    choices: tuple[Choice, ...]
    model: str | None
    body: bytes
    unread: str | None = None
    failure: str | None = None
    usage: Usage | None = None


class ParsedEvent(NamedTuple):
    """One parsed event of a stream.

    Attributes:
        update: Argument for `ReplyAccumulator.add`; None when the event adds nothing.
        client_bytes: Bytes to forward to the client.
        ends: A choice has ended. This event and all later ones wait until the steps are durable.
        last: No event follows.
        failure: An error that the engine reported.
    """

    update: Any
    client_bytes: bytes
    ends: bool = False
    last: bool = False
    failure: str | None = None


class ReplyAccumulator(Protocol):
    """Accumulates a streamed reply. `add` applies a parsed event once the client gets it."""

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        """Parse an event without changing the accumulator.

        Args:
            event: Bytes of the event, blank line included.
            data: Data of the event.

        Raises:
            NOT_THE_PROTOCOL: The event does not follow the protocol.
        """
        ...

    def add(self, update: Any) -> None:
        """Apply the update of a parsed event."""
        ...

    def reply(self) -> ParsedReply:
        """Return the reply accumulated so far."""
        ...

    def error(self, error: GatewayError) -> bytes:
        """Format an error as the next event of this stream."""
        ...

    def unfinished(self) -> int:
        """Return the number of choices that have not ended."""
        ...


class ProtocolAdapter(Protocol):
    """Adapter of one wire protocol."""

    name: str
    """The value of `Step.protocol`."""
    path: str
    """Path of the endpoint on the engine."""
    errors: ErrorFormat

    def parse_request(self, body: bytes) -> Request:
        """Parse and check a request body.

        Raises:
            BadRequest: Names the invalid field.
        """
        ...

    def engine_body(self, request: Request, kind: EngineKind) -> bytes:
        """Return the body for the engine: the client's bytes, plus token fields where needed."""
        ...

    def parse_reply(self, request: Request, kind: EngineKind, body: bytes) -> ParsedReply:
        """Parse a plain reply. An unreadable one keeps its body and sets `unread`."""
        ...

    def accumulator(self, request: Request, kind: EngineKind) -> ReplyAccumulator:
        """Return an empty accumulator for a streamed reply."""
        ...
