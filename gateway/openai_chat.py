"""OpenAI chat completions. Pure: bytes in, bytes and choices out.

An engine with our middleware gets the client's own bytes, and its reply goes to the client as it is. A vLLM without it is asked for
token ids and log-probabilities in the request (`return_token_ids`, `logprobs`), and they are taken out again of what the client sees,
unless it asked for them itself: vLLM writes these fields as null when they are not asked for, and leaves out stream chunks that carry
nothing else; so do we, and a client cannot tell the difference.
"""

from __future__ import annotations

from typing import Any

import orjson

from gateway.error_reply import OPENAI
from gateway.errors import BadRequest, GatewayError, UpstreamFailed
from gateway.protocol import Answer, Choice, Errors, Kind, Part, Request
from gateway.request_body import error_text, model_of, n_of, object_of, stream_of, with_fields
from gateway.tokens import packed_tokens

DONE = b"[DONE]"


class OpenAIChat:
    """The dialect."""

    name = "openai.chat"
    path = "/v1/chat/completions"
    errors: Errors = OPENAI

    def request(self, body: bytes) -> Request:
        said = object_of(body)
        messages = said.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadRequest("messages: must be a list of message objects", "messages")
        return Request(model_of(said), stream_of(said), n_of(said), body, said)

    def engine_body(self, request: Request, kind: Kind) -> bytes:
        return with_fields(request, _added(request.said)) if kind == "vllm" else request.body

    def answer(self, request: Request, kind: Kind, body: bytes) -> Answer:
        try:
            said = orjson.loads(body)
            prompt_ids = said.get("prompt_token_ids")
            choices = tuple(
                Choice(
                    index=c["index"],
                    message_json=orjson.dumps(c["message"]),
                    finish_reason=c.get("finish_reason"),
                    tokens=packed_tokens(prompt_ids, c.get("token_ids"), logprobs_of(c.get("logprobs")))
                    if kind == "vllm"
                    else None,
                )
                for c in said["choices"]
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UpstreamFailed(f"the engine's reply is no chat completion: {error!r}") from error
        if kind == "vllm" and _strip(said, request.said):
            body = orjson.dumps(said)
        return Answer(choices, said.get("model"), body)

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


def logprobs_of(said: dict[str, Any] | None) -> list[float] | None:
    """The sampled tokens' log-probabilities."""
    if said is None or said.get("content") is None:
        return None
    return [entry["logprob"] for entry in said["content"]]


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
        logprobs = logprobs_of(choice.get("logprobs"))
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

    def choice(self, index: int, tokens: bool, prompt_ids: list[int] | None) -> Choice:
        message = {"role": "assistant", "content": None} | self.message
        message |= {name: "".join(parts) for name, parts in self.texts.items()}
        if self.calls:
            message["tool_calls"] = [self.calls[i] for i in sorted(self.calls)]
        return Choice(
            index=index,
            message_json=orjson.dumps(message),
            finish_reason=self.finish_reason,
            tokens=packed_tokens(
                prompt_ids, self.ids if self.has_ids else None, self.logprobs if self.has_logprobs else None
            )
            if tokens
            else None,
        )


class OpenAIChatFold:
    """A streamed reply: see `protocol.Fold`."""

    def __init__(self, request: Request, kind: Kind) -> None:
        self._n, self._asked, self._tokens = request.n, request.said, kind == "vllm"
        self._choices: dict[int, _Building] = {}
        self._prompt_ids: list[int] | None = None
        self._model: str | None = None

    def read(self, event: bytes, data: bytes) -> Part:
        if data == DONE:
            return Part(None, event, last=True)
        chunk = orjson.loads(data)
        if "error" in chunk:
            return Part(None, event, failure=error_text(chunk["error"]))
        ends = any(c.get("finish_reason") for c in chunk.get("choices") or ())
        return Part(chunk, self._shown(chunk, event) if self._tokens else event, ends)

    def _shown(self, chunk: dict[str, Any], event: bytes) -> bytes:
        choices = chunk.get("choices") or []
        if not (self._asked.get("return_token_ids") or self._asked.get("logprobs")) and len(choices) == 1:
            only = choices[0]
            if not only["delta"] and not only.get("finish_reason") and "token_ids" in only:
                return b""  # the engine sends such a chunk only because it was asked for tokens
        shown = chunk | {"choices": [dict(c) for c in choices]}
        return b"data: " + orjson.dumps(shown) + b"\n\n" if _strip(shown, self._asked) else event

    def add(self, payload: Any) -> None:
        if payload.get("prompt_token_ids") is not None:
            self._prompt_ids = payload["prompt_token_ids"]
        self._model = payload.get("model") or self._model
        for choice in payload.get("choices") or ():
            self._choices.setdefault(choice["index"], _Building()).add(choice)

    def answer(self) -> Answer:
        choices = tuple(b.choice(i, self._tokens, self._prompt_ids) for i, b in sorted(self._choices.items()))
        return Answer(choices, self._model, b"")

    def error(self, error: GatewayError) -> bytes:
        return b"data: " + OPENAI.body(error) + b"\n\n"

    def unfinished(self) -> int:
        return self._n - sum(1 for b in self._choices.values() if b.finish_reason)
