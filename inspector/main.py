"""Serve the pages: `clawstream inspect`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from clawstream.inspector.live.feed import Live
from clawstream.inspector.web.app import Parts, create_app
from clawstream.runtime.logs import logger
from clawstream.runtime.process.ports import check_free

STOP_S = 2
"""Longest wait for open pages at the end."""


class _Server(uvicorn.Server):
    """uvicorn server without signal handlers: `clawstream.runtime.process.lifecycle` has them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(parts: Parts, live: Live, host: str, port: int, stop: asyncio.Event) -> None:
    """Serve until `stop`. Raises PortTaken."""
    check_free(host, port, "the inspector", "--port or --host")
    config = uvicorn.Config(
        create_app(parts), host=host, port=port, ws="none", lifespan="on", log_config=None,
        access_log=False, server_header=False, timeout_graceful_shutdown=STOP_S,
    )  # fmt: skip
    server = _Server(config)
    serving = asyncio.create_task(server.serve())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    live.stop()
    parts.operations.stop()
    parts.lake.close()  # the interpreter waits for the thread of a running query
    server.should_exit = True
    await serving
    stopping.cancel()
    logger().info("inspector_stopped")
