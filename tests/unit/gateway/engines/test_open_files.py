"""A gateway that can open no more files blames no engine."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from support.gateway import GatewayFixture, run_gateway
from support.open_files import no_file_left
from support.raw_http import CALL, connected, request
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.schemas.codec.single_object import Codec

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])


def test_a_call_without_a_file_left_is_a_503_and_its_engine_stays(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as first, connected(w.url) as second:
            for client in (first, second):  # both are accepted
                await client.send(request("GET", "/health", b""))
                await client.reply()
            await first.send(request(path=CALL))  # has the only connection to the engine
            await w.until(lambda: w.engine.requests)
            with no_file_left():
                for _ in range(5):
                    await second.send(request(path=CALL))
                    head, body = await second.reply()
                    assert b" 503 " in head and b"EMFILE" in body, body
                    assert b"retry-after: 1" in head
            for _ in range(20):
                gate.release()
            assert b" 200 " in (await first.reply())[0]
            await second.send(request(path=CALL))
            assert b" 200 " in (await second.reply())[0]
        assert len(w.steps()) == 2
        assert await w.metric("clawstream_gateway_engine_outages") == 0

    run_gateway(
        tmp_path, Codec(), scenario, Script([HI], gate=gate), probe_interval_s=60
    )  # fmt: skip


def test_a_probe_without_a_file_left_tells_nothing_about_the_engine() -> None:
    async def scenario() -> None:
        spec = EngineSpec("e", "http://127.0.0.1:9", kind="captured", kind_known=True)
        engine = Engine(spec, time.monotonic, 60.0, lambda _: None)
        with no_file_left():
            engine.watch()
            await engine.prober.first_probe.wait()
        assert engine.healthy
        await engine.close()

    asyncio.run(scenario())
