"""The web application: pages over a lake, a live tail, changes, and a key to enter."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from clawstream.inspector.errors import InspectorError
from clawstream.inspector.live.feed import Live
from clawstream.inspector.marks.writer import MarkWriter
from clawstream.inspector.metrics import PageMetrics
from clawstream.inspector.operations.watcher import Watcher
from clawstream.inspector.queries.activity import Activity
from clawstream.inspector.queries.conversation import ReadChat
from clawstream.inspector.queries.lake import Lake
from clawstream.inspector.queries.policy import Policies
from clawstream.inspector.queries.sql import RunSql
from clawstream.inspector.queries.tokens import Pieces
from clawstream.inspector.web import marking, operations, pages, policy, sql
from clawstream.inspector.web.access import COOKIE, Access, User, is_cross_site
from clawstream.inspector.web.forms import Form, local
from clawstream.inspector.web.rendering import render
from clawstream.schemas.errors import ForeseenError, InvalidId

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
OPEN_PATHS = ("/login", "/static/", "/favicon.ico", "/metrics")
STATIC = Path(__file__).parent / "static"


class Parts(NamedTuple):
    """What the application is made of.

    user_of: the user of a key; None if it does not allow to see everything. chat, pieces: read
    requests and token ids. gateway_url: base URL in commands to copy. rewards: lowest and highest
    value of a human reward. sql: runs a query of a user. activity: counts of the lake over time.
    """

    lake: Lake
    live: Live
    user_of: Callable[[str], User | None]
    chat: ReadChat
    pieces: Pieces
    gateway_url: str
    marks: MarkWriter
    rewards: tuple[float, float]
    policies: Policies
    sql: RunSql
    operations: Watcher
    activity: Activity
    metrics: PageMetrics


def create_app(parts: Parts) -> FastAPI:
    """Return the application."""
    access = Access(parts.user_of)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts.live.start()
        parts.operations.start()
        yield
        parts.operations.stop()
        parts.live.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    for part in (pages, marking, policy, sql, operations):
        app.include_router(part.router)
    _add_login(app, access)
    parts.metrics.watching.set_function(lambda: parts.live.watching + parts.operations.watching)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(parts.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def observe(request: Request, status: int, began: float) -> None:
        # Not the path: it has ids, and a route that is not known has any name.
        route = getattr(request.scope.get("route"), "path", "other")
        parts.metrics.pages.labels(route, status).observe(time.perf_counter() - began)

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        headers, cookies, began = request.headers, request.cookies, time.perf_counter()
        is_open = request.url.path.startswith(OPEN_PATHS)
        user_now = partial(
            access.user, headers.get("authorization"), cookies.get(_session(request))
        )
        request.state.user_now = user_now  # a stream outlives what is known at its start
        try:
            request.state.user = None if is_open else user_now()
            response = _refusal(request, is_open) or await call_next(request)
        except ForeseenError as error:  # of the keys: handlers see only errors of routes
            response = await _error_page(request, error)
        except Exception:  # the server replies with 500
            observe(request, 500, began)
            raise
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if request.url.path.startswith("/static/"):
            response.headers["cache-control"] = "max-age=3600"
        observe(request, response.status_code, began)
        return response

    app.exception_handler(ForeseenError)(_error_page)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> Response:
        said = (f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors())
        text = "; ".join(said)[:1000]
        return render(request, "message.html", 422, title="Not possible", text=text, back=None)

    @app.exception_handler(404)
    async def absent(request: Request, _: Exception) -> Response:
        text = "No such page, or the lake does not have it (yet): see `clawstream lag`."
        return render(request, "message.html", 404, title="Not found", text=text, back=None)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return render(
            request,
            "message.html",
            error.status_code,
            title="Not possible",
            text=error.detail,
            back=None,
        )

    return app


async def _error_page(request: Request, error: ForeseenError) -> Response:
    status, title = 503, "Not available"
    if isinstance(error, InspectorError | InvalidId):
        status, title = getattr(error, "status", 422), "Not possible"
    came_from = urlsplit(request.headers.get("referer", ""))._replace(scheme="", netloc="").geturl()
    back = local(came_from) if came_from and request.method == "POST" else None
    return render(request, "message.html", status, title=title, text=str(error), back=back)


def _refusal(request: Request, is_open: bool) -> Response | None:
    """Return the reply to a request that may not go on; None if it may."""
    if request.method not in ("GET", "HEAD") and is_cross_site(request.headers):
        return Response("refused: another site sent this form", 403)
    if is_open or request.state.user is not None:
        return None
    if request.headers.get("sec-fetch-site") == "cross-site":
        # A strict cookie does not come with a link of another site; it does with a reload.
        return HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0"><title>…</title>'
        )
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return Response("needs a key: log in, or send authorization: Bearer", 401)
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)


def _add_login(app: FastAPI, access: Access) -> None:
    @app.get("/login")
    def form(request: Request) -> Response:
        return render(request, "login.html", next=local(request.query_params.get("next")))

    @app.post("/login")
    def log_in(request: Request, given: Form) -> Response:
        target = local(given.get("next"))
        session = access.log_in(given.get("key", "").strip())
        if session is None:
            return render(request, "login.html", 401, next=target, wrong=True)
        response = RedirectResponse(target, 303)
        _set_cookie(request, response, _session(request), session)
        return response

    @app.post("/logout")
    def log_out(request: Request) -> Response:
        access.log_out(request.cookies.get(_session(request)))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(_session(request))
        return response

    @app.post("/theme")
    def theme(request: Request, given: Form) -> Response:
        response = RedirectResponse(local(given.get("next")), 303)
        name = given.get("to") if given.get("to") in ("light", "dark") else "auto"
        _set_cookie(request, response, "theme", str(name))
        return response


def _session(request: Request) -> str:
    """Return the name of the session's cookie: a browser sends one to all ports of a host."""
    return f"{COOKIE}_{request.url.port or request.url.scheme}"


def _set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    secure = request.url.scheme == "https"
    response.set_cookie(name, value, httponly=True, samesite="strict", secure=secure)
