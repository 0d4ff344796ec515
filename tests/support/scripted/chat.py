"""Speak OpenAI chat completions as an engine: a server of `ScriptedEngine`."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from support.scripted.script import Event, Json, Script, ScriptedChoice, openai_error


def _logprobs(scripted: ScriptedChoice, first: int, last: int) -> Json:
    content: list[Json] = [
        {
            "token": scripted.texts[i] or "",
            "logprob": scripted.logprobs[i],
            "bytes": None,
            "top_logprobs": [],
        }
        for i in range(first, last)
    ]
    return {"content": content}


def _usage(script: Script) -> Json:
    prompt, sampled = len(script.prompt_ids), sum(len(scripted.ids) for scripted in script.choices)
    return {"prompt_tokens": prompt, "total_tokens": prompt + sampled, "completion_tokens": sampled}


class ChatServer:
    """Write OpenAI chat completions as vLLM 0.32 does.

    Fields of tokens that were not requested are null, and a chunk without new content is omitted.
    """

    path = "/v1/chat/completions"

    def prompts(self, request: Json) -> int:
        return 1

    def plain(self, request: Json, script: Script) -> Json:
        return plain(request, script)

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        for chunk, shows in chunks(request, script):
            yield Event(b"data: " + orjson.dumps(chunk) + b"\n\n", shows)
        yield Event(b"data: [DONE]\n\n")

    def error(self, status: int) -> Json:
        return openai_error(status)

    def failure(self) -> bytes:
        error = {"message": "scripted", "type": "InternalServerError", "code": 500}
        return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"


def plain(request: Json, script: Script) -> Json:
    """Return the reply that vLLM would write."""
    ids, logprobs = (
        request.get(k) and not script.no_tokens for k in ("return_token_ids", "logprobs")
    )
    return {
        "id": f"chatcmpl-{script.number}", "object": "chat.completion", "created": 1,
        "model": request.get("model") or "policy",
        "choices": [
            {
                "index": i, "message": scripted.message(),
                "logprobs": _logprobs(scripted, 0, len(scripted.ids)) if logprobs else None,
                "finish_reason": scripted.finish_reason, "stop_reason": None,
                "token_ids": list(scripted.ids) if ids else None, "routed_experts": None,
            }
            for i, scripted in enumerate(script.choices)
        ],
        "service_tier": None, "system_fingerprint": None,
        "usage": _usage(script),
        "prompt_logprobs": None, "prompt_token_ids": list(script.prompt_ids) if ids else None,
        "prompt_text": None,
    }  # fmt: skip


def chunks(request: Json, script: Script) -> Iterator[tuple[Json, list[tuple[int, int, int]]]]:
    """Yield the chunks that vLLM would write, and the tokens in each.

    The choices take turns, one token at a time.
    """
    unshown = [0] * len(script.choices)
    ids, logprobs = (
        request.get(k) and not script.no_tokens for k in ("return_token_ids", "logprobs")
    )
    head: Json = {
        "id": f"chatcmpl-{script.number}", "object": "chat.completion.chunk", "created": 1,
        "model": request.get("model") or "policy"
    }  # fmt: skip
    for i in range(len(script.choices)):
        first: Json = {
            "index": i,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield (
            head
            | {"choices": [first], "prompt_token_ids": list(script.prompt_ids) if ids else None},
            [],
        )
    for at in range(max(len(s.ids) for s in script.choices)):
        for i, scripted in enumerate(script.choices):
            if at >= len(scripted.ids):
                continue
            last = at == len(scripted.ids) - 1
            text = scripted.texts[at]
            delta: Json = {} if text is None else {"content": text}
            if last and scripted.tool_calls:
                delta = {
                    "tool_calls": [
                        {"index": n, **call} for n, call in enumerate(scripted.tool_calls)
                    ]
                }
            if not delta and not last and not ids and not logprobs:
                continue
            choice: Json = {
                "index": i, "delta": delta,
                "logprobs": _logprobs(scripted, at, at + 1) if logprobs else None,
                "finish_reason": scripted.finish_reason if last else None,
            }  # fmt: skip
            if last:
                choice["stop_reason"] = None
            shows = [(i, unshown[i], at + 1)]
            unshown[i] = at + 1
            yield (
                head | {"choices": [choice | {"token_ids": [scripted.ids[at]] if ids else None}]},
                shows,
            )
    if (request.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": _usage(script)}, []
