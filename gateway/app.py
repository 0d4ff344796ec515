"""The gateway's web application: `create_app`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway import errors
from gateway.bus import Bus, Message
from gateway.calls import CallEndpoint, Parts, Scope, Send
from gateway.clock import Clock
from gateway.control import control_routes
from gateway.disconnect import Receive
from gateway.error_reply import reply_of
from gateway.journal import Journal
from gateway.metrics import Metrics
from gateway.openai_chat import OpenAIChat
from gateway.sessions import SessionKeys, origin_of, secret_of
from gateway.spool import Spool
from gateway.upstream import Upstream
from gateway.workers import WorkerTable
from runtime.telemetry import logger
from schemas.codec import Codec
from schemas.settings import Settings

MAX_CONTROL_BODY = 1 << 20
"""Bytes of a request that is no model call: metadata and details of rewards."""
ASGI = Callable[[Scope, Receive, Send], Awaitable[None]]


def create_app(
    settings: Settings, bus: Bus, table: WorkerTable, codec: Codec | None = None, clock: Clock | None = None
) -> FastAPI:
    """The whole gateway over a bus and a table of engines. The caller starts and ends both; the app owns spool and connections.

    `app.state.bury` takes dead letters as messages; it may be called while the app runs.
    """
    clock, metrics = clock or Clock(), Metrics()
    directory = settings.spool_dir / settings.gateway.gateway_id
    journal = Journal(bus, Spool(directory, settings.gateway.spool_max_bytes), metrics, settings.gateway.acks)
    upstream = Upstream(settings.gateway, table, lambda: bus.uptime_s, clock)
    parts = Parts(
        settings, SessionKeys(secret_of(settings)), journal, upstream, codec or Codec(), clock, metrics
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await journal.start()
        await upstream.open()
        yield
        await upstream.close()
        await journal.close()

    async def bury(message: Message) -> None:
        try:
            await journal.record([message])
        except errors.NotRecorded as error:
            logger().error("dead_letter_lost", error=str(error))

    app = FastAPI(title="Clawstream gateway", lifespan=lifespan)
    app.state.bury = bury
    app.include_router(control_routes(parts))
    _operations(app, parts, bus)
    # Raw ASGI routes, before everything that FastAPI would do to them.
    chat = CallEndpoint(parts, OpenAIChat())
    for prefix in ("", "/v1", "/{trajectory}/{prompt}", "/{trajectory}/{prompt}/v1"):
        app.router.routes.insert(0, Route(prefix + "/models", _models(parts), methods=["GET"]))
        app.router.routes.insert(0, Route(prefix + "/chat/completions", chat, methods=["POST"]))
    _answer_errors(app)
    app.add_middleware(ControlBodyLimit)
    return app


def _operations(app: FastAPI, parts: Parts, bus: Bus) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, bool]:
        state = {"kafka": bus.reachable, "worker": bool(parts.upstream.ready)}
        response.status_code = 200 if all(state.values()) else 503
        return state

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(parts.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _models(parts: Parts) -> Callable[[Request], Awaitable[Response]]:
    async def models(request: Request) -> Response:
        """An engine's own list."""
        path = request.path_params
        who = origin_of(
            dict(request.headers), parts.keys, parts.settings.run_id, path.get("trajectory"), path.get("prompt")
        )
        async with parts.upstream.ask(
            "GET", "/v1/models", None, {}, key=who.trajectory_key, run_id=who.run_id, model=None
        ) as response:
            body = await response.read()
            return Response(body, response.status, media_type=response.header("content-type"))

    return models


def _answer_errors(app: FastAPI) -> None:
    """Every error in the same shape."""

    def reply(error: errors.GatewayError) -> Response:
        status, headers, body = reply_of(error)
        return Response(body, status, {k.decode(): v.decode() for k, v in headers})

    @app.exception_handler(errors.GatewayError)
    async def ours(_: Request, error: errors.GatewayError) -> Response:
        return reply(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
        if first["type"] == "json_invalid":
            return reply(errors.BadRequest("body: not JSON", "body"))
        return reply(errors.Unprocessable(f"{field}: {first['msg']}", field))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {request.url.path}"
        if error.status_code == 405:
            return reply(errors.WrongMethod(f"{asked}: {error.detail}"))
        if error.status_code == 404:
            return reply(errors.NotFound(f"{asked}: no such path"))
        if error.status_code == 413:
            return reply(errors.BodyTooLarge(str(error.detail), "body"))
        return reply(errors.BadRequest(str(error.detail), "body"))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        logger().error("request_failed", path=request.url.path, error=repr(error))
        return reply(errors.GatewayError("internal error, see the gateway's log"))


class ControlBodyLimit:
    """ASGI middleware: requests that are no model calls have small bodies. Model calls count for themselves."""

    def __init__(self, app: ASGI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].endswith("/chat/completions"):
            await self._app(scope, receive, send)
            return
        size = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MAX_CONTROL_BODY:
                # FastAPI lets only its own kind of error out of the reading of a body.
                raise HTTPException(413, f"body: larger than {MAX_CONTROL_BODY} bytes")
            return message

        await self._app(scope, limited, send)
