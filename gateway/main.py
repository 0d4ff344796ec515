"""The gateway as a process: `clawstream gateway`."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop

from gateway.api.rollout_budget.feed import DemandFeed
from gateway.app import create_app
from gateway.asgi.http_server import server_config
from gateway.durability.log import KafkaBus, Message
from gateway.durability.spool import lock
from gateway.engines.discovery import WorkerFeed
from gateway.engines.registry import WorkerTable
from gateway.errors import GatewayError
from runtime.logs import logger
from runtime.process.lifecycle import run_async
from runtime.process.ports import taken
from runtime.process.readiness import ready
from runtime.topics.records import cluster_of
from schemas.codec.single_object import Codec
from schemas.settings import Settings

FIRST_LOOK_S = 3.0
"""Longest wait for Kafka before the first call is served: what is spooled meanwhile could be overtaken by another gateway."""
STOP_RESERVE_S = 8.0
"""Of up.stop_timeout_s: kept for draining the spool and flushing after the last call has ended."""


class _Server(uvicorn.Server):
    """Signals belong to `runtime.process.lifecycle`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any. Raises PortTaken."""
    # The protocol is named and Nagle's algorithm switched off here, for asyncio does that only for sockets it makes itself: a
    # reply's head and body are two writes, and the second one would wait 40 ms for the client's delayed acknowledgement.
    made = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise taken(host, port, "the gateway", "gateway.port or gateway.host", error) from error
    made.listen(4096)
    return made


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop`: then accept no more, finish what is in flight, drain the spool if Kafka is there, flush.

    Kafka need not be there at the start: after a short wait for it calls are spooled until it is.
    """
    # The web server takes it too, but ends with a code and a traceback of its own when it cannot.
    os.close(lock(settings.spool_dir / settings.gateway.gateway_id))
    listening = listen(settings.gateway.host, settings.gateway.port)
    cluster, codec, topics = cluster_of(settings), Codec(), settings.kafka.topics
    bus = KafkaBus(cluster, topics.steps, settings.gateway.produce_timeout_s)
    table = WorkerTable(settings.gateway.upstreams)
    demand = DemandFeed(cluster, settings)
    app = create_app(settings, bus, table, codec, demand=demand)
    burials: set[asyncio.Task[None]] = set()

    def bury(message: Message) -> None:
        task = asyncio.create_task(app.state.bury(message))
        burials.add(task)
        task.add_done_callback(burials.discard)

    feed = WorkerFeed(cluster, settings, table, codec, lambda: bus.uptime_s, bury)
    server = _Server(server_config(app, max(1, int(settings.up.stop_timeout_s - STOP_RESERVE_S))))
    bus.start()
    feed.start()
    demand.start()
    began = asyncio.get_running_loop().time()
    while (  # noqa: ASYNC110 - the bus is a thread
        not bus.reachable
        and not stop.is_set()
        and asyncio.get_running_loop().time() - began < FIRST_LOOK_S
    ):
        await asyncio.sleep(0.01)
    logger().info("gateway_listens", host=settings.gateway.host, port=settings.gateway.port)
    serving = asyncio.create_task(server.serve([listening]))
    saying = asyncio.create_task(_say_ready(server, settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    saying.cancel()
    feed.stop()
    demand.stop()
    server.should_exit = True
    await serving
    stopping.cancel()
    await asyncio.to_thread(bus.close)
    if not stop.is_set():
        raise GatewayError(
            "the web application did not start or ended by itself: the lines above say why"
        )
    logger().info("gateway_stopped")


async def _say_ready(server: uvicorn.Server, settings: Settings) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    ready(f"http://{settings.gateway.host}:{settings.gateway.port}")


def main(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT. Never returns, see runtime.process.lifecycle."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_async("gateway", settings, serve)
