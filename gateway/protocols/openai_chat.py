"""Adapter of OpenAI chat completions. Pure.

An engine with our middleware gets the client's bytes, and its reply passes unchanged. For vLLM
without the middleware, the adapter requests token ids and log-probabilities (`return_token_ids`,
`logprobs`) and removes them from the client's reply, unless the client requested them itself.
vLLM writes these fields as null when they are not requested, and omits stream chunks that carry
nothing else. The adapter does the same, so a client sees no difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from gateway.asgi.error_replies import OPENAI_ERRORS, ErrorFormat
from gateway.protocols.base import (
    NOT_THE_PROTOCOL,
    Choice,
    EngineKind,
    ParsedEvent,
    ParsedReply,
    Request,
)
from gateway.protocols.message_deltas import begun, grow, grown
from gateway.protocols.openai_stream import ChoicesAccumulator
from gateway.protocols.reply_fields import (
    array,
    array_or_none,
    choice_index,
    dumps,
    error_of,
    loads,
    mapping,
    number,
    text_or_none,
)
from gateway.protocols.request_fields import (
    check_messages,
    error_text,
    model_of,
    n_of,
    object_of,
    stream_of,
    with_fields,
)
from gateway.protocols.token_fields import packed_tokens
from gateway.protocols.usage import usage_of


class OpenAIChat:
    """Adapter of `POST /v1/chat/completions`."""

    name = "openai.chat"
    path = "/v1/chat/completions"
    errors: ErrorFormat = OPENAI_ERRORS

    def parse_request(self, body: bytes) -> Request:
        payload = object_of(body)
        check_messages(payload)
        return Request(model_of(payload), stream_of(payload), n_of(payload), body, payload)

    def engine_body(self, request: Request, kind: EngineKind) -> bytes:
        return with_fields(request, _added(request.payload)) if kind == "vllm" else request.body

    def parse_reply(self, request: Request, kind: EngineKind, body: bytes) -> ParsedReply:
        try:
            payload = mapping(loads(body))
            if (error := error_of(payload)) is not None:
                return ParsedReply((), None, body, failure=error_text(error))
            model = text_or_none(payload.get("model"))
            prompt_ids = payload.get("prompt_token_ids")
            choices = tuple(
                Choice(
                    index=choice_index(c, payload["choices"]),
                    message_json=dumps(mapping(c["message"])),
                    finish_reason=text_or_none(c.get("finish_reason")),
                    tokens=packed_tokens(
                        prompt_ids, c.get("token_ids"), logprobs_of(c.get("logprobs"))
                    )
                    if kind == "vllm"
                    else None,
                )
                for c in payload["choices"]
            )
            if kind == "vllm" and _strip(payload, request.payload):
                body = orjson.dumps(payload)
        except NOT_THE_PROTOCOL as error:
            return ParsedReply(
                (), None, body, unread=f"the reply is not a chat completion: {error!r}"
            )
        return ParsedReply(choices, model, body, usage=usage_of(payload.get("usage")))

    def accumulator(self, request: Request, kind: EngineKind) -> OpenAIChatAccumulator:
        return OpenAIChatAccumulator(request, kind)


def _added(payload: Any) -> dict[str, Any]:
    """Return the fields that make vLLM report token ids and log-probabilities."""
    added: dict[str, Any] = {}
    if not payload.get("return_token_ids"):
        added["return_token_ids"] = True
    # Without logprobs these two are invalid, and the client must get the engine's error.
    if (
        not payload.get("logprobs")
        and not payload.get("top_logprobs")
        and not payload.get("logprob_token_ids")
    ):
        added |= {"logprobs": True, "top_logprobs": 0}
    return added


def _strip(reply: dict[str, Any], asked: Any) -> bool:
    """Set the added fields to null, as vLLM does when they are not requested.

    Returns False when the client requested all of them.
    """
    keep_ids, keep_logprobs = bool(asked.get("return_token_ids")), bool(asked.get("logprobs"))
    if keep_ids and keep_logprobs:
        return False
    if not keep_ids and "prompt_token_ids" in reply:
        reply["prompt_token_ids"] = None
    for choice in reply.get("choices") or ():
        if not keep_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if not keep_logprobs and "logprobs" in choice:
            choice["logprobs"] = None
    return True


def logprobs_of(payload: object) -> list[Any] | None:
    """Return the log-probabilities of the sampled tokens."""
    content = array_or_none(mapping(payload).get("content")) if payload is not None else None
    return None if content is None else [entry["logprob"] for entry in content]


class _Piece(NamedTuple):
    """Delta of one choice in a chunk.

    texts: String deltas by field. fields: Other values. calls: Deltas of tool calls with index.
    """

    which: int
    texts: list[tuple[str, str]]
    fields: list[tuple[str, Any]]
    calls: list[tuple[int | None, dict[str, Any]]]
    finish_reason: str | None
    ids: list[Any] | None
    logprobs: list[Any] | None


def _piece(choice: Any, choices: list[Any], kind: EngineKind) -> _Piece:
    texts, fields, calls = [], [], []
    index, delta = choice_index(choice, choices), choice.get("delta")
    if delta is None:  # absent in content-filter chunks of Azure and some last chunks
        delta = {}
    for name, value in mapping(delta).items():
        if name == "content" and isinstance(value, str):
            texts.append((name, value))
        elif name == "tool_calls":
            calls += [_call(part) for part in array(value)]
        elif name != "role" and isinstance(value, str):
            texts.append((name, value))
        else:
            fields.append((name, value))
    finish = text_or_none(choice.get("finish_reason"))
    if kind != "vllm":
        return _Piece(index, texts, fields, calls, finish, None, None)
    ids, logprobs = array_or_none(choice.get("token_ids")), logprobs_of(choice.get("logprobs"))
    return _Piece(index, texts, fields, calls, finish, ids, logprobs)


def _call(part: Any) -> tuple[int | None, dict[str, Any]]:
    index = mapping(part).get("index")
    return None if index is None else number(index), part


class _Calls:
    """Buffer of the tool calls of one choice.

    Gemini sends no index. Then a delta with a new id, or with a name when the last call has a
    name, begins a call. Any other delta belongs to the call with its id, else to the last call.
    """

    __slots__ = ("_last", "_next", "_places", "calls")

    def __init__(self) -> None:
        self.calls: dict[int, dict[str, Any]] = {}
        self._places: dict[str, int] = {}
        self._last = self._next = 0

    def add(self, index: int | None, part: dict[str, Any]) -> None:
        place = self._place(part) if index is None else index
        self._last, self._next = place, max(self._next, place + 1)
        call = self.calls.get(place)
        if call is None:
            call = self.calls[place] = {}
        grow(call, part)

    def whole(self) -> list[dict[str, Any]]:
        """Return the calls in order, without their index, as in a plain reply."""
        found = sorted(self.calls.items())
        return [
            {name: value for name, value in call.items() if name != "index"} for _, call in found
        ]

    def _place(self, part: dict[str, Any]) -> int:
        made = part.get("id")
        if isinstance(made, str) and made:
            return self._places.setdefault(made, self._next)
        last = self.calls.get(self._last)
        return self._next if last is None or (_name(part) and _name(last)) else self._last


def _name(call: dict[str, Any]) -> object:
    """Return the name of the called function if the delta has it."""
    function = call.get("function")
    return function.get("name") if isinstance(function, dict) else None


class _ChoiceBuffer:
    """Buffer of one choice, merged by `message_deltas`.

    A field that gets only strings is kept as a list of pieces.
    """

    __slots__ = ("calls", "fields", "finish_reason", "ids", "logprobs", "texts")

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.calls: _Calls | None = None
        self.ids: list[Any] | None = None
        self.logprobs: list[Any] | None = None
        self.finish_reason: str | None = None

    def add(self, piece: _Piece) -> None:
        for name, text in piece.texts:
            parts = self.texts.get(name)
            if parts is not None:
                parts.append(text)
            elif self.fields.get(name) is None:
                self.texts[name] = [text]
            else:
                self.fields[name] = grown(self.fields[name], text)
        for name, value in piece.fields:
            self._add_field(name, value)
        for index, part in piece.calls:
            self.calls = self.calls or _Calls()
            self.calls.add(index, part)
        if piece.ids is not None:
            self.ids = self.ids or []
            self.ids += piece.ids
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason

    def _add_field(self, name: str, value: Any) -> None:
        if value is None:
            self.fields.setdefault(name, None)
        elif name == "role":
            self.fields[name] = value or self.fields.get(name)
        elif (parts := self.texts.pop(name, None)) is not None:
            self.fields[name] = grown("".join(parts), value)
        else:
            before = self.fields.get(name)
            self.fields[name] = begun(value) if before is None else grown(before, value)

    def choice(self, index: int, kind: EngineKind, prompt_ids: list[Any] | None) -> Choice:
        message = {"role": "assistant", "content": None} | self.fields
        message |= {name: "".join(parts) for name, parts in self.texts.items()}
        if self.calls is not None:
            message["tool_calls"] = self.calls.whole()
        tokens = packed_tokens(prompt_ids, self.ids, self.logprobs) if kind == "vllm" else None
        return Choice(index, dumps(message), self.finish_reason, tokens)


class OpenAIChatAccumulator(ChoicesAccumulator[_ChoiceBuffer]):
    """Accumulator of a streamed chat completion, see `base.ReplyAccumulator`."""

    def __init__(self, request: Request, kind: EngineKind) -> None:
        super().__init__(request, kind, _ChoiceBuffer)
        self._prompt_ids: list[Any] | None = None

    def _read_chunk(self, event: bytes, chunk: dict[str, Any]) -> ParsedEvent:
        choices = array(chunk.get("choices"))
        pieces = [_piece(choice, choices, self._kind) for choice in choices]
        update = (
            text_or_none(chunk.get("model")),
            array_or_none(chunk.get("prompt_token_ids")),
            pieces,
            chunk.get("usage"),
        )
        if self._kind == "vllm":  # the pieces keep the removed tokens
            event = self._client_event(chunk, event)
        return ParsedEvent(update, event, ends=any(p.finish_reason for p in pieces))

    def _client_event(self, chunk: dict[str, Any], event: bytes) -> bytes:
        choices = chunk.get("choices") or []
        if (
            not (self._asked.get("return_token_ids") or self._asked.get("logprobs"))
            and len(choices) == 1
        ):
            only = choices[0]
            if not only.get("delta") and not only.get("finish_reason") and "token_ids" in only:
                return b""  # the engine sends this chunk only because tokens were requested
        return b"data: " + orjson.dumps(chunk) + b"\n\n" if _strip(chunk, self._asked) else event

    def add(self, update: Any) -> None:
        model, prompt_ids, pieces, usage = update
        self._model, self._usage = model or self._model, usage or self._usage
        if prompt_ids is not None:
            self._prompt_ids = prompt_ids
        for piece in pieces:
            self._buffer(piece.which).add(piece)

    def reply(self) -> ParsedReply:
        choices = tuple(
            b.choice(i, self._kind, self._prompt_ids) for i, b in sorted(self._choices.items())
        )
        return ParsedReply(choices, self._model, b"", usage=usage_of(self._usage))
