"""Byte-level engines over real sockets, and an upstream over them.

The tests use them to check the gateway's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from prometheus_client import generate_latest
from support.scripted.script import ScriptedChoice

from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineRegistry, EngineSpec
from clawstream.gateway.metrics import Metrics
from clawstream.schemas.settings import GatewaySettings

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
SOON_S = 60.0
Answer = Callable[["Wire", bytes], Awaitable[bool | None]]


class Wire:
    """An engine's end of a connection, at byte level."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(self) -> bytes:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(
            (int(h[15:]) for h in head.lower().split(b"\r\n") if h.startswith(b"content-length:")),
            0,
        )
        return head + await self.reader.readexactly(length)

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(0.001)

    def die(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def wired(answer: Answer) -> AsyncIterator[str]:
    """Run an engine that answers each request with `answer`; yield its URL.

    When `answer` returns True, the engine closes the connection.
    """
    tasks: set[asyncio.Task[None]] = set()
    dead = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        wire = Wire(reader, writer)
        if dead.is_set():  # accepted just before the engine stopped
            wire.die()
        try:
            while not await answer(wire, await wire.request()):
                pass
            writer.close()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            wire.die()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        dead.set()
        server.close()
        # A newly accepted connection gets its task after this many turns of the loop.
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saying(*parts: bytes, close: bool = False) -> Answer:
    async def answer(wire: Wire, _: bytes) -> bool:
        await wire.say(*parts)
        return close

    return answer


GIVEN: dict[str, Any] = {"worker_wait_s": SOON_S, "probe_interval_s": 0.05}


class Rig:
    """An upstream over some engines, and its counters."""

    def __init__(self, upstreams: list[Any], **settings: Any) -> None:
        self.settings = GatewaySettings.model_validate(GIVEN | {"upstreams": upstreams} | settings)
        self.registry, self.metrics = EngineRegistry(self.settings.upstreams), Metrics()
        self.engines = EnginePool(self.settings, self.registry, lambda: 0.0, metrics=self.metrics)
        self.asked: list[EngineSpec | None] = []

    async def __aenter__(self) -> Rig:
        await self.engines.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engines.close()

    def call(self, *args: Any, **more: Any) -> EngineCall:
        """Return a call to one of the engines."""
        return EngineCall(self.engines, *args, **more)

    async def ask(self, key: str = "k", **more: Any) -> tuple[int, bytes]:
        given: dict[str, Any] = {
            "key": key,
            "run_id": "r",
            "model": None,
            "on_engine": self.asked.append,
        }
        async with self.call("POST", "/v1/x", b"{}", {}, **given | more) as response:
            return response.status, await response.read()

    def count(self, name: str) -> float:
        lines = generate_latest(self.metrics.registry).decode().splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("clawstream_gateway_" + name)
        )

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110 - the conditions set no event
                await asyncio.sleep(0.005)


def as_text(*urls: str) -> list[dict[str, str]]:
    return [{"url": url, "kind": "text"} for url in urls]


def run(*answers: Answer, test: Callable[..., Awaitable[None]]) -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            await test(*[await stack.enter_async_context(wired(a)) for a in answers])

    asyncio.run(body())


def key_of(first: str, rig: Rig) -> str:
    """Return a trajectory that is assigned to this engine."""
    engines = rig.engines
    for i in range(1000):
        engine = engines.pick(f"k{i}", ("r", None), ())
        if engine is not None and engine.spec.base_url == first:
            return f"k{i}"
    raise AssertionError("no trajectory belongs to it")


BUSY = b"HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n"
LIMITED = b"HTTP/1.1 429 x\r\nretry-after: 9\r\ncontent-length: 4\r\n\r\nslow"
