"""Speak OpenAI completions as an engine: a server of `ScriptedEngine`."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
from support.scripted.script import Event, Json, Script, ScriptedChoice, openai_error

from clawstream.gateway.protocols.openai_completions import prompt_count

_HEAD: Json = {"object": "text_completion", "created": 1}
_FINGERPRINT = "vllm-0.32.0-scripted"


class CompletionsServer:
    """Write completions as vLLM 0.32 does.

    Fields of tokens that were not requested are null. The choices of a prompt are consecutive.
    """

    path = "/v1/completions"

    def prompts(self, request: Json) -> int:
        return prompt_count(request)

    def plain(self, request: Json, script: Script) -> Json:
        ids = _asks_ids(request, script)
        return {
            **_HEAD, "id": f"cmpl-{script.number}", "model": request.get("model") or "policy",
            "choices": [
                {
                    "index": i, "text": _echo(request) + scripted.text,
                    "logprobs": _logprobs(request, script, scripted, 0, len(scripted.ids)),
                    "finish_reason": scripted.finish_reason, "stop_reason": None,
                    "token_ids": list(scripted.ids) if ids else None, "prompt_logprobs": None,
                    "prompt_token_ids": list(script.prompt_ids) if ids else None,
                    "routed_experts": None,
                }
                for i, scripted in enumerate(script.choices)
            ],
            "service_tier": None, "system_fingerprint": _FINGERPRINT,
            "usage": {
                **_usage(request, script), "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None,
        }  # fmt: skip

    def events(self, request: Json, script: Script) -> Iterator[Event]:
        head = _HEAD | {"id": f"cmpl-{script.number}", "model": request.get("model") or "policy"}
        ids = _asks_ids(request, script)
        usage = bool((request.get("stream_options") or {}).get("include_usage"))
        for at in range(max(len(s.ids) for s in script.choices)):
            for i, scripted in enumerate(script.choices):
                if at >= len(scripted.ids):
                    continue
                ended = at == len(scripted.ids) - 1
                choice: Json = {
                    "index": i, "text": ("" if at else _echo(request)) + (scripted.texts[at] or ""),
                    "logprobs": _logprobs(request, script, scripted, at, at + 1),
                    "finish_reason": scripted.finish_reason if ended else None, "stop_reason": None,
                    "prompt_token_ids": list(script.prompt_ids) if ids and not at else None,
                    "token_ids": [scripted.ids[at]] if ids else None,
                }  # fmt: skip
                chunk = head | {"choices": [choice]}
                if ended and not usage:
                    chunk["system_fingerprint"] = _FINGERPRINT
                yield _data(chunk, [(i, at, at + 1)])
        if usage:
            yield _data(
                head
                | {
                    "choices": [],
                    "usage": _usage(request, script),
                    "system_fingerprint": _FINGERPRINT,
                }
            )
        yield Event(b"data: [DONE]\n\n")

    def error(self, status: int) -> Json:
        return openai_error(status)

    def failure(self) -> bytes:
        error = {"message": "scripted", "type": "InternalServerError", "param": None, "code": 500}
        return b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"


def _data(chunk: Json, shows: list[tuple[int, int, int]] | None = None) -> Event:
    return Event(b"data: " + orjson.dumps(chunk) + b"\n\n", shows or [])


def _asks_ids(request: Json, script: Script) -> bool:
    return bool(request.get("return_token_ids")) and not script.no_tokens


def _echo(request: Json) -> str:
    """Return the prompt if it is echoed: vLLM omits it when it returns token ids."""
    prompt = request.get("prompt")
    return (
        prompt
        if request.get("echo") and not request.get("return_token_ids") and isinstance(prompt, str)
        else ""
    )


def _logprobs(
    request: Json, script: Script, scripted: ScriptedChoice, first: int, last: int
) -> Json | None:
    if request.get("logprobs") is None or script.no_tokens:
        return None
    tokens = [scripted.texts[i] or "" for i in range(first, last)]
    values: list[float | None] = list(scripted.logprobs[first:last])
    # The tokens of an echoed prompt come first; the first of them has no log-probability.
    if request.get("echo") and first == 0:
        tokens = [f"<{i}>" for i in script.prompt_ids] + tokens
        values = [None, *[-9.0] * (len(script.prompt_ids) - 1), *values]
    offset = sum(len(t or "") for t in scripted.texts[:first])
    offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    top = [None if v is None else {t: v} for t, v in zip(tokens, values, strict=True)]
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": top}


def _usage(request: Json, script: Script) -> Json:
    asked, sampled = (
        len(script.prompt_ids) * prompt_count(request),
        sum(len(s.ids) for s in script.choices),
    )
    return {"prompt_tokens": asked, "total_tokens": asked + sampled, "completion_tokens": sampled}
