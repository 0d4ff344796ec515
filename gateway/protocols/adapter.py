"""The interface of a wire protocol: one pure adapter for each, without I/O.

`clawstream.gateway.proxy.call` does the I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import orjson

from clawstream.gateway.asgi.error_replies import OPENAI_ERRORS, ErrorFormat
from clawstream.gateway.errors import GatewayError
from clawstream.gateway.protocols.base import (
    NOT_THE_PROTOCOL,
    Choice,
    EngineKind,
    ParsedEvent,
    ParsedReply,
    Request,
)
from clawstream.gateway.protocols.reply_fields import engine_error, loads, mapping, text_or_none
from clawstream.gateway.protocols.request_fields import (
    model_of,
    object_of,
    stream_of,
    with_fields,
)
from clawstream.gateway.protocols.usage import usage_of

UNKNOWN_EVENT = "an event of an unknown type"


class ReplyAccumulator(ABC):
    """Accumulates a streamed reply. `add` applies a parsed event once the client gets it."""

    @abstractmethod
    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        """Parse an event without changing the accumulator.

        Args:
            event: Bytes of the event, blank line included.
            data: Data of the event.

        Raises:
            NOT_THE_PROTOCOL: The event does not follow the protocol.
        """

    @abstractmethod
    def add(self, update: Any) -> None:
        """Apply the update of a parsed event."""

    @abstractmethod
    def has_content(self, update: Any) -> bool:
        """Return whether an update adds to a message, so that a choice goes on after its end."""

    @abstractmethod
    def reply(self) -> ParsedReply:
        """Return the reply accumulated so far."""

    @property
    def whole(self) -> bool:
        """Whether the last event repeated the whole reply, also what was not understood before."""
        return False

    @abstractmethod
    def error(self, error: GatewayError) -> bytes:
        """Format an error as the next event of this stream."""

    @abstractmethod
    def unfinished(self) -> int:
        """Return the number of choices that have not ended."""


class ProtocolAdapter(ABC):
    """Adapter of one wire protocol."""

    name: str
    """The value of `Step.protocol`."""
    path: str
    """Path of the endpoint on the engine."""
    reply_noun: str
    """Noun for its reply, for messages."""
    errors: ErrorFormat = OPENAI_ERRORS
    has_turns = True
    """Whether a request is a conversation, which a later request can continue."""

    def parse_request(self, body: bytes) -> Request:
        """Parse and check a request body.

        Raises:
            BadRequest: Names the invalid field.
        """
        payload = object_of(body)
        n, prompts = self._check(payload)
        return Request(model_of(payload), stream_of(payload), n, body, payload, prompts)

    def engine_body(self, request: Request, kind: EngineKind) -> bytes:
        """Return the body for the engine: the client's bytes, plus token fields where needed."""
        if kind != "vllm":
            return request.body
        return with_fields(request, self.token_fields(request.payload))

    def parse_reply(self, request: Request, kind: EngineKind, body: bytes) -> ParsedReply:
        """Parse a plain reply. An unreadable one keeps its body and sets `unread`."""
        try:
            payload = mapping(loads(body))
            usage = usage_of(payload.get("usage"))
            if not self._has_output(payload) and (error := engine_error(payload)) is not None:
                return ParsedReply((), None, body, failure=error, usage=usage)
            model = text_or_none(payload.get("model"))
            choices = self._choices(payload, request, kind)
            if kind == "vllm" and self._strip(payload, request):
                body = orjson.dumps(payload)
        except NOT_THE_PROTOCOL as error:
            unread = f"the reply is not {self.reply_noun}: {error!r}"
            return ParsedReply((), None, body, unread=unread)
        return ParsedReply(choices, model, body, usage=usage)

    @abstractmethod
    def accumulator(self, request: Request, kind: EngineKind) -> ReplyAccumulator:
        """Return an empty accumulator for a streamed reply."""

    @abstractmethod
    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        """Check a request; return its number of choices over all prompts, and of prompts.

        Raises:
            BadRequest: Names the invalid field.
        """

    @abstractmethod
    def _has_output(self, payload: dict[str, Any]) -> bool:
        """Return whether a reply with an error also has output."""

    @abstractmethod
    def _choices(
        self, payload: dict[str, Any], request: Request, kind: EngineKind
    ) -> tuple[Choice, ...]:
        """Read the choices of a plain reply. Raises NOT_THE_PROTOCOL."""

    def token_fields(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that make vLLM report tokens and that the client did not set."""
        return {}

    def _strip(self, payload: dict[str, Any], request: Request) -> bool:
        """Remove from a reply what only `token_fields` requested; return whether it changed."""
        return False
