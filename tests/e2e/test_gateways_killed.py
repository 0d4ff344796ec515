"""Two gateways serve 64 agents, with assemble and the lake behind them.

Each gateway is killed with SIGKILL, then the broker is stopped for 8 s. Every answered call has
its steps on Kafka and exactly one lake row for each, and no call hangs. During the kills, a
trajectory whose turns alternate between the gateways keeps its order. An outage of Kafka does not
keep the order, because each gateway has its own spool.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from support.feed import Feed
from support.ports import free_port
from support.processes import freeze
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice
from support.up import ROOT, Up, command, own_installation, up

from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.records import SessionEvent, Step, Trajectory
from clawstream.schemas.settings import Settings

AGENTS = 64
TURNS = 4
EACH_PHASE = 300
"""Number of answered calls between two faults."""
BROKER_STOPS_S = 8.0
"""More than gateway.produce_timeout_s, so that steps are spooled."""
HANGS_S = 120.0
"""Longest duration of a call; a longer call counts as hanging."""
PATIENCE_S = 400.0
"""Timeout that also suffices on a slow machine."""


def script(request: Any) -> Script:
    """Return one token per message and one for the reply, so that each prompt extends the last."""
    ids = [hash_of(m["content"]) for m in request["messages"]]
    reply = f"reply {len(ids)} to {request['messages'][-1]['content']}"
    return Script(
        [ScriptedChoice([hash_of(reply)], [reply], [-0.5])],
        prompt_ids=ids,
        version_start="default/0.0",
    )


def hash_of(text: str) -> int:
    """Return a token for a text."""
    return int.from_bytes(text.encode()[-3:], "big") + 7 * len(text) if text else 1


class Agents:
    """Sixty-four agents. They repeat a failed call with the same idempotency key.

    Attributes:
        answered: step ids by trajectory, in the order of the replies.
        completed: keys of the completed trajectories, in order.
    """

    def __init__(self, ports: list[int]) -> None:
        self.ports, self.stop = ports, asyncio.Event()
        self.answered: dict[str, list[str]] = {}
        self.completed: list[str] = []
        self.calls = self.failed = 0

    async def run(self) -> None:
        """Run the agents until `stop` is set."""
        timeout = aiohttp.ClientTimeout(total=HANGS_S)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
        ) as http:
            await asyncio.gather(*(self._agent(http, i) for i in range(AGENTS)))

    async def _agent(self, http: aiohttp.ClientSession, number: int) -> None:
        episode = 0
        while not self.stop.is_set():
            key = f"a{number}-{episode}"
            messages: list[dict[str, str]] = []
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"{key} turn {turn}"})
                reply, steps = await self._call(http, key, turn, messages)
                messages.append({"role": "assistant", "content": reply})
                self.answered.setdefault(key, []).extend(steps)
                self.calls += 1
            await self._post(
                http, number, f"/{key}/g{number}/v1/complete_trajectory", {"reward": 1.0}, {}
            )
            self.completed.append(key)
            episode += 1

    async def _call(
        self, http: aiohttp.ClientSession, key: str, turn: int, messages: list[dict[str, str]]
    ) -> tuple[str, list[str]]:
        headers = {"idempotency-key": f"{key}/{turn}"}
        ask = {"model": "policy", "messages": messages}
        said, steps = await self._post(
            http, turn, f"/{key}/{key}/v1/chat/completions", ask, headers
        )
        return said["choices"][0]["message"]["content"], steps

    async def _post(
        self, http: aiohttp.ClientSession, at: int, path: str, body: Any, headers: dict[str, str]
    ) -> tuple[Any, list[str]]:
        while True:
            port = self.ports[at % len(self.ports)]
            at += 1
            try:
                async with http.post(
                    f"http://127.0.0.1:{port}{path}", json=body, headers=headers
                ) as reply:
                    said = await reply.json()
                    if reply.status == 200:
                        return said, reply.headers.get("x-clawstream-step", "").split(",")
                    assert reply.status == 503, f"{reply.status}: {said}"
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                pass
            self.failed += 1
            await asyncio.sleep(0.1)

    async def more(self, calls: int) -> None:
        """Wait until this many more calls are answered."""
        goal = self.calls + calls
        async with asyncio.timeout(PATIENCE_S):
            while self.calls < goal:  # noqa: ASYNC110 - many tasks count
                await asyncio.sleep(0.05)


def installation(home: Path, engine_url: str) -> Settings:
    return Settings.model_validate({
        **own_installation(home, partitions=4, upstreams=[engine_url]),
        "lake": {"flush_interval_s": 1},
        "up": {"processes": ["broker", "gateway", "assemble", "lake"], "restart_delay_s": 0.3},
    })  # fmt: skip


@asynccontextmanager
async def second_gateway(running: Up, port: int) -> AsyncIterator[int]:
    """Run a second gateway beside the supervised gateway; yield its process id."""
    log = (running.home / "gateway-1.log").open("ab")
    words = [
        *overrides_of(running.settings),
        f"gateway.port={port}",
        "gateway.gateway_id=gateway-1",
    ]
    process = await asyncio.create_subprocess_exec(
        *die_with_parent(command("gateway", *words)), stdout=log, stderr=log, cwd=ROOT
    )
    try:
        await answers(port)
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        log.close()


async def answers(port: int) -> None:
    """Wait until a gateway is connected to Kafka and an engine."""
    async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(f"http://127.0.0.1:{port}/ready") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


async def faults(running: Up, agents: Agents, second_port: int) -> list[str]:
    """Kill one gateway, then the other, then stop the broker, while the agents continue.

    Returns:
        The trajectories that were complete before the broker stopped, without the first one of each
        agent: on a slow machine a gateway spools its first calls, while its producer connects.
    """
    pid = running.table["gateway"]["pid"]
    async with second_gateway(running, second_port) as second:
        await agents.more(EACH_PHASE)
        os.kill(pid, signal.SIGKILL)
        await agents.more(EACH_PHASE)
        os.kill(second, signal.SIGKILL)
        await agents.more(EACH_PHASE)
    in_order = [key for key in agents.completed if not key.endswith("-0")]
    async with second_gateway(running, second_port):
        broker = int(running.table["broker"]["pid"])
        nodes = [int(p) for p in children(broker)] or [broker]
        for node in nodes:
            freeze(node)
        try:
            stopped = time.monotonic()
            await agents.more(EACH_PHASE)
            await asyncio.sleep(max(0.0, BROKER_STOPS_S - (time.monotonic() - stopped)))
        finally:
            for node in nodes:
                os.kill(node, signal.SIGCONT)
        await agents.more(EACH_PHASE)
        agents.stop.set()
    return in_order


def children(pid: int) -> list[str]:
    """Return the process ids of the children."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_what_was_answered_is_kept_once_and_in_order(tmp_path: Path) -> None:
    async def body() -> None:
        async with ScriptedEngine(script).serve() as engine_url:
            settings = installation(tmp_path, engine_url)
            second_port = free_port()
            with up(settings) as running:
                await answers(settings.gateway.port)
                agents = Agents([settings.gateway.port, second_port])
                _, in_order = await asyncio.gather(
                    agents.run(), faults(running, agents, second_port)
                )
                feed = Feed(settings)
                ids = {s for steps in agents.answered.values() for s in steps}
                await asyncio.to_thread(check, running, feed, agents, ids, in_order)
                await asyncio.to_thread(running.stop)

    asyncio.run(body())


def check(running: Up, feed: Feed, agents: Agents, answered: set[str], in_order: list[str]) -> None:
    """Assert that Kafka, the lake and the trajectories contain the answered calls."""
    topics = feed.topics
    assert agents.failed > 0, "the faults were not felt"

    def on_log() -> set[str]:
        return {e.step_id for e in feed.events(topics.steps, Step)}

    running.until(lambda: answered <= on_log(), "every answered step is on the log", PATIENCE_S)

    def in_lake() -> Counter[str]:
        return Counter(feed.column("steps", "step_id"))

    running.until(
        lambda: answered <= in_lake().keys() and on_log() == in_lake().keys(),
        "every step is in the lake",
        PATIENCE_S,
    )
    doubled = {step: n for step, n in in_lake().items() if n > 1}
    assert not doubled
    completed = {e.trajectory_key for e in feed.events(topics.steps, SessionEvent)}
    running.until(
        lambda: (
            completed <= {t.trajectory_id for t in feed.events(topics.trajectories, Trajectory)}
        ),
        "every completed trajectory is assembled",
        PATIENCE_S,
    )
    trajectories = {t.trajectory_id: t for t in feed.events(topics.trajectories, Trajectory)}
    assert len(in_order) > AGENTS
    for key in in_order:
        told = agents.answered[key]
        assert [s.step_id for s in trajectories[key].steps if s.step_id in told] == told
