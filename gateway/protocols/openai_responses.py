"""Adapter of OpenAI Responses. Pure.

vLLM has no field for the token ids of a streamed response, so bodies pass unchanged. An engine
with our middleware sends the tokens next to the reply; replies of other engines are recorded as
text.

The last event of a stream carries the complete response. Before it, the accumulator builds the
output from the earlier events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import orjson

from clawstream.gateway.asgi.error_replies import http_error_of
from clawstream.gateway.asgi.sse import DONE
from clawstream.gateway.errors import BadRequest, GatewayError
from clawstream.gateway.protocols.adapter import UNKNOWN_EVENT, ProtocolAdapter, ReplyAccumulator
from clawstream.gateway.protocols.base import Choice, EngineKind, ParsedEvent, ParsedReply, Request
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
from clawstream.gateway.protocols.usage import usage_of

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


_WITHOUT_CONTENT = (
    "part.added", ".done", ".queued", ".in_progress", ".completed", ".failed", ".searching",
    ".generating", ".interpreting", ".keepalive",
)  # fmt: skip
"""Suffixes of the events that tell a state, or repeat the content of the deltas."""


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


class _Part:
    """Buffer of a part of an item: its initial fields, and the deltas of each text field."""

    __slots__ = ("at", "fields", "pieces", "where")

    def __init__(self, where: str, at: int, fields: Mapping[str, Any]) -> None:
        self.where, self.at, self.fields = where, at, fields
        self.pieces: dict[str, list[str]] = {}

    def add(self, field: str, piece: str) -> None:
        """Add a text delta."""
        self.pieces.setdefault(field, []).append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the part with its deltas."""
        part = dict(self.fields)
        for field, pieces in self.pieces.items():
            before = part.get(field)
            part[field] = (before if isinstance(before, str) else "") + "".join(pieces)
        return part


class _Item(_Part):
    """Buffer of one output item. done: The complete item."""

    __slots__ = ("done", "last", "parts")

    def __init__(self, index: int, fields: Mapping[str, Any]) -> None:
        super().__init__("", index, fields)
        self.done: Mapping[str, Any] | None = None
        self.parts: list[_Part] = []
        self.last: dict[tuple[str, int], _Part] = {}

    def begin(self, where: str, at: int, fields: Mapping[str, Any]) -> _Part:
        """Begin a part, also where one has this place."""
        part = self.last[where, at] = _Part(where, at, fields)
        self.parts.append(part)
        return part

    def whole(self) -> dict[str, Any]:
        """Return the item with its deltas."""
        if self.done is not None:
            return dict(self.done)
        item = super().whole()
        for where in dict.fromkeys(part.where for part in self.parts):
            parts = sorted((p for p in self.parts if p.where == where), key=attrgetter("at"))
            item[where] = [part.whole() for part in parts]
        return item


class _Place(NamedTuple):
    """The item of an event. Some providers omit every index, others only an index that is 0."""

    at: int
    item_id: str | None


class OpenAIResponsesAccumulator(ReplyAccumulator):
    """Accumulator of a streamed response.

    `output_item.added` begins an item, whatever its index. A later event belongs to the item with
    its id, else to the last item of its index.
    """

    def __init__(self) -> None:
        self._model: str | None = None
        self._items: list[_Item] = []
        self._by_id: dict[str, _Item] = {}
        self._last: dict[int, _Item] = {}
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
        if not isinstance(kind, str) or not kind.startswith("response."):
            error = engine_error(payload)
            return ParsedEvent(None, event, failure=error, unknown=None if error else UNKNOWN_EVENT)
        if kind in _LAST:
            response = {"status": kind.removeprefix("response."), "output": []} | mapping(
                payload["response"]
            )
            output, model = (
                [mapping(i) for i in array(response["output"])],
                text_or_none(response.get("model")),
            )
            failure = described(response.get("error")) if kind == "response.failed" else None
            return ParsedEvent(
                ("response", model, response, output), event, ends=True, last=True, failure=failure
            )
        update = _update(kind, payload)
        known = update is not None or kind.endswith(_WITHOUT_CONTENT)
        return ParsedEvent(update, event, unknown=None if known else UNKNOWN_EVENT)

    def add(self, update: Any) -> None:
        match update:
            case ("piece", place, field, piece):
                self._item(place).add(field, piece)
            case ("part piece", place, where, at, part_type, field, piece):
                item = self._item(place)
                part = item.last.get((where, at))
                if part is None:
                    part = item.begin(where, at, {"type": part_type, field: ""})
                part.add(field, piece)
            case ("part", place, where, at, part):
                self._item(place).begin(where, at, part)
            case ("item", place, begun):
                self._begin(place, begun)
            case ("done", place, item):
                self._completed(place, item.get("type")).done = item
            case ("begun", model):
                self._model = model
            case ("response", model, response, output):
                self._model = model or self._model
                self._response, self._output = response, output

    def _begin(self, place: _Place, fields: Mapping[str, Any]) -> _Item:
        item = _Item(place.at, fields)
        self._items.append(item)
        self._last[place.at] = item
        if place.item_id is not None:
            self._by_id[place.item_id] = item
        return item

    def _item(self, place: _Place) -> _Item:
        known = self._by_id.get(place.item_id) if place.item_id is not None else None
        return known or self._last.get(place.at) or self._begin(place, {})

    def _completed(self, place: _Place, kind: object) -> _Item:
        """Return the item that an event completes: once, and of its own type."""
        item = self._item(place)
        same = item.done is None and item.fields.get("type", kind) == kind
        return item if same else self._begin(place, {})

    def has_content(self, update: Any) -> bool:
        return update[0] not in ("begun", "response")

    @property
    def whole(self) -> bool:
        return bool(self._output)

    def reply(self) -> ParsedReply:
        output = [item.whole() for item in sorted(self._items, key=attrgetter("at"))]
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
    """Return the update of an event, or None."""
    place = _place(payload)
    if (field := _ITEM_DELTAS.get(kind)) is not None:
        return "piece", place, field, text(payload["delta"])
    if (delta := _PART_DELTAS.get(kind)) is not None:
        where, part_type, field = delta
        at = number(payload.get(f"{where}_index", 0))
        return "part piece", place, where, at, part_type, field, text(payload["delta"])
    if (holder := _PARTS.get(kind)) is not None:
        at = number(payload.get(f"{holder}_index", 0))
        return "part", place, holder, at, mapping(payload["part"])
    match kind:
        case "response.output_item.added" if payload.get("item") is not None:
            return "item", place, mapping(payload["item"])
        case "response.output_item.done":
            return "done", place, mapping(payload["item"])
        case "response.created":
            return "begun", text_or_none(mapping(payload["response"]).get("model"))
    return None


def _place(payload: Mapping[str, Any]) -> _Place:
    index, item_id, item = payload.get("output_index"), payload.get("item_id"), payload.get("item")
    if item_id is None and isinstance(item, dict):
        item_id = item.get("id")
    return _Place(
        0 if index is None else number(index),
        item_id if isinstance(item_id, str) and item_id else None,
    )
