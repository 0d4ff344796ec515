"""When a worker may end its engine, and which URL it tells."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.ports import free_port

from clawstream.rollout.main import public_url
from clawstream.rollout.server.drain import QUIET_S, in_flight_of, wait_drained
from clawstream.rollout.server.process import VllmServer
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import RolloutSettings, Settings

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="policy"}} {}
vllm:num_requests_running{{engine="1",model_name="policy"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="policy"}} 3.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 3.0
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
"""


def test_in_flight_is_what_runs_and_what_waits() -> None:
    assert in_flight_of(METRICS.format("2.0")) == 6
    assert in_flight_of("vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n") == 0
    assert in_flight_of("") == 0


class Engine:
    """Answers /metrics. in_flight: what it says; None: it has an error."""

    def __init__(self, in_flight: int | None) -> None:
        self.in_flight, self.asked = in_flight, 0

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.in_flight is None:
            return web.Response(status=500)
        return web.Response(text=f"vllm:num_requests_running {float(self.in_flight)}\n")


def drain(engine: Engine, timeout_s: float, then: int | None) -> tuple[bool, float]:
    """Drain it; after it was asked three times, it says something else.

    Whether it was drained, and how long that took.
    """

    async def body() -> tuple[bool, float]:
        app = web.Application()
        app.router.add_get("/metrics", engine.metrics)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as http:
            began = time.monotonic()
            waiting = asyncio.create_task(wait_drained(http, url, timeout_s))
            while engine.asked < 3 and not waiting.done():  # noqa: ASYNC110 - it is asked over HTTP
                await asyncio.sleep(0.01)
            engine.in_flight = then
            result = await waiting, time.monotonic() - began
        await runner.cleanup()
        return result

    return asyncio.run(body())


@pytest.mark.parametrize("before", [2, None])
def test_an_engine_is_drained_when_it_has_been_idle_for_a_while(before: int | None) -> None:
    done, seconds = drain(Engine(before), 60.0, then=0)
    assert done and seconds >= QUIET_S


@pytest.mark.parametrize("after", [1, None])
def test_what_never_ends_is_not_waited_for_for_ever(after: int | None) -> None:
    done, seconds = drain(Engine(1), 1.5, then=after)
    assert not done and seconds >= 1.5


def test_nobody_waits_for_an_engine_that_is_gone() -> None:
    async def body() -> bool:
        async with aiohttp.ClientSession() as http:
            return await wait_drained(http, f"http://127.0.0.1:{free_port()}", 60.0)

    assert asyncio.run(body())


@pytest.mark.parametrize(
    ("rollout", "url"),
    [
        ({}, "http://127.0.0.1:8200"),
        ({"host": "10.0.0.7"}, "http://10.0.0.7:8200"),
        ({"host": "0.0.0.0", "public_url": "http://gpu-1:9000/v1/"}, "http://gpu-1:9000"),
        ({"attach_urls": ["http://a:1/v1"], "public_url": "https://b/"}, "https://b"),
    ],
)
def test_gateways_are_told_a_url_that_they_can_call(rollout: dict[str, Any], url: str) -> None:
    settings = Settings.model_validate({"rollout": rollout})
    server = VllmServer(settings.rollout, Path("model"), Path("log"))
    assert public_url(settings, server.base_url) == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_url_to_tell(host: str) -> None:
    settings = Settings.model_validate({"rollout": {"host": host}})
    server = VllmServer(settings.rollout, Path("model"), Path("log"))
    assert server.base_url in ("http://127.0.0.1:8200", "http://[::1]:8200")
    with pytest.raises(SettingsError, match=r"rollout\.public_url"):
        public_url(settings, server.base_url)


def test_a_worker_is_not_killed_while_it_drains() -> None:
    assert Settings().rollout_drain_timeout_s == Settings().up.stop_timeout_s - 11
    assert Settings.model_validate({"up": {"stop_timeout_s": 5}}).rollout_drain_timeout_s == 1
    long = {"rollout": {"drain_timeout_s": 600}, "up": {"stop_timeout_s": 611}}
    assert Settings.model_validate(long).rollout_drain_timeout_s == 600
    with pytest.raises(ValueError, match=r"up\.stop_timeout_s=45: the worker would be killed"):
        Settings.model_validate({"rollout": RolloutSettings(drain_timeout_s=35).model_dump()})
