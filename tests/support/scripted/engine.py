"""Serve scripted replies as an engine, in the protocols of its servers.

    engine = ScriptedEngine(
        lambda request: Script([ScriptedChoice([7, 8], ["Hel", "lo"], [-0.1, -0.2])])
    )
    async with engine.serve() as url: ...

The wire format is that of vLLM 0.32. An engine of kind `captured` reports the tokens as our
middleware does (`clawstream.schemas.engine_frames`). Kind `vllm` reports them only in the reply's
own fields, where they are requested. Kind `text` is not a vLLM and reports no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import orjson
from aiohttp import web
from support.scripted.chat import ChatServer
from support.scripted.completions import CompletionsServer
from support.scripted.messages import MessagesServer
from support.scripted.responses import ResponsesServer
from support.scripted.script import Event, Json, ProtocolServer, Script

from clawstream.gateway.protocols.base import EngineKind
from clawstream.schemas import engine_frames
from clawstream.schemas.tokens import pack_ids, pack_logprobs

PROTOCOL_SERVERS: tuple[ProtocolServer, ...] = (
    ChatServer(),
    CompletionsServer(),
    ResponsesServer(),
    MessagesServer(),
)
BACKLOG = 2048
"""Maximum pending connections.

Connections beyond this limit are not refused but retry after seconds, and their calls count as
unreachable.
"""


@dataclass
class ScriptedEngine:
    """Serve scripted replies.

    requests: every received body. aborted: replies that the gateway broke off. probes: how often
    the gateway asked for the version.
    """

    script: Callable[[Json], Script]
    kind: EngineKind = "captured"
    requests: list[Json] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    aborted: int = 0
    probes: int = 0

    @asynccontextmanager
    async def serve(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[str]:
        """Listen, and yield the base URL without /v1."""
        app = web.Application(client_max_size=64 << 20)
        for server in PROTOCOL_SERVERS:
            app.router.add_post(server.path, partial(self._call, server))
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/health", self._health)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1
        )
        await runner.setup()
        site = web.TCPSite(runner, host, port, backlog=BACKLOG)
        await site.start()
        try:
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "policy", "object": "model"}]})

    async def _count_tokens(self, http: web.Request) -> web.Response:
        try:
            messages = orjson.loads(await http.read())["messages"]
        except (ValueError, KeyError, TypeError):
            messages = None
        if not messages:
            # vLLM validates the body before it selects the endpoint's error format.
            error = {
                "message": "messages: missing",
                "type": "Bad Request",
                "param": "body.messages",
                "code": 400,
            }
            return web.json_response({"error": error}, status=400)
        return web.json_response(
            {"input_tokens": 3, "context_management": {"original_input_tokens": 3}}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, http: web.Request) -> web.Response:
        self.probes += 1
        if self.kind == "text":
            return web.Response(status=404)
        return web.json_response(
            {"version": "0.32.0"}, headers={engine_frames.ASK: "1"} if self._captures(http) else {}
        )

    def _captures(self, http: web.Request) -> bool:
        return self.kind == "captured" and http.headers.get(engine_frames.ASK) == "1"

    async def _call(self, server: ProtocolServer, http: web.Request) -> web.StreamResponse:
        request = orjson.loads(await http.read())
        self.requests.append(request)
        self.headers.append(dict(http.headers))
        script = self.script(request)
        if script.status != 200:
            return web.json_response(server.error(script.status), status=script.status)
        headers = (
            {engine_frames.VERSION_START: script.version_start} if script.version_start else {}
        )
        if script.tokenizer is not None:
            headers[engine_frames.TOKENIZER] = script.tokenizer
        captures = self._captures(http)
        if captures:
            headers[engine_frames.ASK] = "1"
        try:
            if request.get("stream"):
                return await self._stream(http, server, request, script, headers, captures)
            if script.gate is not None:
                await script.gate.acquire()
            if script.die_after is not None:
                _break(http)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        body = orjson.dumps(server.plain(request, self._known(script)))
        if captures and not script.no_tokens:
            headers[engine_frames.OWN_BODY] = str(len(body))
            frames = [
                engine_frames.encode(f) for f in whole_frames(script, server.prompts(request))
            ]
            body = engine_frames.trail(body, frames)
        return web.Response(body=body, content_type="application/json", headers=headers)

    def _known(self, script: Script) -> Script:
        return replace(script, no_tokens=True) if self.kind == "text" else script

    async def _stream(
        self,
        http: web.Request,
        server: ProtocolServer,
        request: Json,
        script: Script,
        headers: dict[str, str],
        captures: bool,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream; charset=utf-8", **headers}
        )
        await response.prepare(http)
        prompts, told = server.prompts(request), False
        for at, event in enumerate(server.events(request, self._known(script))):
            if at and script.gate is not None:
                await script.gate.acquire()
            if at == script.die_after:
                _break(http)
            if at == script.fail_after:
                await response.write(server.failure())
                break
            data = event.data
            if captures and not script.no_tokens and (event.shows or not told):
                frames = b"".join(
                    engine_frames.encode(f) for f in frames_of(script, event, prompts, not told)
                )
                data, told = engine_frames.comment(frames) + data, True
            await response.write(data)
        with suppress(ConnectionError):
            await response.write_eof()
        return response


def _choice(script: Script, index: int, first: int, last: int, each: int) -> engine_frames.Choice:
    scripted = script.choices[index]
    ended = last == len(scripted.ids)
    spans = script.versions[index] if script.versions is not None and ended else None
    return engine_frames.Choice(
        index % each,
        pack_ids(scripted.ids[first:last]),
        pack_logprobs(scripted.logprobs[first:last]),
        scripted.finish_reason if ended else None,
        tuple((s["version"], s["start"], s["end"]) for s in spans) if spans is not None else None,
    )


def frames_of(
    script: Script, event: Event, prompts: int, with_prompts: bool
) -> list[engine_frames.Frame]:
    """Return the frames that the middleware sends with an event."""
    each = max(1, len(script.choices) // prompts)
    frames = []
    for g in range(prompts):
        shown = tuple(
            _choice(script, i, first, last, each)
            for i, first, last in event.shows
            if g * each <= i < (g + 1) * each
        )
        if shown or with_prompts:
            told = (
                (pack_ids(script.prompt_ids), script.sampling, script.cached, script.rendered)
                if with_prompts
                else (None, None, None, None)
            )
            frames.append(engine_frames.Frame(g, told[0], shown, None, *told[1:]))
    return frames


def whole_frames(script: Script, prompts: int) -> list[engine_frames.Frame]:
    """Return the frames that the middleware sends with a plain reply."""
    return frames_of(
        script,
        Event(b"", [(i, 0, len(s.ids)) for i, s in enumerate(script.choices)]),
        prompts,
        True,
    )


def _break(http: web.Request) -> None:
    assert http.transport is not None
    http.transport.abort()
    raise ConnectionResetError("scripted death")
