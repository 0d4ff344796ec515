"""Two forwarders that record nothing: the cost of a gateway without our work.

    python -m benchmarks.gateway.bare_forwarder --port 21001 --upstream http://127.0.0.1:21000
    --stack asgi|fastapi

asgi: a plain ASGI application with aiohttp, the floor of our own stack. fastapi: FastAPI with
httpx, what most people would write.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
import uvicorn
from fastapi import FastAPI, Request, Response


class Forwarder:
    """An ASGI application that forwards each request to the same path of `upstream`."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._session.close()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        assert self._session is not None
        headers = {"content-type": "application/json"}
        async with self._session.post(
            self._upstream + scope["path"], data=body, headers=headers
        ) as reply:
            content = await reply.read()
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": reply.status, "headers": fields})
        await send({"type": "http.response.body", "body": content})


def fastapi_app(upstream: str) -> FastAPI:
    """Create the same with FastAPI and httpx."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(
            timeout=60.0, limits=httpx.Limits(max_connections=None)
        ) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        reply = await request.app.state.client.post(
            upstream + "/v1/chat/completions",
            content=await request.body(),
            headers={"content-type": "application/json"},
        )
        return Response(reply.content, reply.status_code, media_type="application/json")

    return app


def main() -> None:
    """Serve until the process ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--stack", choices=("asgi", "fastapi"), required=True)
    asked = parser.parse_args()
    app: Any = Forwarder(asked.upstream) if asked.stack == "asgi" else fastapi_app(asked.upstream)
    quiet: dict[str, Any] = {"access_log": False, "log_level": "error"}
    uvicorn.run(app, host="127.0.0.1", port=asked.port, loop="uvloop", http="httptools", **quiet)


if __name__ == "__main__":
    main()
