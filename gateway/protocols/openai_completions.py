"""Adapter of OpenAI text completions. Pure.

A call has `n` choices for each prompt. An engine with our middleware gets the client's bytes. For
vLLM without it, the adapter requests token ids and log-probabilities and removes them from the
client's reply, unless the client requested them itself. It does not request them together with
`echo`: vLLM then omits the prompt from the echoed text, which would change the client's reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from gateway.asgi.error_replies import OPENAI_ERRORS, ErrorFormat
from gateway.errors import BadRequest
from gateway.protocols.base import (
    NOT_THE_PROTOCOL,
    Choice,
    EngineKind,
    ParsedEvent,
    ParsedReply,
    Request,
    Tokens,
)
from gateway.protocols.openai_stream import ChoicesAccumulator
from gateway.protocols.reply_fields import (
    array,
    array_or_none,
    choice_index,
    dumps,
    error_of,
    loads,
    mapping,
    text_or_none,
)
from gateway.protocols.request_fields import (
    error_text,
    model_of,
    n_of,
    object_of,
    stream_of,
    with_fields,
)
from gateway.protocols.token_fields import packed_tokens
from gateway.protocols.usage import usage_of

ECHOED = "vLLM without our middleware cannot report token ids with an echoed prompt"
NOTHING_SAMPLED = "the call requests only the echo of the prompt (max_tokens 0)"


MAX_CHOICES = 1024
"""Maximum number of steps of one call."""


class OpenAICompletions:
    """Adapter of `POST /v1/completions`."""

    name = "openai.completions"
    path = "/v1/completions"
    errors: ErrorFormat = OPENAI_ERRORS

    def parse_request(self, body: bytes) -> Request:
        payload = object_of(body)
        prompts, each = prompt_count(payload), n_of(payload)
        if prompts * each > MAX_CHOICES:
            raise BadRequest(
                f"prompt: {prompts} prompts with n={each} are more than {MAX_CHOICES} choices",
                "prompt",
            )
        return Request(
            model_of(payload), stream_of(payload), prompts * each, body, payload, prompts
        )

    def engine_body(self, request: Request, kind: EngineKind) -> bytes:
        return with_fields(request, _added(request.payload)) if kind == "vllm" else request.body

    def parse_reply(self, request: Request, kind: EngineKind, body: bytes) -> ParsedReply:
        try:
            payload = mapping(loads(body))
            if (error := error_of(payload)) is not None:
                return ParsedReply((), None, body, failure=error_text(error))
            choices = []
            for choice in array(payload["choices"]):
                buffer = _ChoiceBuffer()
                piece = _piece(choice, payload["choices"], request.payload, kind)
                buffer.add(piece)
                choices.append(buffer.choice(piece.which, request.payload, kind))
            model = text_or_none(payload.get("model"))
            if kind == "vllm" and _strip(payload["choices"], request.payload):
                body = orjson.dumps(payload)
        except NOT_THE_PROTOCOL as error:
            return ParsedReply((), None, body, unread=f"the reply is not a completion: {error!r}")
        return ParsedReply(tuple(choices), model, body, usage=usage_of(payload.get("usage")))

    def accumulator(self, request: Request, kind: EngineKind) -> OpenAICompletionsAccumulator:
        return OpenAICompletionsAccumulator(request, kind)


def prompt_count(payload: Mapping[str, Any]) -> int:
    """Return the number of prompts: a text, a list of texts, token ids, or lists of token ids.

    Checks only the first entry of a list: a prompt may have 100,000 ids, and the engine refuses a
    mixed list.

    Raises:
        BadRequest: The prompt has another type.
    """
    prompt, embeddings = payload.get("prompt"), payload.get("prompt_embeds")
    if isinstance(prompt, list):
        first = prompt[0] if prompt else None
        if prompt and not isinstance(first, str | list | int):
            raise BadRequest(
                "prompt: a list must hold strings, token ids or lists of token ids", "prompt"
            )
        prompts = 1 if isinstance(first, int) else len(prompt)
    elif prompt is None or isinstance(prompt, str):
        prompts = int(prompt is not None or embeddings is None)
    else:
        raise BadRequest("prompt: must be a string, a list of strings, or token ids", "prompt")
    # The engine refuses an empty list.
    return max(
        1,
        prompts
        + (len(embeddings) if isinstance(embeddings, list) else int(embeddings is not None)),
    )


def _added(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that make vLLM report token ids and log-probabilities."""
    if payload.get("echo"):
        return {}
    added: dict[str, Any] = {}
    if not payload.get("return_token_ids"):
        added["return_token_ids"] = True
    # Without logprobs this one is invalid, and the client must get the engine's error.
    if payload.get("logprobs") is None and not payload.get("logprob_token_ids"):
        added["logprobs"] = 0  # the sampled token alone
    return added


def _strip(choices: Sequence[dict[str, Any]], asked: Mapping[str, Any]) -> bool:
    """Set the added fields to null. Returns False when nothing changes."""
    added = _added(asked)
    ids, logprobs = "return_token_ids" in added, "logprobs" in added
    stripped = False
    for choice in choices:
        for name in ("token_ids", "prompt_token_ids") if ids else ():
            if choice.get(name) is not None:
                choice[name], stripped = None, True
        if logprobs and choice.get("logprobs") is not None:
            choice["logprobs"], stripped = None, True
    return stripped


def _samples_nothing(asked: Mapping[str, Any]) -> bool:
    """Tell whether the call only echoes the prompt. vLLM then samples a token and drops it."""
    return bool(asked.get("echo")) and asked.get("max_tokens") == 0


class _Piece(NamedTuple):
    """One choice of a reply, or its delta in a chunk."""

    which: int
    text: str
    finish_reason: str | None
    prompt_ids: list[Any] | None = None
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None


def _piece(choice: Any, choices: list[Any], asked: Mapping[str, Any], kind: EngineKind) -> _Piece:
    # Some last chunks have no text.
    index, payload = choice_index(choice, choices), text_or_none(choice.get("text")) or ""
    finish = text_or_none(choice.get("finish_reason"))
    if kind != "vllm":
        return _Piece(index, payload, finish)
    ids, told = array_or_none(choice.get("token_ids")), choice.get("logprobs")
    logprobs = array_or_none(mapping(told).get("token_logprobs")) if told is not None else None
    if logprobs is not None and ids is not None and asked.get("echo"):
        logprobs = logprobs[max(0, len(logprobs) - len(ids)) :]  # those of the prompt come first
    return _Piece(
        index, payload, finish, array_or_none(choice.get("prompt_token_ids")), ids, logprobs
    )


class _ChoiceBuffer:
    """Buffer of one choice."""

    __slots__ = ("finish_reason", "ids", "logprobs", "prompt_ids", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.prompt_ids: list[Any] | None = None
        self.ids: list[Any] | None = None
        self.logprobs: list[Any] | None = None
        self.finish_reason: str | None = None

    def add(self, piece: _Piece) -> None:
        self.texts.append(piece.text)
        self.finish_reason = piece.finish_reason or self.finish_reason
        if piece.prompt_ids is not None:
            self.prompt_ids = piece.prompt_ids
        if piece.ids is not None:
            self.ids = self.ids or []
            self.ids += piece.ids
        if piece.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += piece.logprobs

    def choice(self, index: int, asked: Mapping[str, Any], kind: EngineKind) -> Choice:
        message = dumps({"text": "".join(self.texts)})
        if _samples_nothing(asked):
            return Choice(index, message, self.finish_reason, Tokens(absent=NOTHING_SAMPLED))
        return Choice(
            index, message, self.finish_reason, self._tokens(asked) if kind == "vllm" else None
        )

    def _tokens(self, asked: Mapping[str, Any]) -> Tokens:
        if asked.get("echo") and not asked.get("return_token_ids"):
            return Tokens(absent=ECHOED)
        return packed_tokens(self.prompt_ids, self.ids, self.logprobs)


class OpenAICompletionsAccumulator(ChoicesAccumulator[_ChoiceBuffer]):
    """Accumulator of a streamed completion, see `base.ReplyAccumulator`."""

    def __init__(self, request: Request, kind: EngineKind) -> None:
        super().__init__(request, kind, _ChoiceBuffer)

    def _read_chunk(self, event: bytes, chunk: dict[str, Any]) -> ParsedEvent:
        choices = array(chunk.get("choices"))
        pieces = [_piece(choice, choices, self._asked, self._kind) for choice in choices]
        update = (text_or_none(chunk.get("model")), pieces, chunk.get("usage"))
        if self._kind == "vllm" and _strip(
            choices, self._asked
        ):  # the pieces keep the removed tokens
            event = b"data: " + orjson.dumps(chunk) + b"\n\n"
        return ParsedEvent(update, event, ends=any(p.finish_reason for p in pieces))

    def add(self, update: Any) -> None:
        model, pieces, usage = update
        self._model, self._usage = model or self._model, usage or self._usage
        for piece in pieces:
            self._buffer(piece.which).add(piece)

    def reply(self) -> ParsedReply:
        choices = (
            b.choice(index, self._asked, self._kind) for index, b in sorted(self._choices.items())
        )
        return ParsedReply(tuple(choices), self._model, b"", usage=usage_of(self._usage))
