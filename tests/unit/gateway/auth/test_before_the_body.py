"""A gateway that needs keys reads no body before it has checked the key, on any route."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway, running
from support.log_producer import InMemoryLogProducer
from support.raw_http import ASK, CALL, connected, request
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.app import create_app
from clawstream.gateway.auth.api_keys import create_key
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

CODEC = Codec()
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
OPEN = {"/", "/api/hello", "/health", "/ready", "/metrics"}
"""Routes that answer without a key; docs/security.md lists them."""
INCOMPLETE = "{} {} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\nexpect: 100-continue\r\n\r\n"


def routes_of(settings: Settings) -> list[tuple[str, str]]:
    """Return method and path of every route, control routes and model calls."""
    app = create_app(settings, InMemoryLogProducer(), EngineRegistry(()), CODEC)
    paths = set(app.openapi()["paths"]) | {route.path for route in app.routes}  # type: ignore[attr-defined]
    known = {
        (method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item
    }
    known |= {("GET", path) for path in paths if ("POST", path) not in known}
    return sorted(known)


def test_no_route_reads_a_body_without_a_key(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "gateway": {"auth": "required", "client_timeout_s": 300}}
    )
    routes = routes_of(settings)

    async def scenario() -> None:
        app = create_app(settings, InMemoryLogProducer(), EngineRegistry(()), CODEC)
        async with running(app) as url:
            for method, path in routes:
                async with connected(url) as client:
                    await client.send(INCOMPLETE.format(method, path).encode())
                    head = await client.head()  # no "100 Continue" before it
                expected = b" 200 " if path in OPEN else b" 401 "
                if path == "/ready":
                    expected = b" 503 "
                assert expected in head, (method, path, head)

    asyncio.run(scenario())
    assert len(routes) > 50 and {path for _, path in routes} >= {*OPEN, "/docs", "/openapi.json"}


def test_strangers_take_no_part_of_the_memory_of_calls(tmp_path: Path) -> None:
    key = create_key(tmp_path / "api-keys.json", "k", ["agent"])

    async def scenario(w: GatewayFixture) -> None:
        body = b'{"metadata": {"x": "' + b"y" * 1_000_000
        head = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-length: 1040000\r\n\r\n"
        async with asyncio.TaskGroup() as strangers:

            async def stranger(path: str) -> None:
                async with connected(w.url) as client:
                    await client.send(head.format(path).encode(), body)
                    assert b" 401 " in (await client.reply())[0]
                    async with connected(w.url) as known:
                        await known.send(request("POST", CALL, ASK, f"x-api-key: {key}"))
                        assert b" 200 " in (await known.reply())[0]

            for path in ("/sessions", "/rewards", "/curations", "/submit_steps", CALL):
                strangers.create_task(stranger(path))

    run_gateway(
        tmp_path, CODEC, scenario, Script([HI]),
        auth="required", max_in_flight_bytes=1 << 20, max_body_bytes=1 << 20,
    )  # fmt: skip


@pytest.mark.parametrize("path", [CALL, "/v1/embeddings"])
def test_strangers_that_read_no_reply_are_no_calls_in_flight(tmp_path: Path, path: str) -> None:
    key = create_key(tmp_path / "api-keys.json", "k", ["agent"])
    gateway = {"auth": "required", "max_in_flight": 1, "worker_wait_s": 0}
    settings = Settings.model_validate({"data_dir": tmp_path, "gateway": gateway})

    async def scenario() -> bytes:
        app = create_app(settings, InMemoryLogProducer(), EngineRegistry(()), CODEC)
        sent = list[bytes]()
        blocked = asyncio.Event()

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": ASK, "more_body": False}

        async def never(_: Any) -> None:
            blocked.set()
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        def scope(key: bytes) -> dict[str, Any]:
            return {
                "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
                "headers": [(b"x-api-key", key)], "query_string": b"", "state": {},
            }  # fmt: skip

        async with app.router.lifespan_context(app):
            stranger = asyncio.create_task(app(scope(b"wrong"), receive, never))
            await blocked.wait()
            await app(scope(key.encode()), receive, send)
            stranger.cancel()
        return b"".join(sent)

    assert b'"no_engine"' in asyncio.run(scenario())
