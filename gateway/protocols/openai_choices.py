"""Common part of chat and text completions: replies with choices, streams ended by `[DONE]`.

An engine with our middleware gets the client's bytes, and its reply passes unchanged. For vLLM
without the middleware, the adapter requests token ids and log-probabilities (`return_token_ids`,
`logprobs`), and sets them to null in the client's reply unless the client requested them itself:
vLLM writes these fields as null when they are not requested.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from clawstream.gateway.asgi.error_replies import OPENAI_ERRORS
from clawstream.gateway.asgi.sse import DONE
from clawstream.gateway.errors import GatewayError
from clawstream.gateway.protocols.adapter import ProtocolAdapter, ReplyAccumulator
from clawstream.gateway.protocols.base import (
    Choice,
    EngineKind,
    ParsedEvent,
    ParsedReply,
    Request,
    Tokens,
)
from clawstream.gateway.protocols.reply_fields import (
    array,
    array_or_none,
    engine_error,
    loads,
    mapping,
    text_or_none,
)
from clawstream.gateway.protocols.token_fields import packed_tokens
from clawstream.gateway.protocols.usage import usage_of

NO_CHOICES = "a chunk without choices and usage"


class ChoiceDelta(NamedTuple):
    """One choice of a chunk.

    choice: Its index.
    content: Its part of the message, in the type of the protocol.
    """

    choice: int
    content: Any
    finish_reason: str | None
    prompt_ids: list[Any] | None = None
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None


class ChoiceBuffer:
    """Buffer of one choice: its tokens and finish reason. A subclass adds the message."""

    __slots__ = ("finish_reason", "ids", "logprobs", "prompt_ids")

    def __init__(self) -> None:
        self.prompt_ids: list[Any] | None = None
        self.ids: list[Any] | None = None
        self.logprobs: list[Any] | None = None
        self.finish_reason: str | None = None

    def add(self, content: Any) -> None:
        """Add a part of the message."""
        raise NotImplementedError

    def add_tokens(self, delta: ChoiceDelta) -> None:
        """Add the tokens of a delta."""
        if delta.prompt_ids is not None:
            self.prompt_ids = delta.prompt_ids
        if delta.ids is not None:
            self.ids = self.ids or []
            self.ids += delta.ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs

    def message(self) -> bytes:
        """Return the message as JSON."""
        raise NotImplementedError


class ChoicesAdapter(ProtocolAdapter):
    """Adapter of a protocol with choices."""

    def accumulator(self, request: Request, kind: EngineKind) -> ChoicesAccumulator:
        return ChoicesAccumulator(self, request, kind)

    @abstractmethod
    def buffer(self) -> ChoiceBuffer:
        """Return an empty buffer of one choice."""

    @abstractmethod
    def delta(
        self, choice: Any, choices: list[Any], asked: Mapping[str, Any], kind: EngineKind
    ) -> ChoiceDelta:
        """Read a choice of a chunk. Raises NOT_THE_PROTOCOL."""

    @abstractmethod
    def has_content(self, content: Any) -> bool:
        """Return whether the content of a delta adds to the message."""

    def only_tokens(self, chunk: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        """Return whether the engine sends this chunk only because tokens were requested."""
        return False

    def tokens_absent(self, asked: Mapping[str, Any], kind: EngineKind) -> str | None:
        """Return why no choice of a request can have tokens; None: choices can have them."""
        return None

    def choice(
        self, index: int, buffer: ChoiceBuffer, request: Request, kind: EngineKind
    ) -> Choice:
        """Return the choice that a buffer holds."""
        tokens = None
        if (absent := self.tokens_absent(request.payload, kind)) is not None:
            tokens = Tokens(absent=absent)
        elif kind == "vllm":
            tokens = packed_tokens(buffer.prompt_ids, buffer.ids, buffer.logprobs)
        return Choice(index, buffer.message(), buffer.finish_reason, tokens)

    def _has_output(self, payload: dict[str, Any]) -> bool:
        return bool(payload.get("choices") or payload.get("output"))

    def stripped_fields(self, asked: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the token fields that the client did not request, of a reply and its choices."""
        added = self.token_fields(asked)
        ids = ("token_ids", "prompt_token_ids") if "return_token_ids" in added else ()
        return (*ids, "logprobs") if "logprobs" in added else ids

    def _strip(self, payload: dict[str, Any], request: Request) -> bool:
        return stripped(payload, self.stripped_fields(request.payload))


def stripped(payload: dict[str, Any], names: Sequence[str]) -> bool:
    """Set fields of a reply or chunk and of its choices to null; return whether any changed."""
    changed = False
    for holder in (payload, *(payload.get("choices") or ())):
        for name in names:
            if holder.get(name) is not None:
                holder[name], changed = None, True
    return changed


class ChoicesAccumulator(ReplyAccumulator):
    """Accumulator of a streamed reply with choices."""

    def __init__(self, adapter: ChoicesAdapter, request: Request, kind: EngineKind) -> None:
        self._adapter, self._request, self._kind = adapter, request, kind
        self._asked, self._stripped = request.payload, adapter.stripped_fields(request.payload)
        self._buffers: dict[int, ChoiceBuffer] = {}
        self._prompt_ids: list[Any] | None = None
        self._model: str | None = None
        self._usage: Any = None

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        if data == DONE:
            return ParsedEvent(None, event, last=True)
        try:
            chunk = orjson.loads(data)  # as `loads` does, but saves a call per event
        except orjson.JSONDecodeError:
            chunk = loads(data)
        chunk, adapter, asked, kind = mapping(chunk), self._adapter, self._asked, self._kind
        choices, usage = array(chunk.get("choices")), chunk.get("usage")
        if not choices or chunk.get("error"):
            if (error := engine_error(chunk)) is not None:
                return ParsedEvent(None, event, failure=error)
            if "choices" not in chunk and not usage:
                return ParsedEvent(None, event, unknown=NO_CHOICES)
        deltas = [adapter.delta(choice, choices, asked, kind) for choice in choices]
        prompt_ids = array_or_none(chunk.get("prompt_token_ids"))
        ends = any(d.finish_reason for d in deltas)
        if ends and not usage:  # Kimi reports it in the choice
            usage = next((choice["usage"] for choice in choices if choice.get("usage")), None)
        update = text_or_none(chunk.get("model")), prompt_ids, deltas, usage
        if kind == "vllm":  # the deltas keep the removed tokens
            if adapter.only_tokens(chunk, asked):
                event = b""
            elif stripped(chunk, self._stripped):
                event = b"data: " + orjson.dumps(chunk) + b"\n\n"
        return ParsedEvent(update, event, ends)

    def add(self, update: Any) -> None:
        model, prompt_ids, deltas, usage = update
        self._model, self._usage = model or self._model, usage or self._usage
        if prompt_ids is not None:
            self._prompt_ids = prompt_ids
        for delta in deltas:
            buffer = self._buffers.get(delta.choice)
            if buffer is None:
                buffer = self._buffers[delta.choice] = self._adapter.buffer()
            buffer.add(delta.content)
            if delta.finish_reason:
                buffer.finish_reason = delta.finish_reason
            if self._kind == "vllm":
                buffer.add_tokens(delta)

    def has_content(self, update: Any) -> bool:
        return any(self._adapter.has_content(delta.content) for delta in update[2])

    def reply(self) -> ParsedReply:
        choices = []
        for index, buffer in sorted(self._buffers.items()):
            if self._prompt_ids is not None:
                buffer.prompt_ids = self._prompt_ids
            choices.append(self._adapter.choice(index, buffer, self._request, self._kind))
        return ParsedReply(tuple(choices), self._model, b"", usage=usage_of(self._usage))

    def unfinished(self) -> int:
        return self._request.n - sum(1 for b in self._buffers.values() if b.finish_reason)

    def error(self, error: GatewayError) -> bytes:
        return b"data: " + OPENAI_ERRORS.body(error) + b"\n\n"
