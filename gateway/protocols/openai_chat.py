"""Adapter of OpenAI chat completions. Pure.

vLLM omits stream chunks that carry nothing but tokens that were not requested; the adapter removes
the chunks that the engine sends only because it requested tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.base import Choice, EngineKind, Request
from clawstream.gateway.protocols.message_deltas import begun, grow, grown, joined
from clawstream.gateway.protocols.openai_choices import ChoiceBuffer, ChoiceDelta, ChoicesAdapter
from clawstream.gateway.protocols.reply_fields import (
    array,
    array_or_none,
    choice_index,
    dumps,
    mapping,
    number,
    text_or_none,
)
from clawstream.gateway.protocols.request_fields import MAX_CHOICES, check_messages, n_of
from clawstream.gateway.protocols.request_fields import dumps as dumps_of_request
from clawstream.gateway.protocols.token_fields import packed_tokens

_Content = tuple[
    list[tuple[str, str]], list[tuple[str, Any]], list[tuple[int | None, dict[str, Any]]]
]
"""Delta of a message: text by field, other values by field, tool calls by index."""


class OpenAIChat(ChoicesAdapter):
    """Adapter of `POST /v1/chat/completions`."""

    name = "openai.chat"
    path = "/v1/chat/completions"
    reply_noun = "a chat completion"

    def token_fields(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        added: dict[str, Any] = {}
        if not payload.get("return_token_ids"):
            added["return_token_ids"] = True
        # Without logprobs these two are invalid, and the client must get the engine's error.
        if not any(map(payload.get, ("logprobs", "top_logprobs", "logprob_token_ids"))):
            added |= {"logprobs": True, "top_logprobs": 0}
        return added

    def buffer(self) -> _ChoiceBuffer:
        return _ChoiceBuffer()

    def delta(
        self, choice: Any, choices: list[Any], asked: Mapping[str, Any], kind: EngineKind
    ) -> ChoiceDelta:
        texts, fields, calls = [], [], []
        index, delta = choice_index(choice, choices), choice.get("delta")
        if delta is None:  # absent in content-filter chunks of Azure and some last chunks
            delta = choice.get("message") or {}  # some servers send a plain reply as one event
        for name, value in mapping(delta).items():
            if name == "tool_calls":
                calls += [_call(part) for part in array(value)]
            elif name != "role" and isinstance(value, str):
                texts.append((name, value))
            else:
                fields.append((name, value))
        finish, content = text_or_none(choice.get("finish_reason")), (texts, fields, calls)
        if kind != "vllm":
            return ChoiceDelta(index, content, finish)
        ids, logprobs = array_or_none(choice.get("token_ids")), logprobs_of(choice.get("logprobs"))
        return ChoiceDelta(index, content, finish, None, ids, logprobs)

    def has_content(self, content: _Content) -> bool:
        texts, fields, calls = content
        return bool(
            calls
            or any(text for _, text in texts)
            or any(value for name, value in fields if name != "role")
        )

    def only_tokens(self, chunk: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
        choices = chunk.get("choices") or []
        if len(choices) != 1 or asked.get("return_token_ids") or asked.get("logprobs"):
            return False
        only = choices[0]
        return not only.get("delta") and not only.get("finish_reason") and "token_ids" in only

    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        check_messages(payload)
        return n_of(payload), 1

    def _choices(
        self, payload: dict[str, Any], request: Request, kind: EngineKind
    ) -> tuple[Choice, ...]:
        choices, prompt_ids = payload["choices"], payload.get("prompt_token_ids")
        return tuple(
            Choice(
                index=choice_index(c, choices),
                message_json=dumps(mapping(c["message"])),
                finish_reason=text_or_none(c.get("finish_reason")),
                tokens=packed_tokens(prompt_ids, c.get("token_ids"), logprobs_of(c.get("logprobs")))
                if kind == "vllm"
                else None,
            )
            for c in choices
        )


class OpenAIChatBatch(OpenAIChat):
    """Adapter of `POST /v1/chat/completions/batch` of vLLM: a list of conversations.

    The reply has the choices of the first conversation, then those of the second. A step has the
    chat request of its own conversation.
    """

    path = "/v1/chat/completions/batch"
    has_turns = False

    def parse_request(self, body: bytes) -> Request:
        request = super().parse_request(body)
        dumps_of_request(request.payload)  # refuses now what no step could hold
        parts = tuple({**request.payload, "messages": each} for each in request.payload["messages"])
        return request._replace(parts=parts)

    def _check(self, payload: dict[str, Any]) -> tuple[int, int]:
        conversations = payload.get("messages")
        if not (isinstance(conversations, list) and conversations) or not all(
            isinstance(each, list) and all(isinstance(m, dict) for m in each)
            for each in conversations
        ):
            raise BadRequest("messages: must be a list of conversations", "messages")
        if payload.get("stream"):
            raise BadRequest("stream: a batch is not streamed", "stream")
        n = n_of(payload)
        if len(conversations) * n > MAX_CHOICES:
            raise BadRequest(
                f"messages: {len(conversations)} conversations with n={n} are more than "
                f"{MAX_CHOICES} choices",
                "messages",
            )
        return len(conversations) * n, len(conversations)


def logprobs_of(payload: object) -> list[Any] | None:
    """Return the log-probabilities of the sampled tokens."""
    content = array_or_none(mapping(payload).get("content")) if payload is not None else None
    return None if content is None else [entry["logprob"] for entry in content]


def _call(part: Any) -> tuple[int | None, dict[str, Any]]:
    index = mapping(part).get("index")
    return None if index is None else number(index), part


class _Calls:
    """Buffer of the tool calls of one choice.

    A delta begins a call if it has a new id, whatever its index: some providers give every call
    the index 0, and Gemini sends no index. Without an id, it begins a call if it has a name and the
    last call has one: without an index any name, with an index another name behind arguments.
    Every other delta belongs to the call with its id, else to the last call of its index.
    """

    __slots__ = ("_by_id", "_calls", "_last", "_next")

    def __init__(self) -> None:
        self._calls: list[tuple[int, dict[str, Any]]] = []
        self._by_id: dict[tuple[int | None, str], dict[str, Any]] = {}
        self._last: dict[int | None, dict[str, Any]] = {}  # None: the last call of all
        self._next = 0

    def add(self, index: int | None, part: dict[str, Any]) -> None:
        call = self._call(index, part)
        if call is None:
            call = {}
            place = self._next if index is None else index
            self._calls.append((place, call))
            self._next = max(self._next, place + 1)
        self._last[index] = self._last[None] = call
        made = part.get("id")
        if isinstance(made, str) and made:
            self._by_id[index, made] = self._by_id[None, made] = call
        grow(call, part)

    def whole(self) -> list[dict[str, Any]]:
        """Return the calls in order, without their index, as in a plain reply."""
        found = sorted(self._calls, key=itemgetter(0))
        return [
            joined({name: value for name, value in call.items() if name != "index"})
            for _, call in found
        ]

    def _call(self, index: int | None, part: dict[str, Any]) -> dict[str, Any] | None:
        """Return the call that a delta continues; None: it begins one."""
        made, last = part.get("id"), self._last.get(index)
        if isinstance(made, str) and made:
            known = self._by_id.get((index, made))
            if known is not None or last is None or last.get("id"):
                return known
            whole = _field(part, "name") and _field(last, "name")
            return None if whole else last  # its id may come later than its name
        if last is None or not (name := _field(part, "name")):
            return last
        before = _field(last, "name")
        if index is None:
            return None if before else last
        return None if before not in (None, "", name) and _field(last, "arguments") else last


def _field(call: dict[str, Any], name: str) -> object:
    """Return a field of the called function if the delta has it."""
    function = call.get("function")
    return function.get(name) if isinstance(function, dict) else None


class _ChoiceBuffer(ChoiceBuffer):
    """Buffer of one choice, merged by `message_deltas`.

    A field that gets only strings is kept as a list of pieces.
    """

    __slots__ = ("calls", "fields", "texts")

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.calls: _Calls | None = None

    def add(self, content: _Content) -> None:
        texts, fields, calls = content
        for name, text in texts:
            parts = self.texts.get(name)
            if parts is not None:
                parts.append(text)
            elif self.fields.get(name) is None:
                self.texts[name] = [text]
            else:
                self.fields[name] = grown(self.fields[name], text)
        for name, value in fields:
            self._add_field(name, value)
        for index, part in calls:
            self.calls = self.calls or _Calls()
            self.calls.add(index, part)

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

    def message(self) -> bytes:
        message = {"role": "assistant", "content": None} | joined(self.fields)
        message |= {name: "".join(parts) for name, parts in self.texts.items()}
        if self.calls is not None:
            message["tool_calls"] = self.calls.whole()
        return dumps(message)
