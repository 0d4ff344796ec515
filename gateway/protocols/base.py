"""The values that protocol adapters exchange with the rest of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from clawstream.gateway.protocols.reply_fields import EngineError, dumps
from clawstream.schemas.records import Usage, VersionSpan

NOT_THE_PROTOCOL = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""Exceptions raised while parsing a reply that does not follow its protocol."""

EngineKind = Literal["captured", "vllm", "text"]
"""How an engine reports tokens (`gateway.upstreams[].kind`).

captured: The engine runs our middleware (`clawstream.schemas.engine_frames`). It sends token ids,
    log-probabilities and version spans next to the reply of any endpoint. Request and reply
    bodies pass unchanged.
vllm: vLLM without the middleware. The gateway requests ids and log-probabilities in the body,
    where the protocol has fields for them.
text: Any other provider. It reports no tokens.
"""


class Tokens(NamedTuple):
    """The tokens of one choice, packed as in `Step`.

    absent: Why ids or log-probabilities are missing; None when both are present.
    """

    prompt_ids: bytes | None = None
    ids: bytes | None = None
    logprobs: bytes | None = None
    spans: tuple[VersionSpan, ...] = ()
    absent: str | None = None


class Request(NamedTuple):
    """A parsed model call.

    Attributes:
        model: None when the client names no model.
        n: Number of choices, over all prompts.
        body: The JSON bytes; `payload` is the parsed object.
        prompts: Number of prompts.
        parts: The request of each prompt, where one call has several conversations.
    """

    model: str | None
    stream: bool
    n: int
    body: bytes
    payload: Mapping[str, Any]
    prompts: int = 1
    parts: tuple[Mapping[str, Any], ...] = ()

    def body_of(self, choice: int) -> bytes:
        """Return the request of a choice's prompt, where there are `parts`."""
        at = choice // (self.n // self.prompts)
        return dumps(self.parts[min(at, len(self.parts) - 1)])


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


class ParsedReply(NamedTuple):
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
    failure: EngineError | None = None
    usage: Usage | None = None


class ParsedEvent(NamedTuple):
    """One parsed event of a stream.

    Attributes:
        update: Argument for `ReplyAccumulator.add`; None when the event adds nothing.
        client_bytes: Bytes to forward to the client.
        ends: A choice has ended. This event waits for the next one: see `capture.stream`.
        last: No event follows.
        failure: An error that the engine reported.
        unknown: Why the event was not understood, although it follows the protocol.
    """

    update: Any
    client_bytes: bytes
    ends: bool = False
    last: bool = False
    failure: EngineError | None = None
    unknown: str | None = None
