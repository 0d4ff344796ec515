"""The web application: pages over a lake, a live tail, and a key to enter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.staticfiles import StaticFiles

from inspector.live.feed import Live
from inspector.queries.conversation import ReadChat
from inspector.queries.lake import Lake
from inspector.queries.tokens import Pieces
from inspector.web import pages
from inspector.web.access import COOKIE, Access, is_cross_site
from inspector.web.rendering import render
from schemas.errors import ForeseenError

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
OPEN_PATHS = ("/login", "/static/", "/favicon.ico")
STATIC = Path(__file__).parent / "static"
BODY_BYTES = 4096
"""Longest body of a form."""


class Parts(NamedTuple):
    """What the application is made of.

    may_read: whether a key allows to see everything. chat, pieces: read requests and token ids.
    gateway_url: base URL in commands to copy.
    """

    lake: Lake
    live: Live
    may_read: Callable[[str], bool]
    chat: ReadChat
    pieces: Pieces
    gateway_url: str


def create_app(parts: Parts) -> FastAPI:
    """Return the application."""
    access = Access(parts.may_read)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        parts.live.start()
        yield
        parts.live.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.parts = parts
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.include_router(pages.router)
    _add_login(app, access)

    @app.middleware("http")
    async def guard(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        try:
            response = _refusal(request, access) or await call_next(request)
        except ForeseenError as error:  # of the keys: handlers see only errors of routes
            response = await failed(request, error)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        if request.url.path.startswith("/static/"):
            response.headers["cache-control"] = "max-age=3600"
        return response

    @app.exception_handler(ForeseenError)
    async def failed(request: Request, error: ForeseenError) -> Response:
        return render(request, "message.html", 503, title="Not readable", text=str(error))

    @app.exception_handler(404)
    async def absent(request: Request, _: Exception) -> Response:
        text = "No such page, or the lake does not have it (yet): see `clawstream lag`."
        return render(request, "message.html", 404, title="Not found", text=text)

    return app


def _refusal(request: Request, access: Access) -> Response | None:
    """Return the reply to a request that may not go on; None if it may."""
    if request.method not in ("GET", "HEAD") and is_cross_site(request.headers):
        return Response("refused: another site sent this form", 403)
    path = request.url.path
    if path.startswith(OPEN_PATHS) or access.allowed(
        request.headers.get("authorization"), request.cookies.get(COOKIE)
    ):
        return None
    if request.headers.get("sec-fetch-site") == "cross-site":
        # A strict cookie does not come with a link of another site; it does with a reload.
        return HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0"><title>…</title>'
        )
    if request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return Response("needs a key: log in, or send authorization: Bearer", 401)
    target = path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/login?next={quote(target, safe='')}", 303)


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            return {}
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _local(target: str) -> str:
    """Return a path of this site; `/` for any other address."""
    ours = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if ours and target.isprintable() else "/"


def _add_login(app: FastAPI, access: Access) -> None:
    @app.get("/login")
    def form(request: Request) -> Response:
        return render(request, "login.html", next=_local(request.query_params.get("next", "/")))

    @app.post("/login")
    async def log_in(request: Request) -> Response:
        given = await _form(request)
        target = _local(given.get("next", "/"))
        session = access.log_in(given.get("key", "").strip())
        if session is None:
            return render(request, "login.html", 401, next=target, wrong=True)
        response = RedirectResponse(target, 303)
        _set_cookie(request, response, COOKIE, session)
        return response

    @app.post("/logout")
    def log_out(request: Request) -> Response:
        access.log_out(request.cookies.get(COOKIE))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(COOKIE)
        return response

    @app.post("/theme")
    async def theme(request: Request) -> Response:
        given = await _form(request)
        response = RedirectResponse(_local(given.get("next", "/")), 303)
        name = given.get("to") if given.get("to") in ("light", "dark") else "auto"
        _set_cookie(request, response, "theme", str(name))
        return response


def _set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    secure = request.url.scheme == "https"
    response.set_cookie(name, value, httponly=True, samesite="strict", secure=secure)
