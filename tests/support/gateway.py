"""Run a whole gateway in this process.

A real web server runs between a scripted engine and a log in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from support.log_producer import InMemoryLogProducer
from support.patience import until_async
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script

from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.http_server import KEEP_ALIVE_S, ServedApp, server_config
from clawstream.gateway.durability.segment import read_segment
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.errors import BudgetUnknown
from clawstream.gateway.main import listen
from clawstream.gateway.protocols.base import EngineKind
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Channel, FailedCall, Step
from clawstream.schemas.settings import Settings


class InMemoryBudgets:
    """Hold budgets in memory. reachable=False: every read fails."""

    def __init__(self) -> None:
        self.readings: dict[tuple[str, Channel], BudgetReading] = {}
        self.reachable = True

    async def get(self, run_id: str, channel: Channel) -> BudgetReading | None:
        if not self.reachable:
            raise BudgetUnknown("the budgets in memory are set to fail")
        return self.readings.get((run_id, channel))


@dataclass
class GatewayFixture:
    """Hold a running gateway and its surroundings."""

    url: str
    engine: ScriptedEngine
    engine_url: str
    producer: InMemoryLogProducer
    http: aiohttp.ClientSession
    settings: Settings
    codec: Codec
    budgets: InMemoryBudgets = field(default_factory=InMemoryBudgets)

    def records(self) -> list[Any]:
        """Return all records on the log except failed calls, in order."""
        return [r for r in self._all() if not isinstance(r, FailedCall)]

    def failed_calls(self) -> list[FailedCall]:
        """Return the failed calls on the log, in order."""
        return [r for r in self._all() if isinstance(r, FailedCall)]

    def _all(self) -> list[Any]:
        return [self.codec.decode(m.value) for m in self.producer.messages]

    def steps(self) -> list[Step]:
        """Return the steps on the log, in order."""
        return [r for r in self.records() if isinstance(r, Step)]

    def spooled(self) -> list[Any]:
        """Return all records in the spool, in order."""
        directory = self.settings.spool_dir / self.settings.gateway.gateway_id
        while True:
            try:
                found = [read_segment(file).messages for file in sorted(directory.glob("*.spool"))]
            except FileNotFoundError:
                continue  # drained or renamed since it was listed
            return [self.codec.decode(m.value) for messages in found for m in messages]

    async def metric(self, name: str) -> float:
        """Return the sum of the samples whose name starts with `name`."""
        text = await (await self.http.get(self.url + "/metrics")).text()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Wait until the condition is true, and return its value. timeout_s: see `Patience`."""
        return await until_async(condition, seconds=timeout_s, poll_s=0.005)


@asynccontextmanager
async def running(app: ServedApp, keep_alive_s: float = KEEP_ALIVE_S) -> AsyncIterator[str]:
    """Serve the app with a real web server without the server's main loop; yield the URL."""
    listening = listen("127.0.0.1", 0)
    config = server_config(app, keep_alive_s=keep_alive_s)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listening])
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await _shutdown(server)


async def _shutdown(server: uvicorn.Server) -> None:
    """End the server as `uvicorn.Server.shutdown` does, without its pause of 0.1 s."""
    for listening in server.servers:
        listening.close()
    state = server.server_state
    for connection in list(state.connections):
        connection.shutdown()
    await asyncio.sleep(0.005)  # connections that were just accepted get their protocol
    while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn sets no event
        await asyncio.sleep(0.005)
    await server.lifespan.shutdown()


def run_gateway(
    directory: Path,
    codec: Codec,
    scenario: Callable[[GatewayFixture], Awaitable[None]],
    script: Script | Callable[[Any], Script],
    kind: EngineKind = "captured",
    keep_alive_s: float = KEEP_ALIVE_S,
    **gateway: Any,
) -> None:
    """Run an async scenario against a new gateway.

    Args:
        directory: Data directory of the gateway.
        codec: Passed in, because it is expensive to create.
        scenario: Coroutine function that gets the running gateway.
        script: Replies of the engine.
        kind: Kind of the engine.
        keep_alive_s: Longest time between two requests of a client's connection.
        gateway: Settings of the gateway.
    """

    async def body() -> None:
        engine = ScriptedEngine(script if callable(script) else lambda _: script, kind)
        producer = InMemoryLogProducer()
        async with engine.serve() as engine_url:
            given = {
                "upstreams": [engine_url],
                "worker_wait_s": 60,
                "produce_timeout_s": 60,
            } | gateway
            settings = Settings.model_validate({"data_dir": directory, "gateway": given})
            budgets = InMemoryBudgets()
            app = create_app(
                settings,
                producer,
                EngineRegistry(settings.gateway.upstreams),
                codec,
                budgets=budgets,
            )
            async with running(app, keep_alive_s) as url, aiohttp.ClientSession() as http:
                await scenario(
                    GatewayFixture(
                        url, engine, engine_url, producer, http, settings, codec, budgets
                    )
                )

    asyncio.run(body())
