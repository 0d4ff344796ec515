"""OpenAI chat completions. Pure: bytes in, bytes and choices out.

An engine with our middleware gets the client's own bytes, and its reply goes to the client as it is. A vLLM without it is asked for
token ids and log-probabilities in the request (`return_token_ids`, `logprobs`), and they are taken out again of what the client sees,
unless it asked for them itself: vLLM writes these fields as null when they are not asked for, and leaves out stream chunks that carry
nothing else; so do we, and a client cannot tell the difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from gateway.choices_fold import ChoicesFold
from gateway.error_reply import OPENAI
from gateway.errors import UpstreamFailed
from gateway.protocol import Answer, Choice, Errors, Kind, Part, Request
from gateway.reply_body import array, array_or_none, mapping, number, text_or_none
from gateway.request_body import check_messages, model_of, n_of, object_of, stream_of, with_fields
from gateway.tokens import packed_tokens


class OpenAIChat:
    """The dialect."""

    name = "openai.chat"
    path = "/v1/chat/completions"
    errors: Errors = OPENAI

    def request(self, body: bytes) -> Request:
        said = object_of(body)
        check_messages(said)
        return Request(model_of(said), stream_of(said), n_of(said), body, said)

    def engine_body(self, request: Request, kind: Kind) -> bytes:
        return with_fields(request, _added(request.said)) if kind == "vllm" else request.body

    def answer(self, request: Request, kind: Kind, body: bytes) -> Answer:
        try:
            said = mapping(orjson.loads(body))
            model = text_or_none(said.get("model"))
            prompt_ids = said.get("prompt_token_ids")
            choices = tuple(
                Choice(
                    index=number(c["index"]),
                    message_json=orjson.dumps(mapping(c["message"])),
                    finish_reason=text_or_none(c.get("finish_reason")),
                    tokens=packed_tokens(prompt_ids, c.get("token_ids"), logprobs_of(c.get("logprobs")))
                    if kind == "vllm"
                    else None,
                )
                for c in said["choices"]
            )
            if kind == "vllm" and _strip(said, request.said):
                body = orjson.dumps(said)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UpstreamFailed(f"the engine's reply is no chat completion: {error!r}") from error
        return Answer(choices, model, body)

    def fold(self, request: Request, kind: Kind) -> OpenAIChatFold:
        return OpenAIChatFold(request, kind)


def _added(said: Any) -> dict[str, Any]:
    """The fields that make a vLLM tell tokens and log-probabilities."""
    added: dict[str, Any] = {}
    if not said.get("return_token_ids"):
        added["return_token_ids"] = True
    # Without logprobs these two are errors, and the client must see the engine's error, not be saved from it.
    if not said.get("logprobs") and not said.get("top_logprobs") and not said.get("logprob_token_ids"):
        added |= {"logprobs": True, "top_logprobs": 0}
    return added


def _strip(reply: dict[str, Any], asked: Any) -> bool:
    """Take out what we added: null where the engine would have said null. False: the client asked for all of it."""
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


def logprobs_of(said: object) -> list[Any] | None:
    """The sampled tokens' log-probabilities."""
    content = array_or_none(mapping(said).get("content")) if said is not None else None
    return None if content is None else [entry["logprob"] for entry in content]


class _Piece(NamedTuple):
    """What a chunk says of one choice. texts: pieces of strings by field; fields: values that replace; calls: by index, parts of tool calls."""

    which: int
    texts: list[tuple[str, str]]
    fields: list[tuple[str, Any]]
    calls: list[tuple[int, dict[str, Any]]]
    finish_reason: str | None
    ids: list[Any] | None
    logprobs: list[Any] | None


def _piece(choice: Any, kind: Kind) -> _Piece:
    texts, fields, calls = [], [], []
    for name, value in mapping(choice["delta"]).items():
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
        return _Piece(number(choice["index"]), texts, fields, calls, finish, None, None)
    ids, logprobs = array_or_none(choice.get("token_ids")), logprobs_of(choice.get("logprobs"))
    return _Piece(number(choice["index"]), texts, fields, calls, finish, ids, logprobs)


def _call(part: Any) -> tuple[int, dict[str, Any]]:
    part = mapping(part)
    function = part.get("function")
    if function is not None:
        text_or_none(mapping(function).get("arguments"))
    return number(part.get("index") or 0), part


class _Building:
    """One choice of a stream, growing. Values of a delta: strings are appended to, tool calls merged by index, others replaced."""

    __slots__ = ("calls", "fields", "finish_reason", "ids", "logprobs", "texts")

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.ids: list[Any] | None = None
        self.logprobs: list[Any] | None = None
        self.finish_reason: str | None = None

    def add(self, piece: _Piece) -> None:
        for name, text in piece.texts:
            self.texts.setdefault(name, []).append(text)
        for name, value in piece.fields:
            if value is not None or name not in self.fields:
                self.fields[name] = value
        for at, part in piece.calls:
            self._add_call(self.calls.setdefault(at, {}), part)
        if piece.ids is not None:
            self.ids = self.ids or []
            self.ids += piece.ids
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason or self.finish_reason

    def _add_call(self, call: dict[str, Any], part: dict[str, Any]) -> None:
        for name, value in part.items():
            if name == "function" and isinstance(value, dict):
                function = call.get("function")
                if not isinstance(function, dict):
                    function = call["function"] = {}
                for key, piece in value.items():
                    if key == "arguments" and piece is not None:
                        function[key] = (function.get(key) or "") + piece
                    elif piece or key not in function:
                        function[key] = piece
            elif name != "index" and (value is not None or name not in call):
                call[name] = value

    def choice(self, index: int, kind: Kind, prompt_ids: list[Any] | None) -> Choice:
        message = {"role": "assistant", "content": None} | self.fields
        message |= {name: "".join(parts) for name, parts in self.texts.items()}
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        tokens = packed_tokens(prompt_ids, self.ids, self.logprobs) if kind == "vllm" else None
        return Choice(index, orjson.dumps(message), self.finish_reason, tokens)


class OpenAIChatFold(ChoicesFold[_Building]):
    """A streamed reply: see `protocol.Fold`."""

    def __init__(self, request: Request, kind: Kind) -> None:
        super().__init__(request, kind, _Building)
        self._prompt_ids: list[Any] | None = None

    def _read_chunk(self, event: bytes, chunk: dict[str, Any]) -> Part:
        pieces = [_piece(c, self._kind) for c in array(chunk.get("choices"))]
        payload = (text_or_none(chunk.get("model")), array_or_none(chunk.get("prompt_token_ids")), pieces)
        if self._kind == "vllm":  # the pieces have what is taken out
            event = self._shown(chunk, event)
        return Part(payload, event, ends=any(p.finish_reason for p in pieces))

    def _shown(self, chunk: dict[str, Any], event: bytes) -> bytes:
        choices = chunk.get("choices") or []
        if not (self._asked.get("return_token_ids") or self._asked.get("logprobs")) and len(choices) == 1:
            only = choices[0]
            if not only["delta"] and not only.get("finish_reason") and "token_ids" in only:
                return b""  # the engine sends such a chunk only because it was asked for tokens
        return b"data: " + orjson.dumps(chunk) + b"\n\n" if _strip(chunk, self._asked) else event

    def add(self, payload: Any) -> None:
        model, prompt_ids, pieces = payload
        self._model = model or self._model
        if prompt_ids is not None:
            self._prompt_ids = prompt_ids
        for piece in pieces:
            self._building(piece.which).add(piece)

    def answer(self) -> Answer:
        choices = tuple(b.choice(i, self._kind, self._prompt_ids) for i, b in sorted(self._choices.items()))
        return Answer(choices, self._model, b"")
