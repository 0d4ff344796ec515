"""Adapter of OpenAI Responses. Pure.

vLLM has no field for the token ids of a streamed response, so bodies pass unchanged. An engine
with our middleware sends the tokens next to the reply; replies of other engines are recorded as
text.

The last event of a stream carries the complete response. Before it, the accumulator builds the
output from the earlier events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.asgi.error_replies import http_error_of
from gateway.errors import BadRequest, GatewayError
from gateway.protocols.adapter import ProtocolAdapter, ReplyAccumulator
from gateway.protocols.base import Choice, EngineKind, ParsedEvent, ParsedReply, Request
from gateway.protocols.reply_fields import (
    array,
    dumps,
    loads,
    mapping,
    number,
    text,
    text_or_none,
)
from gateway.protocols.request_fields import error_text
from gateway.protocols.usage import usage_of

DONE = b"[DONE]"
CLIENT_CALLS = frozenset(
    {
        "function_call", "custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call",
        "computer_call",
        "mcp_approval_request",
    }
)  # fmt: skip
"""Items that the client executes; the server executes other calls (web_search_call, mcp_call)."""
_LAST = {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
_PART_DELTAS = {
    "response.output_text.delta": ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
}
"""Deltas of a part: the list of the item that holds the part, the part's type, its text field."""
_ITEM_DELTAS = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
    "response.mcp_call_arguments.delta": "arguments",
    "response.code_interpreter_call_code.delta": "code",
}
"""Deltas of an item, and the item's field that they extend."""
_PARTS = {
    "response.content_part.added": "content",
    "response.reasoning_summary_part.added": "summary",
}


class OpenAIResponses(ProtocolAdapter):
    """Adapter of `POST /v1/responses`."""

    name = "openai.responses"
    path = "/v1/responses"
    reply_noun = "a response"

    def accumulator(self, request: Request, kind: EngineKind) -> OpenAIResponsesAccumulator:
        return OpenAIResponsesAccumulator()

    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        given = payload.get("input")
        # None: a stored prompt or conversation of the provider may replace the input.
        if not (given is None or isinstance(given, str)) and not (
            isinstance(given, list) and all(isinstance(item, dict) for item in given)
        ):
            raise BadRequest("input: must be a string or a list of items", "input")
        if payload.get("background"):
            raise BadRequest(
                "background: background responses cannot be recorded; remove the field",
                "background",
            )
        return 1, 1

    def _has_output(self, payload: dict[str, Any]) -> bool:
        return "output" in payload

    def _choices(
        self, payload: dict[str, Any], request: Request, kind: EngineKind
    ) -> tuple[Choice, ...]:
        output = [mapping(item) for item in payload["output"]]
        return (Choice(0, dumps({"output": output}), finish_of(payload, output)),)


def finish_of(response: Mapping[str, Any], output: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the finish reason of a response; None when it has not ended.

    vLLM reports `completed` for an aborted response too; only our middleware reports the abort.
    """
    match response.get("status", "completed"):
        case "completed":
            return (
                "tool_calls"
                if any(str(item.get("type")) in CLIENT_CALLS for item in output)
                else "stop"
            )
        case "incomplete":
            details = response.get("incomplete_details")
            reason = details.get("reason") if isinstance(details, dict) else None
            return "content_filter" if reason == "content_filter" else "length"
        case "in_progress" | "queued":
            return None
    return "abort"  # cancelled, failed


class _Item:
    """Buffer of one output item.

    begun, parts: Initial item and parts. pieces: Their text deltas. done: The complete item.
    """

    __slots__ = ("begun", "done", "parts", "pieces")

    def __init__(self, begun: Mapping[str, Any]) -> None:
        self.begun = begun
        self.done: Mapping[str, Any] | None = None
        self.parts: dict[tuple[str, int], Mapping[str, Any]] = {}
        self.pieces: dict[tuple[str, int, str], list[str]] = {}

    def whole(self) -> dict[str, Any]:
        if self.done is not None:
            return dict(self.done)
        parts = {place: dict(part) for place, part in self.parts.items()}
        item = dict(self.begun)
        for (where, at, field), pieces in self.pieces.items():
            grown = parts[where, at] if where else item
            before = grown.get(field)
            grown[field] = (before if isinstance(before, str) else "") + "".join(pieces)
        for where in dict.fromkeys(where for where, _ in parts):
            item[where] = [
                part for (w, _), part in sorted(parts.items(), key=lambda p: p[0]) if w == where
            ]
        return item


class OpenAIResponsesAccumulator(ReplyAccumulator):
    """Accumulator of a streamed response."""

    def __init__(self) -> None:
        self._model: str | None = None
        self._items: dict[int, _Item] = {}
        self._response: Mapping[str, Any] | None = None
        self._output: list[dict[str, Any]] = []
        self._next = 0  # sequence number of the event behind the last one read

    def read(self, event: bytes, data: bytes) -> ParsedEvent:
        if data == DONE:
            return ParsedEvent(None, event, last=True)
        payload = mapping(loads(data))
        if isinstance(payload.get("sequence_number"), int):
            self._next = payload["sequence_number"] + 1
        kind = payload.get("type")
        if kind == "error" or (kind is None and "error" in payload):
            return ParsedEvent(None, event, failure=error_text(payload.get("error") or payload))
        kind = text(kind)
        if kind in _LAST:
            response = {"status": kind.removeprefix("response."), "output": []} | mapping(
                payload["response"]
            )
            output, model = (
                [mapping(i) for i in array(response["output"])],
                text_or_none(response.get("model")),
            )
            failure = error_text(response.get("error")) if kind == "response.failed" else None
            return ParsedEvent(
                ("response", model, response, output), event, ends=True, last=True, failure=failure
            )
        return ParsedEvent(_update(kind, payload), event)

    def add(self, update: Any) -> None:
        match update:
            case ("piece", index, place, piece):
                self._item(index).pieces.setdefault(place, []).append(piece)
            case ("part piece", index, where, at, part, field, piece):
                item = self._item(index)
                item.parts.setdefault((where, at), part)
                item.pieces.setdefault((where, at, field), []).append(piece)
            case ("part", index, where, at, part):
                self._item(index).parts[where, at] = part
            case ("item", index, begun):
                self._items[index] = _Item(begun)
            case ("done", index, item):
                self._item(index).done = item
            case ("begun", model):
                self._model = model
            case ("response", model, response, output):
                self._model = model or self._model
                self._response, self._output = response, output

    def _item(self, index: int) -> _Item:
        return self._items.setdefault(index, _Item({}))

    def reply(self) -> ParsedReply:
        output = [item.whole() for _, item in sorted(self._items.items())]
        if self._response is None:
            choices = (Choice(0, dumps({"output": output}), None),) if output else ()
            return ParsedReply(choices, self._model, b"")
        output = self._output or output  # some providers leave it empty in the last event
        choice = Choice(0, dumps({"output": output}), finish_of(self._response, output))
        return ParsedReply((choice,), self._model, b"", usage=usage_of(self._response.get("usage")))

    def unfinished(self) -> int:
        return int(self._response is None)

    def error(self, error: GatewayError) -> bytes:
        payload = {
            "type": "error",
            "code": http_error_of(error).code,
            "message": error.message,
            "param": error.param,
            "sequence_number": self._next,
        }
        return b"event: error\ndata: " + orjson.dumps(payload) + b"\n\n"


def _update(kind: str, payload: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return the update of an event, or None. Some providers omit an index that is 0."""
    index = number(payload.get("output_index", 0))
    if (field := _ITEM_DELTAS.get(kind)) is not None:
        return "piece", index, ("", 0, field), text(payload["delta"])
    if (delta := _PART_DELTAS.get(kind)) is not None:
        where, part_type, field = delta
        at = number(payload.get(f"{where}_index", 0))
        return (
            "part piece",
            index,
            where,
            at,
            {"type": part_type, field: ""},
            field,
            text(payload["delta"]),
        )
    if (holder := _PARTS.get(kind)) is not None:
        return (
            "part",
            index,
            holder,
            number(payload.get(f"{holder}_index", 0)),
            mapping(payload["part"]),
        )
    match kind:
        case "response.output_item.added" if payload.get("item") is not None:
            return "item", index, mapping(payload["item"])
        case "response.output_item.done":
            return "done", index, mapping(payload["item"])
        case "response.created":
            return "begun", text_or_none(mapping(payload["response"]).get("model"))
    return None
