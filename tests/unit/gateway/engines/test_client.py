"""Calls to engines over real sockets: choice of the engine, retries, and the end of a call.

A call fails only if no retry can help.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from support.gateway import GatewayFixture, running
from support.log_producer import InMemoryLogProducer
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script
from support.wire import (
    ASK,
    BUSY,
    HI,
    LIMITED,
    OK,
    SOON_S,
    Rig,
    Wire,
    as_text,
    key_of,
    run,
    saying,
    wired,
)

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.errors import GatewayError, NoEngine, UpstreamFailed, UpstreamTimeout
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

CODEC = Codec()
pytestmark = pytest.mark.usefixtures("each_event_loop")


@pytest.mark.parametrize("how", ["before", "head"])
def test_a_connection_that_breaks_before_a_byte_is_asked_once_elsewhere(how: str) -> None:
    async def breaks(wire: Wire, _: bytes) -> bool:
        if how == "head":
            await wire.say(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
        wire.die()
        return True

    async def test(broken: str, whole: str) -> None:
        async with Rig(as_text(broken, whole)) as rig:
            assert await rig.ask(key_of(broken, rig)) == (200, b"hi")
            # Without None, because the broken engine may have sampled.
            assert [w and w.base_url for w in rig.asked] == [broken, whole]
            assert rig.count('upstream_retries_total{reason="broken"}') == 1
        async with Rig(as_text(broken)) as rig:
            with pytest.raises(UpstreamFailed, match="went away"):
                await rig.ask()
            assert len(rig.asked) == 2

    run(breaks, saying(OK), test=test)


def test_what_breaks_after_a_byte_is_the_calls_error() -> None:
    async def breaks(wire: Wire, _: bytes) -> bool:
        await wire.say(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi")
        wire.die()
        return True

    async def test(broken: str, whole: str) -> None:
        async with Rig(as_text(broken, whole)) as rig:
            key = key_of(broken, rig)
            with pytest.raises(UpstreamFailed):
                await rig.ask(key)
            assert len(rig.asked) == 1
            async with rig.call(
                "POST", "/v1/x", None, {}, key=key, run_id="r", model=None
            ) as response:
                pieces = response.pieces()
                assert await anext(pieces) == b"hi"
                with pytest.raises(UpstreamFailed):
                    await anext(pieces)

    run(breaks, saying(OK), test=test)


@pytest.mark.parametrize(("reply", "reason"), [(BUSY, "busy"), (LIMITED, "limited")])
def test_an_engine_that_has_enough_gives_way_to_another(reply: bytes, reason: str) -> None:
    async def test(full: str, free: str) -> None:
        async with Rig(as_text(full, free)) as rig:
            key = key_of(full, rig)
            assert await rig.ask(key) == (200, b"hi")
            assert [w and w.base_url for w in rig.asked] == [full, None, free]
            assert rig.count(f'upstream_retries_total{{reason="{reason}"}}') == 1
            if reason == "limited":  # the next call skips the engine
                rig.asked.clear()
                assert await rig.ask(key) == (200, b"hi") and len(rig.asked) == 1

    run(saying(reply), saying(OK), test=test)


def test_a_providers_own_refusal_passes_when_nobody_else_is_free() -> None:
    async def test(full: str) -> None:
        async with Rig(as_text(full)) as rig:
            async with rig.call(
                "POST", "/v1/x", None, {}, key="k", run_id="r", model=None
            ) as response:
                assert (response.status, response.header("retry-after")) == (429, "9")
                assert await response.read() == b"slow"
            assert rig.engines.ready != []

    run(saying(LIMITED), test=test)
    run(saying(BUSY), test=lambda url: _status_is(url, 503))


async def _status_is(url: str, status: int) -> None:
    async with Rig(as_text(url)) as rig:
        assert (await rig.ask())[0] == status


def test_our_own_engine_that_is_busy_is_asked_again_until_the_wait_is_over() -> None:
    async def test(url: str) -> None:
        async with Rig([{"url": url, "kind": "vllm"}], worker_wait_s=1.0) as rig:
            with pytest.raises(NoEngine, match="503"):
                await rig.ask()
            assert len(rig.asked) > 2

    async def answer(wire: Wire, request: bytes) -> bool | None:
        await wire.say(OK if b"/health" in request else BUSY)
        return None

    run(answer, test=test)


def test_an_engine_that_is_too_slow_is_a_timeout_and_asked_only_once() -> None:
    async def test(url: str) -> None:
        async with Rig(as_text(url), upstream_timeout_s=0.1) as rig:
            with pytest.raises(UpstreamTimeout):
                await rig.ask()
            assert len(rig.asked) == 1

    run(lambda wire, _: asyncio.sleep(SOON_S), test=test)


def test_a_client_that_leaves_gives_everything_back() -> None:
    arrived, gone = asyncio.Event(), asyncio.Event()

    async def answer(wire: Wire, _: bytes) -> bool:
        arrived.set()
        assert await wire.reader.read() == b""
        gone.set()
        return True

    async def test(url: str) -> None:
        async with Rig(as_text(url)) as rig:
            call = asyncio.create_task(rig.ask())
            await rig.until(arrived.is_set)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(SOON_S):
                await gone.wait()
            engine = rig.engines.pick("k", ("r", None), ())
            assert (
                engine is not None
                and engine.in_flight == 0
                and rig.engines.states()[url] == "ready"
            )

    run(answer, test=test)


def test_keys_and_prompts_are_in_no_log(capsys: pytest.CaptureFixture[str]) -> None:
    async def test(url: str) -> None:
        upstreams = [
            {"url": url, "kind": "vllm", "api_key": "hunter2"},
            {"url": "http://127.0.0.1:1", "api_key": "hunter2"},
        ]
        async with Rig(upstreams, worker_wait_s=0.3) as rig:
            with pytest.raises(GatewayError) as error:
                async with rig.call(
                    "POST", "/v1/x", b"prompt1", {}, key="k", run_id="r", model=None
                ):
                    pass
            assert "hunter2" not in str(error.value) and "prompt1" not in str(error.value)
            await rig.until(lambda: not rig.engines.ready)
        said = "".join(capsys.readouterr())
        assert "engine_out" in said and "hunter2" not in said and "prompt1" not in said

    run(saying(BUSY), test=test)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_one_dead_upstream_of_two_costs_no_failed_call(tmp_path: Path, stream: bool) -> None:
    # Enough agents that each engine is the first choice of several, whatever its port.
    calls, agents, held = 3, 64, []

    async def holds(wire: Wire, request: bytes) -> bool | None:
        """Answer like an engine under load that dies before it has sent a byte of its replies."""
        if request.startswith(b"POST"):
            held.append(request)
            await asyncio.sleep(SOON_S)
        told = b"x-clawstream-capture: 1\r\n" if b"/version" in request else b""
        await wire.say(b"HTTP/1.1 200 OK\r\n" + told + b"content-length: 2\r\n\r\n{}")
        return None

    async def agent(w: GatewayFixture, number: int) -> None:
        for _ in range(calls):
            url = f"{w.url}/t{number}/g/v1/chat/completions"
            async with w.http.post(url, json=ASK | {"stream": stream}) as response:
                text = await response.text()
                assert response.status == 200
                assert (
                    text.endswith("data: [DONE]\n\n") and "error" not in text
                    if stream
                    else "Hello" in text
                )

    async def body() -> None:
        engine = ScriptedEngine(lambda _: Script([HI]))
        async with AsyncExitStack() as stack:
            dies = await stack.enter_async_context(AsyncExitStack())
            urls = [
                await stack.enter_async_context(engine.serve()),
                await dies.enter_async_context(wired(holds)),
            ]
            # With a given kind, both engines get calls from the start.
            both = [{"url": url, "kind": "captured"} for url in urls]
            settings = Settings.model_validate(
                {"data_dir": tmp_path, "gateway": {"upstreams": both}}
            )
            producer = InMemoryLogProducer()
            app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
            url = await stack.enter_async_context(running(app))
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            w = GatewayFixture(url, engine, urls[0], producer, http, settings, CODEC)
            async with asyncio.TaskGroup() as work:
                for i in range(agents):
                    work.create_task(agent(w, i))
                await w.until(lambda: len(held) > 5 and len(engine.requests) > 5, SOON_S)
                await dies.aclose()
            steps = w.steps()
            assert Counter(s.trajectory_key for s in steps) == {
                f"t{i}": calls for i in range(agents)
            }
            assert len({s.step_id for s in steps}) == calls * agents and {
                s.status for s in steps
            } == {"ok"}
            assert await w.metric(
                'clawstream_gateway_upstream_retries_total{reason="broken"}'
            ) >= len(held)
            assert await w.metric("clawstream_gateway_engine_outages_total") == 1
            assert (
                await w.metric('clawstream_gateway_calls_total{status="answered"}')
                == calls * agents
            )

    asyncio.run(body())
