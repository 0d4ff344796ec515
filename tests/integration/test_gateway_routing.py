"""The engines' records on the workers topic of a real Kafka decide the routing of calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.durability.log import Message
from clawstream.gateway.engines.client import EngineCall
from clawstream.gateway.engines.discovery import EngineDiscovery
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import DeadLetter, WorkerStatus
from clawstream.schemas.settings import Settings

HI = ScriptedChoice([7, 8], ["Hel", "lo"], [-0.5, -0.25])
BODY = b'{"model": "policy", "messages": []}'
SOON_S = 240.0
CODEC = Codec()


def status(name: str, url: str, state: Any) -> WorkerStatus:
    return WorkerStatus(
        worker_id=name, base_url=url, models=("policy",), state=state, heartbeat_at=1,
        heartbeat_interval_ms=600_000, started_at=1, loads=0,
    )  # fmt: skip


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - the conditions set no event
            await asyncio.sleep(0.01)


def test_workers_load_serve_drain_and_leave(cluster: Cluster, settings: Settings) -> None:
    create_topics(cluster, settings)
    topic, letters = settings.kafka.topics.workers, list[Message]()
    producer = cluster.producer()

    def say(name: str, url: str, state: Any) -> None:
        producer.put(topic, name.encode(), CODEC.encode(status(name, url, state)))
        producer.flush()

    async def body() -> None:
        registry, gate = EngineRegistry(), asyncio.Semaphore(0)
        engines = EnginePool(settings.gateway, registry, time.monotonic)
        feed = EngineDiscovery(cluster, settings, registry, CODEC, time.monotonic, letters.append)
        slow, quick = (
            ScriptedEngine(lambda _: Script([HI], gate=gate)),
            ScriptedEngine(lambda _: Script([HI]), "vllm"),
        )

        async def call() -> tuple[str | None, str]:
            async with EngineCall(
                engines,
                "POST",
                "/v1/chat/completions",
                BODY,
                {},
                key="t",
                run_id="r",
                model="policy",
            ) as response:
                assert response.status == 200 and b"Hel" in await response.read()
                return response.spec.worker_id, response.spec.kind

        async with slow.serve() as slow_url, quick.serve() as quick_url:
            await engines.open()
            feed.start()
            say("a", slow_url, "loading")
            await until(lambda: engines.states() == {"a": "loading"})
            waiting = asyncio.create_task(call())
            say("bad", "http://:0/", "ready")
            say("a", slow_url, "ready")
            await until(lambda: slow.requests)  # it waited, and continues by itself
            say("b", quick_url, "ready")
            say("a", slow_url, "draining")
            await until(lambda: engines.states() == {"a": "draining", "b": "ready"})
            assert await call() == ("b", "vllm") and not waiting.done()
            gate.release()
            assert await waiting == ("a", "captured")
            producer.put(topic, b"a", None)
            producer.put(topic, b"b", None)
            producer.flush()
            await until(lambda: engines.states() == {} and not engines.ready)
            await asyncio.to_thread(feed.stop)
            await engines.close()

    asyncio.run(body())
    producer.close()
    (letter,) = [CODEC.decode(m.value) for m in letters]
    assert isinstance(letter, DeadLetter) and (letter.key, letter.reason) == (b"bad", "invalid")
