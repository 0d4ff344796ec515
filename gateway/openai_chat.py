"""OpenAI chat completions as vLLM speaks them. Pure: bytes in, bytes and choices out.

Token ids and log-probabilities are asked of the engine (`return_token_ids`, `logprobs`) and taken out again of what the client sees,
unless it asked for them itself. vLLM writes these fields as null when they are not asked for, and leaves out stream chunks that carry
nothing else; so do we, and a client cannot tell the difference.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.error_reply import event_of
from gateway.errors import BadRequest, GatewayError, UpstreamFailed
from gateway.protocol import Answer, Choice, Request
from gateway.sse import Splitter, data_of

MAX_N = 128
SPANS_COMMENT = b": clawstream-versions "


class OpenAIChat:
    """The dialect."""

    name = "openai.chat"
    path = "/v1/chat/completions"

    def request(self, body: bytes) -> Request:
        said = _object(body)
        messages = said.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("messages: must be a list of message objects", "messages")
        model = said.get("model")
        if not (model is None or isinstance(model, str)):
            raise BadRequest("model: must be a string", "model")
        stream = said.get("stream")
        if not (stream is None or isinstance(stream, bool)):
            raise BadRequest("stream: must be true or false", "stream")
        n = said.get("n")
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_N):
            raise BadRequest(f"n: must be a whole number from 1 to {MAX_N}", "n")
        return Request(
            model=model,
            stream=bool(stream),
            n=n or 1,
            body=_with(body, said, _added(said)),
            keep_logprobs=bool(said.get("logprobs")),
            keep_ids=bool(said.get("return_token_ids")),
        )

    def answer(self, request: Request, body: bytes, spans: bytes | None) -> Answer:
        try:
            said = orjson.loads(body)
            per_choice = _spans(spans, len(said["choices"]))
            choices = tuple(
                Choice(
                    index=c["index"],
                    message_json=orjson.dumps(c["message"]),
                    finish_reason=c.get("finish_reason"),
                    token_ids=c.get("token_ids"),
                    logprobs=_logprobs(c.get("logprobs")),
                    spans=per_choice[at] if per_choice else None,
                )
                for at, c in enumerate(said["choices"])
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UpstreamFailed(f"the engine's reply is no chat completion: {error!r}") from error
        answer = Answer(choices, said.get("prompt_token_ids"), said.get("model"), body)
        if request.keep_ids and request.keep_logprobs:
            return answer
        _strip(said, request)
        return Answer(answer.choices, answer.prompt_ids, answer.model, orjson.dumps(said))

    def stream(self, request: Request) -> OpenAIChatStream:
        return OpenAIChatStream(request)

    def error_event(self, error: GatewayError) -> bytes:
        return event_of(error)


def _object(body: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"body: not JSON: {error}", "body") from error
    if not isinstance(said, dict):
        raise BadRequest("body: must be a JSON object", "body")
    return said


def _added(said: dict[str, Any]) -> dict[str, Any]:
    """The fields that make the engine tell tokens and log-probabilities."""
    added: dict[str, Any] = {}
    if not said.get("return_token_ids"):
        added["return_token_ids"] = True
    # Without logprobs these two are errors, and the client must see the engine's error, not be saved from it.
    if not said.get("logprobs") and not said.get("top_logprobs") and not said.get("logprob_token_ids"):
        added |= {"logprobs": True, "top_logprobs": 0}
    return added


def _with(body: bytes, said: dict[str, Any], added: dict[str, Any]) -> bytes:
    """The body with fields added. Where none of them was there before, the client's own bytes stay as they are."""
    if not added:
        return body
    if added.keys() & said.keys() or not said:
        return orjson.dumps(said | added)
    return body.rstrip(b" \t\r\n")[:-1] + b"," + orjson.dumps(added)[1:]


def _strip(said: dict[str, Any], request: Request) -> None:
    """Take out what we added: null where the engine would have said null."""
    if not request.keep_ids and "prompt_token_ids" in said:
        said["prompt_token_ids"] = None
    for choice in said["choices"]:
        if not request.keep_ids and "token_ids" in choice:
            choice["token_ids"] = None
        if not request.keep_logprobs and "logprobs" in choice:
            choice["logprobs"] = None


def _logprobs(said: dict[str, Any] | None) -> list[float] | None:
    """The sampled tokens' log-probabilities."""
    if said is None or said.get("content") is None:
        return None
    return [entry["logprob"] for entry in said["content"]]


def _spans(said: bytes | None, choices: int) -> list[Any] | None:
    """The engine's version spans, a list per choice; None when they do not fit."""
    if said is None:
        return None
    try:
        per_choice = orjson.loads(said)
    except orjson.JSONDecodeError:
        return None
    return per_choice if isinstance(per_choice, list) and len(per_choice) == choices else None


class _Building:
    """One choice of a stream, growing. Values of a delta: strings are appended to, tool calls merged by index, others replaced."""

    def __init__(self) -> None:
        self.message: dict[str, Any] = {}
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.has_ids = self.has_logprobs = False
        self.finish_reason: str | None = None

    def add(self, choice: dict[str, Any]) -> None:
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for part in value or ():
                    self._add_call(part)
            elif name != "role" and isinstance(value, str):
                self.texts.setdefault(name, []).append(value)
            elif value is not None or name not in self.message:
                self.message[name] = value
        ids = choice.get("token_ids")
        if ids is not None:
            self.ids += ids
            self.has_ids = True
        logprobs = _logprobs(choice.get("logprobs"))
        if logprobs is not None:
            self.logprobs += logprobs
            self.has_logprobs = True
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def _add_call(self, part: dict[str, Any]) -> None:
        call = self.calls.setdefault(part.get("index", 0), {})
        for name, value in part.items():
            if name == "function" and isinstance(value, dict):
                function = call.setdefault("function", {})
                for key, piece in value.items():
                    both_text = key == "arguments" and isinstance(piece, str)
                    function[key] = function.get(key, "") + piece if both_text else piece or function.get(key)
            elif name != "index" and (value is not None or name not in call):
                call[name] = value

    def choice(self, index: int, spans: object) -> Choice:
        message = {"role": "assistant", "content": None} | self.message
        message |= {name: "".join(parts) for name, parts in self.texts.items()}
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return Choice(
            index=index,
            message_json=orjson.dumps(message),
            finish_reason=self.finish_reason,
            token_ids=self.ids if self.has_ids else None,
            logprobs=self.logprobs if self.has_logprobs else None,
            spans=spans,
        )


class _Said:
    """What a run of chunks said, folded."""

    def __init__(self) -> None:
        self.choices: dict[int, _Building] = {}
        self.prompt_ids: list[int] | None = None
        self.model: str | None = None

    def add(self, chunk: dict[str, Any]) -> None:
        if chunk.get("prompt_token_ids") is not None:
            self.prompt_ids = chunk["prompt_token_ids"]
        self.model = chunk.get("model") or self.model
        for choice in chunk.get("choices") or ():
            self.choices.setdefault(choice["index"], _Building()).add(choice)


class OpenAIChatStream:
    """A streamed reply: see `protocol.Stream`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._splitter = Splitter()
        self._said = _Said()
        self._held: list[bytes] = []
        self._held_chunks: list[dict[str, Any]] = []
        self._holding = False
        self._spans: bytes | None = None
        self.ended = False
        self.failure: str | None = None

    def feed(self, data: bytes) -> bytes:
        try:
            return b"".join([self._event(event) for event in self._splitter.feed(data)])
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            self.fail(UpstreamFailed(f"the engine's stream is no chat completion: {error!r}"))
            return b""

    def _event(self, event: bytes) -> bytes:
        if event.startswith(SPANS_COMMENT):
            self._spans = event[len(SPANS_COMMENT) :]
            return b""
        data = data_of(event)
        if data is None:
            return self._pass(event)
        if data == b"[DONE]":
            self._holding = self.ended = True
            return self._pass(event)
        chunk = orjson.loads(data)
        if "error" in chunk:
            self.failure = _error_text(chunk["error"])
            self._holding = True
            return self._pass(event)
        # Kept as a copy, for the fold sees what the engine said and the client does not.
        original, shown = chunk, self._shown(chunk, event)
        self._holding = self._holding or any(c.get("finish_reason") for c in original.get("choices") or ())
        if self._holding:
            self._held_chunks.append(original)
        else:
            self._said.add(original)
        return self._pass(shown)

    def _pass(self, event: bytes) -> bytes:
        if not self._holding:
            return event
        self._held.append(event)
        return b""

    def _shown(self, chunk: dict[str, Any], event: bytes) -> bytes:
        request = self._request
        if request.keep_ids and request.keep_logprobs:
            return event
        choices = chunk.get("choices") or []
        if not (request.keep_ids or request.keep_logprobs) and len(choices) == 1:
            only = choices[0]
            if not only["delta"] and not only.get("finish_reason") and "token_ids" in only:
                return b""  # the engine sends such a chunk only because it was asked for tokens
        shown = chunk | {"choices": [dict(c) for c in choices]}
        _strip(shown, request)
        return b"data: " + orjson.dumps(shown) + b"\n\n"

    def close(self) -> None:
        unfinished = self._request.n - sum(1 for b in self._all().choices.values() if b.finish_reason)
        if self.failure is None and not self.ended and unfinished:
            missing = f"{unfinished} of {self._request.n} choices had ended"
            self.fail(UpstreamFailed(f"the engine closed the stream before {missing}"))

    def fail(self, error: GatewayError) -> None:
        self.failure, self.ended, self._holding = error.message, True, True
        self._held.append(event_of(error))

    def held(self) -> bytes:
        return b"".join(self._held)

    def sent(self) -> Answer:
        return self._answer(self._said)

    def whole(self) -> Answer:
        return self._answer(self._all())

    def _all(self) -> _Said:
        for chunk in self._held_chunks:
            self._said.add(chunk)
        self._held_chunks = []
        return self._said

    def _answer(self, said: _Said) -> Answer:
        spans = _spans(self._spans, self._request.n)
        choices = tuple(
            building.choice(index, spans[index] if spans and index < len(spans) else None)
            for index, building in sorted(said.choices.items())
        )
        return Answer(choices, said.prompt_ids, said.model, b"")


def _error_text(error: object) -> str:
    return str(error.get("message")) if isinstance(error, dict) else str(error)
