"""Runs the gateway process (`clawstream gateway`)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop

from clawstream.gateway.api.rollout_budget.feed import BudgetFeed
from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.connection_limit import check_open_files
from clawstream.gateway.asgi.http_server import server_config
from clawstream.gateway.durability.log import KafkaLogProducer, Message
from clawstream.gateway.durability.spool import lock
from clawstream.gateway.engines.discovery import EngineDiscovery
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.errors import GatewayError
from clawstream.runtime.logs import logger
from clawstream.runtime.process import open_files
from clawstream.runtime.process.lifecycle import run_async
from clawstream.runtime.process.ports import taken
from clawstream.runtime.process.readiness import ready
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

KAFKA_WAIT_S = 3.0
"""Maximum wait for Kafka before the first call.

Another gateway could overtake records that are spooled meanwhile.
"""
STOP_RESERVE_S = 8.0
"""Part of up.stop_timeout_s reserved for draining the spool and flushing."""


class _Server(uvicorn.Server):
    """uvicorn server without signal handlers: `clawstream.runtime.process.lifecycle` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; port 0 selects a free port. Raises PortTaken."""
    # asyncio disables Nagle's algorithm only on sockets that it creates with a named protocol. With
    # it, the first event of a stream would wait 40 ms for the delayed acknowledgement of the head.
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
    """Serve until `stop`, then finish the calls in flight, drain the spool to Kafka, and flush.

    If Kafka is unreachable at the start, calls are spooled after a short wait.
    """
    # The application locks it too, but uvicorn would exit with its own code and traceback.
    os.close(lock(settings.spool_dir / settings.gateway.gateway_id))
    try:
        check_open_files(open_files.limit(), settings.gateway.max_in_flight)
    except SettingsError as error:  # it serves fewer calls
        logger().warning("open_files_few", do=str(error))
    listening = listen(settings.gateway.host, settings.gateway.port)
    cluster, codec, topics = cluster_of(settings), Codec(), settings.kafka.topics
    producer = KafkaLogProducer(cluster, topics.steps, settings.gateway.produce_timeout_s)
    registry = EngineRegistry(settings.gateway.upstreams)
    budgets = BudgetFeed(cluster, settings)
    app = create_app(settings, producer, registry, codec, budgets=budgets)
    pending_dead_letters: set[asyncio.Task[None]] = set()

    def dead_letter(message: Message) -> None:
        task = asyncio.create_task(app.dead_letter(message))
        pending_dead_letters.add(task)
        task.add_done_callback(pending_dead_letters.discard)

    feed = EngineDiscovery(
        cluster, settings, registry, codec, lambda: producer.uptime_s, dead_letter
    )
    server = _Server(server_config(app, max(1, int(settings.up.stop_timeout_s - STOP_RESERVE_S))))
    producer.start()
    feed.start()
    budgets.start()
    began = asyncio.get_running_loop().time()
    while (  # noqa: ASYNC110 - the producer is a thread
        not producer.reachable
        and not stop.is_set()
        and asyncio.get_running_loop().time() - began < KAFKA_WAIT_S
    ):
        await asyncio.sleep(0.01)
    logger().info("gateway_listens", host=settings.gateway.host, port=settings.gateway.port)
    serving = asyncio.create_task(server.serve([listening]))
    announcing = asyncio.create_task(_announce_ready(server, settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    announcing.cancel()
    server.should_exit = True
    # The threads may wait for Kafka; streams go on meanwhile.
    await asyncio.gather(serving, asyncio.to_thread(feed.stop), asyncio.to_thread(budgets.stop))
    stopping.cancel()
    await producer.close()
    if not stop.is_set():
        raise GatewayError(
            "the web application did not start or ended unexpectedly, see the log lines above"
        )
    logger().info("gateway_stopped")


async def _announce_ready(server: uvicorn.Server, settings: Settings) -> None:
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    ready(f"http://{settings.gateway.host}:{settings.gateway.port}")


def main(settings: Settings) -> None:
    """Run the gateway until SIGTERM or SIGINT. Never returns, see `run_async`."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_async("gateway", settings, serve)
