"""Wait until an engine is idle.

A started stream cannot move to another worker, so it must end here.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp

from clawstream.runtime.logs import logger

QUIET_S = 1.0
"""Required idle time: gateways without the latest worker status still send calls, and the last
bytes of a reply may be in transit.
"""
POLL_S = 0.1
IN_FLIGHT = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_TIMEOUT = aiohttp.ClientTimeout(total=5)


def in_flight_of(metrics: str) -> int:
    """Return the running and waiting requests from the text of vLLM's /metrics."""
    return sum(
        int(float(line.rsplit(" ", 1)[1]))
        for line in metrics.splitlines()
        if line.partition("{")[0].partition(" ")[0] in IN_FLIGHT
    )


async def wait_drained(http: aiohttp.ClientSession, base_url: str, timeout_s: float) -> bool:
    """Wait until the engine is idle for QUIET_S, or gone; return False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    idle_since: float | None = None
    in_flight: int | None = None
    while (now := time.monotonic()) < deadline:
        try:
            in_flight = await _in_flight(http, base_url)
        except aiohttp.ClientConnectorError:
            return True  # no server listens: it has not started, or has ended
        if in_flight != 0:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        elif now - idle_since >= QUIET_S:
            return True
        await asyncio.sleep(POLL_S)
    logger().warning("drain_timeout", base_url=base_url, in_flight=in_flight, seconds=timeout_s)
    return False


async def _in_flight(http: aiohttp.ClientSession, base_url: str) -> int | None:
    """Return the requests in flight; None when unknown, so possibly busy."""
    try:
        async with http.get(f"{base_url}/metrics", timeout=_TIMEOUT) as reply:
            return in_flight_of(await reply.text()) if reply.status == 200 else None
    except aiohttp.ClientConnectorError:
        raise
    except (aiohttp.ClientError, TimeoutError):
        return None
