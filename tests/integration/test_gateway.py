"""The gateway as a process on a real Kafka.

Every answered call is on the log, whichever process is stopped or killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.patience import until_async
from support.ports import free_port
from support.processes import freeze
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.durability.log import Message
from clawstream.gateway.durability.segment import read_segment, sync_of
from clawstream.gateway.durability.spool_frames import frame
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.runtime.kafka import Cluster
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import DeadLetter, SessionEvent, Step, WorkerStatus
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_ids
from clawstream.schemas.topics import partition_of

START = (
    "import sys; from clawstream.runtime.process.config import load; "
    "from clawstream.gateway.main import main; "
    "main(load(overrides=sys.argv[1:]))"
)
HI = ScriptedChoice([7, 8], ["Hel", "lo"], [-0.5, -0.25])
CODEC = Codec()


def with_gateway(settings: Settings, **gateway: Any) -> Settings:
    said = settings.model_dump(exclude_unset=True)
    return Settings.model_validate(said | {"gateway": said.get("gateway", {}) | gateway})


@contextmanager
def gateway(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway process; kill it at the end if it still runs."""
    log = Path(settings.data_dir) / f"{settings.gateway.gateway_id}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            die_with_parent([sys.executable, "-c", START, *overrides_of(settings)]),
            stderr=out,
            stdout=out,
        )
    try:
        yield process
    except BaseException:
        print(log.read_text()[-5000:])
        raise
    finally:
        process.kill()
        process.wait()


def url_of(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.gateway.port}"


async def until_up(settings: Settings, path: str = "/health", status: int = 200) -> None:
    async with asyncio.timeout(90), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url_of(settings) + path) as r:
                    if r.status == status:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)


@asynccontextmanager
async def agent(settings: Settings, path: str, key: str = "none") -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=url_of(settings) + path, api_key=key, max_retries=0, timeout=300
    ) as client:
        yield client


def text_of(step: Step) -> str:
    text: str = json.loads(step.request_json)["messages"][0]["content"]
    return text


async def call(client: AsyncOpenAI, text: str = "hi", stream: bool = False) -> list[str]:
    """Make one call, read it to its end, and return its step ids."""
    ask: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": text}],
        "stream": stream,
    }
    raw = await client.chat.completions.with_raw_response.create(**ask)
    if stream:
        finished = [c.choices[0].finish_reason async for c in raw.parse() if c.choices]
        assert finished[-1] == "stop"
    return str(raw.headers["x-clawstream-step"]).split(",")


def on_log(cluster: Cluster, settings: Settings) -> list[Any]:
    """Return the records of the steps topic without repeated ids, in order per partition."""
    topic = settings.kafka.topics.steps
    found: dict[str, Any] = {}
    for partition in range(settings.kafka.partitions):
        for record in cluster.read_all(topic, partition):
            event = CODEC.decode(record.value)
            found.setdefault(getattr(event, "step_id", None) or event.event_id, event)
    return list(found.values())


def step_ids(cluster: Cluster, settings: Settings) -> list[str]:
    return [e.step_id for e in on_log(cluster, settings) if isinstance(e, Step)]


def spool_files(settings: Settings) -> list[Path]:
    return sorted((settings.spool_dir / settings.gateway.gateway_id).glob("*.spool"))


def status(url: str, state: Any = "ready") -> WorkerStatus:
    return WorkerStatus(
        worker_id="w0", base_url=url, models=("policy",), state=state, heartbeat_at=1,
        heartbeat_interval_ms=600_000, started_at=1, loads=0,
    )  # fmt: skip


async def answer_all(settings: Settings, other: Settings, trajectories: int) -> list[str]:
    """Run many agents at once, streaming and not; their turns alternate between two gateways.

    Returns all answered step ids.
    """

    async def one(i: int) -> list[str]:
        answered = []
        async with agent(settings, f"/t{i}/g/v1") as a, agent(other, f"/t{i}/g/v1") as b:
            for turn in range(4):
                answered += await call((a, b)[turn % 2], f"{i}/{turn}", stream=turn % 3 == 1)
        return answered

    return [s for found in await asyncio.gather(*map(one, range(trajectories))) for s in found]


def test_two_gateways_are_one(cluster: Cluster, settings: Settings) -> None:
    first = with_gateway(settings, port=free_port(), worker_wait_s=20, produce_timeout_s=60)
    second = with_gateway(
        settings, port=free_port(), worker_wait_s=20, produce_timeout_s=60, gateway_id="gateway-1"
    )
    create_topics(cluster, settings)
    topics = settings.kafka.topics

    async def body() -> list[str]:
        engine = ScriptedEngine(lambda _: Script([HI], version_start="default/0.0"))
        async with engine.serve() as engine_url:
            await asyncio.gather(until_up(first), until_up(second))
            await until_up(first, "/ready", 503)
            producer = cluster.producer()
            producer.put(topics.workers, b"poison", b"\x00\x01")
            producer.put(topics.workers, b"w0", CODEC.encode(status(engine_url)))
            producer.flush()
            await asyncio.gather(until_up(first, "/ready"), until_up(second, "/ready"))
            answered = await answer_all(first, second, 20)
            # A session opened at one gateway continues at the other.
            async with aiohttp.ClientSession() as http:
                async with http.post(
                    url_of(first) + "/sessions", json={"group_id": "g", "run_id": "r2"}
                ) as r:
                    session = await r.json()
                async with agent(second, "/v1", session["session_key"]) as client:
                    answered += await call(client)
                bearer = {"authorization": f"Bearer {session['session_key']}"}
                async with http.post(url_of(second) + "/sessions/complete", headers=bearer) as r:
                    assert r.status == 200
            # A worker that leaves receives no more calls.
            producer.put(topics.workers, b"w0", None)
            producer.flush()
            await until_up(second, "/ready", 503)
            producer.close()
        return answered

    with gateway(first), gateway(second):
        answered = asyncio.run(body())
    events = on_log(cluster, settings)
    steps = [e for e in events if isinstance(e, Step)]
    assert len(answered) == 81 and sorted(answered) == sorted(s.step_id for s in steps)
    assert {s.gateway_id for s in steps} == {"gateway-0", "gateway-1"}
    assert {s.worker_id for s in steps} == {"w0"}
    for i in range(20):  # the consecutive calls of one agent have this order on the log
        turns = [s for s in steps if s.trajectory_key == f"t{i}"]
        assert [text_of(s) for s in turns] == [f"{i}/{turn}" for turn in range(4)]
    session_events = [e for e in events if not isinstance(e, Step)]
    assert [type(e) for e in session_events] == [SessionEvent, SessionEvent]
    assert [e.kind for e in session_events] == ["opened", "completed"]
    partition = partition_of(session_events[0].trajectory_key.encode(), settings.kafka.partitions)
    in_order = [
        CODEC.decode(r.value) for r in cluster.read_all(settings.kafka.topics.steps, partition)
    ]
    ours = [e for e in in_order if e.trajectory_key == session_events[0].trajectory_key]
    assert [type(e).__name__ for e in ours] == ["SessionEvent", "Step", "SessionEvent"]
    letters = [CODEC.decode(r.value) for r in cluster.read_all(topics.dead_letters)]
    assert {(d.topic, d.key, d.value, d.reason) for d in letters if isinstance(d, DeadLetter)} == {
        (topics.workers, b"poison", b"\x00\x01", "undecodable")
    }


def settings_on(kafka: str, tmp_path: Path, engine_port: int) -> Settings:
    """Return an installation on its own Kafka, with one engine that does not report its state."""
    engine = f"http://127.0.0.1:{engine_port}"
    return Settings.model_validate(
        {
            "data_dir": tmp_path / "data",
            "kafka": {"bootstrap_servers": kafka, "partitions": 2},
            "gateway": {"port": free_port(), "produce_timeout_s": 1.0, "upstreams": [engine]},
        }
    )


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Run a broker that only this test stops."""
    with EmbeddedBroker(tmp_path / "broker", free_port()) as broker:
        yield broker
        if broker.pid is not None:
            os.kill(broker.pid, signal.SIGCONT)


def test_broker_paused_and_gateway_killed_lose_nothing(
    own_broker: EmbeddedBroker, tmp_path: Path
) -> None:
    pid = own_broker.pid
    assert pid is not None
    engine_port = free_port()
    settings = settings_on(own_broker.bootstrap_servers, tmp_path, engine_port)
    cluster = Cluster(settings.bootstrap_servers)
    answered: list[str] = []

    async def before() -> None:
        await until_up(settings, "/ready")
        async with agent(settings, "/t/g") as client:
            answered.extend(await call(client))
            while spool_files(settings):  # noqa: ASYNC110 - a slow Kafka has acknowledged it late
                await asyncio.sleep(0.02)
            await asyncio.to_thread(freeze, pid)
            answered.extend(await call(client))  # waits for a missing acknowledgement, then spooled
            answered.extend(await call(client, stream=True))
            async with aiohttp.ClientSession() as http:
                async with http.post(
                    url_of(settings) + "/complete_trajectory/t", json={"reward": 1}
                ) as r:
                    assert r.status == 200
            # Calls that the kill cut off have no answer, so there is no guarantee for them.
        await asyncio.gather(*[burst(f"/k{i}/g", 3) for i in range(8)])

    async def burst(path: str, calls: int) -> None:
        async with agent(settings, path) as client:
            for _ in range(calls):
                answered.extend(await call(client))

    async def after() -> None:
        await until_up(settings)
        async with agent(settings, "/t/g") as client:
            answered.extend(await call(client))
            assert spool_files(settings)
            os.kill(pid, signal.SIGCONT)
            await until_async(lambda: not spool_files(settings), "the spool is drained")
            answered.extend(await call(client, stream=True))

    async def body() -> None:
        async with ScriptedEngine(lambda _: Script([HI])).serve(engine_port):
            with gateway(settings) as process:
                await before()
                process.send_signal(signal.SIGKILL)
                process.wait()
            waiting = [m for f in spool_files(settings) for m in read_segment(f).messages]
            # Two steps of t, its reward, its end, and the 24 steps of the others.
            assert len(waiting) == 28
            assert_torn_tail_is_harmless(spool_files(settings)[-1], waiting[0])
            with gateway(settings) as process:
                await after()
                process.send_signal(signal.SIGTERM)
                assert process.wait(180) == 0

    asyncio.run(body())
    found = step_ids(cluster, settings)
    assert sorted(found) == sorted(answered) and len(answered) == 29
    # The log keeps the order of the answers.
    in_order = [e for e in on_log(cluster, settings) if e.trajectory_key == "t"]
    assert [e.step_id for e in in_order if isinstance(e, Step)] == [
        s for s in answered if s.startswith("t~")
    ]
    assert [type(e).__name__ for e in in_order] == [
        "Step",
        "Step",
        "Step",
        "SessionEvent",
        "Step",
        "Step",
    ]
    assert len(list((settings.spool_dir / "gateway-0" / "damaged").glob("*.spool"))) == 1


def assert_torn_tail_is_harmless(file: Path, message: Message) -> None:
    """Append half of a frame, as a crash during a write would."""
    with file.open("ab") as out:
        out.write(frame(message, sync_of(file))[:-3])


def test_sigterm_finishes_what_is_in_flight(cluster: Cluster, settings: Settings) -> None:
    gate = asyncio.Semaphore(0)

    async def body() -> list[str]:
        engine = ScriptedEngine(lambda _: Script([HI], gate=gate))
        async with engine.serve() as engine_url:
            mine = with_gateway(
                settings, port=free_port(), upstreams=[engine_url], produce_timeout_s=60
            )
            with gateway(mine) as process:
                await until_up(mine, "/ready")
                async with agent(mine, "/t/g") as client:
                    calls = [asyncio.create_task(call(client, stream=s)) for s in (False, True)]
                    while len(engine.requests) < 2:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    process.send_signal(signal.SIGTERM)
                    while True:  # it accepts no more calls
                        try:
                            async with (
                                aiohttp.ClientSession() as http,
                                http.get(url_of(mine) + "/health"),
                            ):
                                await asyncio.sleep(0.02)
                        except aiohttp.ClientError:
                            break
                    for _ in range(8):
                        gate.release()
                    answered = await asyncio.gather(*calls)
                assert await asyncio.to_thread(process.wait, 180) == 0
        return [s for found in answered for s in found]

    answered = asyncio.run(body())
    assert sorted(step_ids(cluster, settings)) == sorted(answered)


def test_sigterm_cuts_off_what_takes_too_long_and_records_it(
    cluster: Cluster, settings: Settings
) -> None:
    """A generation runs longer than the stop timeout.

    The client's connection breaks, and the log has the received part as aborted.
    """

    async def body() -> None:
        # The engine sends one token and then nothing.
        engine = ScriptedEngine(lambda _: Script([HI], gate=asyncio.Semaphore(1)))
        async with engine.serve() as engine_url:
            mine = with_gateway(
                settings, port=free_port(), upstreams=[engine_url], produce_timeout_s=60
            )
            mine = Settings.model_validate(
                mine.model_dump(exclude_unset=True) | {"up": {"stop_timeout_s": 9}}
            )
            with gateway(mine) as process:
                await until_up(mine, "/ready")
                ask = {"messages": [], "stream": True}
                async with aiohttp.ClientSession() as http:
                    async with http.post(url_of(mine) + "/t/g/chat/completions", json=ask) as r:
                        seen = b""
                        while b'"Hel"' not in seen:
                            seen += await r.content.readany()
                        process.send_signal(signal.SIGTERM)
                        with pytest.raises(
                            (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError)
                        ):
                            await r.read()
                assert await asyncio.to_thread(process.wait, 180) == 0

    asyncio.run(body())
    (step,) = (e for e in on_log(cluster, settings) if isinstance(e, Step))
    assert (step.status, unpack_ids(step.response_token_ids or b"")) == ("aborted", [7])


def test_any_order_of_starts(tmp_path: Path) -> None:
    """Without Kafka, calls are served and spooled; they reach the log when Kafka is there."""
    port, engine_port = free_port(), free_port()
    settings = settings_on(f"127.0.0.1:{port}", tmp_path, engine_port)

    async def body() -> list[str]:
        async with ScriptedEngine(lambda _: Script([HI])).serve(engine_port):
            with gateway(settings) as process:
                await until_up(settings, "/ready", 503)
                async with agent(settings, "/t/g") as client:
                    answered = await call(client) + await call(client, stream=True)
                with EmbeddedBroker(tmp_path / "broker", port):
                    await until_up(settings, "/ready")
                    await until_async(lambda: not spool_files(settings), "the spool is drained")
                    assert step_ids(Cluster(settings.bootstrap_servers), settings) == answered
                    process.send_signal(signal.SIGTERM)
                    assert process.wait(180) == 0
        return answered

    assert len(asyncio.run(body())) == 2
