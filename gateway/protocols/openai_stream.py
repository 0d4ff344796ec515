"""Shared stream parsing of chat and text completions: chunks with choices, ended by `[DONE]`."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import orjson

from gateway.asgi.error_replies import OPENAI_ERRORS
from gateway.errors import GatewayError
from gateway.protocols.base import EngineKind, ParsedEvent, Request
from gateway.protocols.reply_fields import loads, mapping
from gateway.protocols.request_fields import error_text

DONE = b"[DONE]"


class ChoiceBuffer(Protocol):
    finish_reason: str | None


B = TypeVar("B", bound=ChoiceBuffer)


class ChoicesAccumulator(Generic[B]):
    """Base of both accumulators, see `base.ReplyAccumulator`. B: buffer of one choice."""

    def __init__(self, request: Request, kind: EngineKind, buffer: type[B]) -> None:
        self._n, self._asked, self._kind, self._new = request.n, request.payload, kind, buffer
        self._choices: dict[int, B] = {}
        self._model: str | None = None
        self._usage: Any = None

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        if data == DONE:
            return ParsedEvent(None, event, last=True)
        try:
            chunk = orjson.loads(data)  # as `loads` does, but saves a call per event
        except orjson.JSONDecodeError:
            chunk = loads(data)
        chunk = mapping(chunk)
        if chunk.get("error"):
            return ParsedEvent(None, event, failure=error_text(chunk["error"]))
        return self._read_chunk(event, chunk)

    def _read_chunk(self, event: bytes, chunk: dict[str, Any]) -> ParsedEvent:
        raise NotImplementedError

    def _buffer(self, which: int) -> B:
        buffer = self._choices.get(which)
        if buffer is None:
            buffer = self._choices[which] = self._new()
        return buffer

    def unfinished(self) -> int:
        return self._n - sum(1 for b in self._choices.values() if b.finish_reason)

    def error(self, error: GatewayError) -> bytes:
        return b"data: " + OPENAI_ERRORS.body(error) + b"\n\n"
