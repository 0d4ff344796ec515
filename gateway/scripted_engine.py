"""A fake engine for tests and try-outs: OpenAI chat completions as vLLM writes them, saying what a script says.

    engine = ScriptedEngine(lambda request: Script([Say([7, 8], ["Hel", "lo"], [-0.1, -0.2])]))
    async with engine.serve() as url: ...

It writes exactly the fields vLLM 0.32 writes for the same request: ids, log-probabilities, null where they were not asked for, the
chunks that exist only to carry tokens, and the headers and comment of our middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Json = dict[str, Any]


@dataclass(frozen=True)
class Say:
    """One choice: token ids, the text of each (None: a chunk without a delta), log-probabilities; and tool-call deltas after them."""

    ids: Sequence[int]
    texts: Sequence[str | None]
    logprobs: Sequence[float]
    tool_calls: Sequence[Json] = ()
    finish_reason: str = "stop"

    @property
    def text(self) -> str:
        return "".join(t for t in self.texts if t)

    def message(self) -> Json:
        """The message of a plain reply."""
        message: Json = {"role": "assistant", "content": self.text or None, "refusal": None, "reasoning": None}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass
class Script:
    """What is said to one request.

    versions: per choice; None: the engine does not know. status: an error instead of a reply. die_after: the connection breaks
    after so many chunks. fail_after: an error event after so many chunks. gate: acquired before each chunk behind the first.
    no_tokens: an engine that knows neither ids nor log-probabilities.
    """

    says: Sequence[Say]
    prompt_ids: Sequence[int] = (1, 2, 3)
    versions: Sequence[Sequence[Json] | None] | None = None
    version_start: str | None = None
    status: int = 200
    die_after: int | None = None
    fail_after: int | None = None
    gate: asyncio.Semaphore | None = None
    no_tokens: bool = False


@dataclass
class ScriptedEngine:
    """requests: every body that came in. aborted: how many replies the gateway broke off."""

    script: Callable[[Json], Script]
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0

    @asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """Listen on loopback; gives the base URL without /v1."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = orjson.loads(await http.read())
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        script = self.script(request)
        if script.status != 200:
            error = {"error": {"message": "scripted", "type": "BadRequestError", "param": None, "code": script.status}}
            return web.json_response(error, status=script.status)
        headers = {"x-clawstream-version-start": script.version_start} if script.version_start else {}
        try:
            if request.get("stream"):
                return await self._stream(http, request, script, headers)
            if script.gate is not None:
                await script.gate.acquire()
            if script.die_after is not None:
                _break(http)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        if script.versions is not None:
            headers["x-clawstream-versions"] = orjson.dumps(script.versions).decode()
        return web.Response(body=orjson.dumps(plain(request, script)), content_type="application/json", headers=headers)

    async def _stream(
        self, http: web.Request, request: Json, script: Script, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", **headers})
        await response.prepare(http)
        for at, chunk in enumerate(chunks(request, script)):
            if at and script.gate is not None:
                await script.gate.acquire()
            if at == script.die_after:
                _break(http)
            if at == script.fail_after:
                await response.write(
                    b'data: {"error":{"message":"scripted","type":"InternalServerError","code":500}}\n\n'
                )
                break
            await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        if script.versions is not None:
            await response.write(b": clawstream-versions " + orjson.dumps(script.versions) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        with suppress(ConnectionError):
            await response.write_eof()
        return response


def _break(http: web.Request) -> None:
    assert http.transport is not None
    http.transport.abort()
    raise ConnectionResetError("scripted death")


def _logprobs(say: Say, first: int, last: int) -> Json:
    content: list[Json] = [
        {"token": say.texts[i] or "", "logprob": say.logprobs[i], "bytes": None, "top_logprobs": []}
        for i in range(first, last)
    ]
    return {"content": content}


def plain(request: Json, script: Script) -> Json:
    """The reply that vLLM would write."""
    ids, logprobs = (request.get(k) and not script.no_tokens for k in ("return_token_ids", "logprobs"))
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": request.get("model") or "policy",
        "choices": [
            {
                "index": i, "message": say.message(), "logprobs": _logprobs(say, 0, len(say.ids)) if logprobs else None,
                "finish_reason": say.finish_reason, "stop_reason": None, "token_ids": list(say.ids) if ids else None,
                "routed_experts": None,
            }
            for i, say in enumerate(script.says)
        ],
        "service_tier": None, "system_fingerprint": None,
        "usage": {"prompt_tokens": len(script.prompt_ids), "total_tokens": 9, "completion_tokens": 6},
        "prompt_logprobs": None, "prompt_token_ids": list(script.prompt_ids) if ids else None, "prompt_text": None,
    }  # fmt: skip


def chunks(request: Json, script: Script) -> Iterator[Json]:
    """The chunks that vLLM would write: choices take turns, one token at a time."""
    ids, logprobs = (request.get(k) and not script.no_tokens for k in ("return_token_ids", "logprobs"))
    head: Json = {
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": request.get("model") or "policy"
    }  # fmt: skip
    for i in range(len(script.says)):
        first: Json = {
            "index": i,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        yield head | {"choices": [first], "prompt_token_ids": list(script.prompt_ids) if ids else None}
    for at in range(max(len(s.ids) for s in script.says)):
        for i, say in enumerate(script.says):
            if at >= len(say.ids):
                continue
            last = at == len(say.ids) - 1
            text = say.texts[at]
            delta: Json = {} if text is None else {"content": text}
            if last and say.tool_calls:
                delta = {"tool_calls": [{"index": n, **call} for n, call in enumerate(say.tool_calls)]}
            if not delta and not last and not ids and not logprobs:
                continue
            choice: Json = {
                "index": i, "delta": delta, "logprobs": _logprobs(say, at, at + 1) if logprobs else None,
                "finish_reason": say.finish_reason if last else None,
            }  # fmt: skip
            if last:
                choice["stop_reason"] = None
            yield head | {"choices": [choice | {"token_ids": [say.ids[at]] if ids else None}]}
    if (request.get("stream_options") or {}).get("include_usage"):
        yield head | {"choices": [], "usage": {"prompt_tokens": len(script.prompt_ids), "total_tokens": 9}}
