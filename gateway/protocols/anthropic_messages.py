"""Adapter of Anthropic messages. Pure.

The protocol has no field for token ids or log-probabilities, so bodies pass unchanged. An engine
with our middleware sends the tokens next to the reply; replies of other engines are recorded as
text. vLLM reports some errors of this endpoint in OpenAI's shape or with its own type names; the
adapter converts them to Anthropic's.
"""

from __future__ import annotations

from typing import Any

import orjson

from clawstream.gateway.asgi.error_replies import ErrorFormat, http_error_of
from clawstream.gateway.errors import GatewayError
from clawstream.gateway.protocols.adapter import UNKNOWN_EVENT, ProtocolAdapter, ReplyAccumulator
from clawstream.gateway.protocols.base import Choice, EngineKind, ParsedEvent, ParsedReply, Request
from clawstream.gateway.protocols.message_deltas import grow, joined
from clawstream.gateway.protocols.reply_fields import (
    array,
    described,
    dumps,
    engine_error,
    loads,
    mapping,
    number,
    text,
    text_or_none,
)
from clawstream.gateway.protocols.request_fields import check_messages
from clawstream.gateway.protocols.usage import usage_of

STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Finish reason of each stop reason.

An unknown stop reason becomes "stop". A complete message with a null stop reason becomes "abort":
vLLM sends null for an aborted message.
"""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_ALL_TYPES = {*_TYPES.values(), "invalid_request_error", "api_error", "billing_error"}
_MAX_TEXT = 2000
"""Characters kept of an engine's error body that is not JSON."""


def type_of(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")


def _error(kind: str, message: str) -> bytes:
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": message}})


class AnthropicErrors:
    """Formats errors as `{"type": "error", "error": {type, message}}`."""

    def body(self, error: GatewayError) -> bytes:
        return _error(type_of(http_error_of(error).status), error.message)

    def engine_error(self, status: int, body: bytes) -> bytes:
        """Convert an engine's error reply to Anthropic's shape; returns `body` if it has it."""
        try:
            payload = orjson.loads(body)
        except orjson.JSONDecodeError:
            return _error(type_of(status), body.decode(errors="replace")[:_MAX_TEXT])
        if not isinstance(payload, dict):
            return _error(type_of(status), str(payload)[:_MAX_TEXT])
        error = payload.get("error", payload.get("detail", payload))
        if (
            payload.get("type") == "error"
            and isinstance(error, dict)
            and error.get("type") in _ALL_TYPES
        ):
            return body
        return _error(type_of(status), described(error).message)


ANTHROPIC_ERRORS = AnthropicErrors()


class AnthropicMessages(ProtocolAdapter):
    """Adapter of `POST /v1/messages`."""

    name = "anthropic.messages"
    path = "/v1/messages"
    reply_noun = "a message"
    errors: ErrorFormat = ANTHROPIC_ERRORS

    def accumulator(self, request: Request, kind: EngineKind) -> AnthropicMessagesAccumulator:
        return AnthropicMessagesAccumulator()

    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        check_messages(payload)
        return 1, 1

    def _has_output(self, payload: dict[str, Any]) -> bool:
        return "content" in payload

    def _choices(
        self, payload: dict[str, Any], request: Request, kind: EngineKind
    ) -> tuple[Choice, ...]:
        role, content = text(payload.get("role", "assistant")), array(payload["content"])
        finish = finish_of(text_or_none(payload.get("stop_reason")))
        return (Choice(0, dumps({"role": role, "content": content}), finish),)


def finish_of(stop_reason: str | None) -> str:
    """Return the finish reason of a message that has ended."""
    return "abort" if stop_reason is None else STOP_REASONS.get(stop_reason, "stop")


class _Block:
    """Buffer of one content block.

    fields: Its initial fields, and those of other deltas. pieces: The text deltas of each field.
    """

    __slots__ = ("citations", "fields", "pieces")

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields
        self.pieces: dict[str, list[str]] = {}
        self.citations: list[Any] = []

    def whole(self) -> dict[str, Any]:
        block = dict(joined(self.fields))
        for name, pieces in self.pieces.items():
            before, added = block.get(name), "".join(pieces)
            if added or name in block:  # servers send empty texts for blocks of other types
                block[name] = (before if isinstance(before, str) else "") + added
        if self.citations:
            block["citations"] = self.citations
        arguments = block.get(ARGUMENTS)
        if isinstance(arguments, str):
            try:
                block["input"] = loads(arguments.encode("utf-8", "surrogatepass"))
                del block[ARGUMENTS]
            except ValueError:
                pass  # the call is truncated: keep the partial JSON
        return block


ARGUMENTS = "partial_json"
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": ARGUMENTS}
"""Field of the delta, and of the content block, that each text delta extends."""


class AnthropicMessagesAccumulator(ReplyAccumulator):
    """Accumulator of a streamed message.

    Every start appends a block, as in Anthropic's clients. A delta belongs to the last block of its
    index.
    """

    def __init__(self) -> None:
        self._model: str | None = None
        self._role = "assistant"
        self._blocks: list[_Block] = []
        self._last: dict[int, _Block] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        payload = mapping(loads(data))
        match text(payload["type"]):
            case "content_block_delta":
                return ParsedEvent(
                    _delta(number(payload["index"]), mapping(payload["delta"])), event
                )
            case "content_block_start":
                return ParsedEvent(
                    ("block", number(payload["index"]), mapping(payload["content_block"])), event
                )
            case "message_start":
                message = mapping(payload["message"])
                model, role = (
                    text_or_none(message.get("model")),
                    text(message.get("role", "assistant")),
                )
                blocks = [mapping(b) for b in array(message.get("content"))]
                return ParsedEvent(("message", model, role, blocks, message.get("usage")), event)
            case "message_delta":
                reason = text_or_none(mapping(payload["delta"]).get("stop_reason"))
                return ParsedEvent(("delta", reason, payload.get("usage")), event, ends=True)
            case "message_stop":
                return ParsedEvent(("stop",), event, ends=True, last=True)
            case "ping" | "content_block_stop":
                return ParsedEvent(None, event)
        error = engine_error(payload)
        return ParsedEvent(None, event, failure=error, unknown=None if error else UNKNOWN_EVENT)

    def add(self, update: Any) -> None:
        match update:
            case ("piece", index, name, piece):
                self._block(index).pieces.setdefault(name, []).append(piece)
            case ("set", index, fields):
                self._block(index).fields |= fields
            case ("citation", index, citation):
                self._block(index).citations.append(citation)
            case ("merge", index, fields):
                grow(self._block(index).fields, fields)
            case ("block", index, begun):
                self._begin(index, begun)
            case ("message", model, role, blocks, usage):
                self._model, self._role = model, role
                self._count(usage)
                for index, begun in enumerate(blocks):
                    self._begin(index, begun)
            case ("delta", reason, usage):
                self._finish = self._finish if reason is None else finish_of(reason)
                self._count(usage)
            case ("stop",):
                self._finish = self._finish or finish_of(None)

    def _count(self, usage: Any) -> None:
        """Merge usage counts; later events repeat the counts that changed."""
        if isinstance(usage, dict):
            self._usage |= {name: value for name, value in usage.items() if value is not None}

    def _block(self, index: int) -> _Block:
        return self._last.get(index) or self._begin(index, {})

    def _begin(self, index: int, begun: dict[str, Any]) -> _Block:
        block = self._last[index] = _Block(begun)
        self._blocks.append(block)
        return block

    def has_content(self, update: Any) -> bool:
        return update[0] not in ("message", "delta", "stop")

    def reply(self) -> ParsedReply:
        if not self._blocks and self._finish is None:
            return ParsedReply((), self._model, b"")
        message = {
            "role": self._role,
            "content": [block.whole() for block in self._blocks],
        }
        choice = Choice(0, dumps(message), self._finish)
        return ParsedReply((choice,), self._model, b"", usage=usage_of(self._usage))

    def unfinished(self) -> int:
        return int(self._finish is None)

    def error(self, error: GatewayError) -> bytes:
        return b"event: error\ndata: " + ANTHROPIC_ERRORS.body(error) + b"\n\n"


def _delta(index: int, delta: dict[str, Any]) -> tuple[Any, ...]:
    kind = text(delta["type"])
    if (name := _DELTAS.get(kind)) is not None:
        return "piece", index, name, text(delta[name])
    if kind == "citations_delta":
        return "citation", index, delta["citation"]
    if kind == "signature_delta":
        return "set", index, {"signature": text(delta["signature"])}
    fields = {name: value for name, value in delta.items() if name != "type"}
    # Anthropic's clients take a summary from its only delta. Types that come later are merged.
    return "set" if kind == "compaction_delta" else "merge", index, fields
