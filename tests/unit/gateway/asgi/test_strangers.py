"""Many idle or slow strangers: the gateway answers its known clients, and /health."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.raw_http import ASK, ASK_STREAM, CALL, RawClient, connected, request
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.connection_limit import (
    ConnectionLimit,
    check_open_files,
    max_calls,
    max_connections,
)
from clawstream.gateway.auth.api_keys import create_key
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
MOST = 40
STRANGERS = (
    b"",
    b"\r\n",
    b"GET /hea",
    f"POST {CALL} HTTP/1.1\r\nhost: x\r\n".encode(),
    f"POST {CALL} HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{{".encode(),
    b"POST /sessions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
    request("GET", "/health", b""),
    request("GET", "/metrics", b"") * 90,
)
"""What strangers send before they fall silent. They read nothing."""


def test_strangers_keep_no_known_client_away(tmp_path: Path) -> None:
    key = f"x-api-key: {create_key(tmp_path / 'api-keys.json', 'k', ['agent'])}"
    gate = asyncio.Semaphore(0)

    async def scenario(url: str, stack: AsyncExitStack) -> None:
        streaming = await stack.enter_async_context(connected(url))
        await streaming.send(request("POST", CALL, ASK_STREAM, key))
        await streaming.head()
        idle = await stack.enter_async_context(connected(url))
        await answered(idle, key)
        for round_ in range(10):
            for said in STRANGERS:
                stranger = await stack.enter_async_context(connected(url))
                await stranger.send(said)
            if round_ % 3 == 0:
                async with connected(url) as new:
                    await answered(new, key)
        await answered(idle, key)  # a known client between two requests stays longer than strangers
        for _ in range(20):
            gate.release()
        assert b"[DONE]" in await streaming.reader.readuntil(b"0\r\n\r\n")

    async def answered(client: RawClient, key: str) -> None:
        await client.send(request("GET", "/health", b""))
        assert b" 200 " in (await client.reply())[0]
        for _ in range(10):
            gate.release()
        await client.send(request("POST", CALL, ASK, key))
        assert b" 200 " in (await client.reply())[0]

    async def body() -> None:
        engine = ScriptedEngine(lambda _: Script([HI], gate=gate))
        async with engine.serve() as engine_url, AsyncExitStack() as stack:
            gateway = {"upstreams": [engine_url], "auth": "required", "client_timeout_s": 300}
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": gateway})
            registry = EngineRegistry(settings.gateway.upstreams)
            app = create_app(settings, InMemoryLogProducer(), registry, Codec())
            app.max_connections = MOST
            async with running(app) as url:
                await scenario(url, stack)
                await stack.aclose()

    asyncio.run(body())


class Connection:
    """A connection that notes whether it was cut off."""

    def __init__(self) -> None:
        self.admitted = self.cut = False

    def abort(self) -> None:
        self.cut = True


def test_the_oldest_stranger_goes_first_then_an_idle_client() -> None:
    limit, all_ = ConnectionLimit(3), [Connection() for _ in range(8)]
    calling, idle, stranger, *new = all_
    for connection in (calling, idle, stranger):
        assert limit.opened(connection)
    calling.admitted = True
    limit.known(idle)
    assert limit.opened(new[0]) and [c for c in all_ if c.cut] == [stranger]
    new[0].admitted = True
    assert limit.opened(new[1]) and [c for c in all_ if c.cut] == [idle, stranger]
    limit.known(calling)
    new[1].admitted = True
    assert not limit.opened(new[2]) and not calling.cut
    new[0].admitted = False
    assert limit.opened(new[3]) and new[0].cut
    limit.lost(calling)
    limit.lost(calling)
    assert limit.opened(new[4]) and not new[1].cut


def test_files_are_shared_between_clients_engines_and_the_rest() -> None:
    assert max_connections(1024, 4096) == 448 and max_calls(1024, 4096) == 384
    assert max_connections(20_000, 4096) == 9216 and max_calls(20_000, 4096) == 4096
    assert max_connections(100, 4096) == 128  # too few for anything
    check_open_files(8448, 4096)
    for files, calls in ((8446, 4095), (1024, 384), (100, 64)):
        with pytest.raises(SettingsError, match=f"need 8448 .* gateway.max_in_flight={calls}$"):
            check_open_files(files, 4096)
        if files > 256:
            check_open_files(files, calls)
