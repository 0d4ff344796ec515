"""A gateway process with few files: strangers and calls beyond them cost no record."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path

import aiohttp
from support.ports import free_port
from support.raw_http import ASK_STREAM, CALL, connected, request
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.durability.segment import read_segment
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
FILES, CALLS, STRANGERS, AGENTS = 400, 70, 200, 120
START_S = 120


def test_few_files_lose_no_record_and_blame_no_engine(tmp_path: Path) -> None:
    """Kafka is away, so each record needs the spool."""
    port = free_port()
    log = tmp_path / "log"
    gate = asyncio.Semaphore(0)

    async def until_up(url: str) -> None:
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{url}/health") as reply:
                        if reply.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def stranger(url: str, until: asyncio.Event) -> None:
        async with connected(url) as client:
            await client.send(b"\r\n")
            await until.wait()

    async def agent(url: str, number: int) -> bytes:
        async with connected(url) as client:
            path = CALL.replace("/t/", f"/t{number}/")
            try:
                await client.send(request("POST", path, ASK_STREAM))
                head = await client.head()
                body = await client.reader.readuntil(b"0\r\n\r\n") if b" 200 " in head else b""
            except (ConnectionError, asyncio.IncompleteReadError):
                return b""
            return head + body

    async def scenario(engine: ScriptedEngine) -> list[bytes]:
        url, leave = f"http://127.0.0.1:{port}", asyncio.Event()
        await until_up(url)
        async with asyncio.TaskGroup() as clients:
            for _ in range(STRANGERS):
                clients.create_task(stranger(url, leave))
            agents = [clients.create_task(agent(url, number)) for number in range(AGENTS)]
            async with asyncio.timeout(START_S):
                while (  # noqa: ASYNC110 - no event signals the condition
                    sum(map(asyncio.Task.done, agents)) + len(engine.requests) < AGENTS
                ):
                    await asyncio.sleep(0.02)
            for _ in range(20 * AGENTS):
                gate.release()
            await asyncio.wait(agents)
            leave.set()
        return [task.result() for task in agents]

    async def body() -> list[bytes]:
        engine = ScriptedEngine(lambda _: Script([HI], gate=gate))
        async with engine.serve() as engine_url:
            words = [
                f"data_dir={tmp_path}", f"gateway.port={port}", f"gateway.max_in_flight={CALLS}",
                f"gateway.upstreams=[{engine_url}]", "kafka.bootstrap_servers=127.0.0.1:9",
            ]  # fmt: skip
            with log.open("wb") as out:
                process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                    die_with_parent([sys.executable, "-m", "clawstream", "gateway", *words]),
                    stdout=out,
                    stderr=out,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, FILES)),
                )
            try:
                return await scenario(engine)
            finally:
                process.kill()
                process.wait()

    answers = asyncio.run(body())
    complete = [answer for answer in answers if b"[DONE]" in answer]
    spooled = [
        Codec().decode(message.value)
        for file in (tmp_path / "spool" / "gateway-0").glob("*.spool")
        for message in read_segment(file).messages
    ]
    written = log.read_text()
    assert len(complete) == CALLS, written[-3000:]
    assert sum(b" 503 " in answer for answer in answers) == AGENTS - CALLS
    assert sum(isinstance(record, Step) and record.status == "ok" for record in spooled) == CALLS
    assert "engine_out" not in written and "oo many open files" not in written, written[-3000:]
