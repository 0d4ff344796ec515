"""Invalid engine replies and stalled clients: records stay complete, memory stays bounded."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway, running
from support.log_producer import InMemoryLogProducer
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas import engine_frames
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
CODEC = Codec()
RunScenario = Callable[..., None]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\nconnection: close\r\n"
DONE = b"data: [DONE]\n\n"


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC)


@asynccontextmanager
async def before(
    tmp_path: Path, reply: bytes, kind: str = "text", forever: bytes = b"", **gateway: Any
) -> AsyncIterator[Any]:
    """Yield URL and log of a gateway whose engine sends these bytes, then an endless stream."""

    ends: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ends.append(task)
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            while forever:
                writer.write(forever)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # let go of, a probe too when the gateway ends
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    said = {"upstreams": [{"url": url, "kind": kind}], "worker_wait_s": 60} | gateway
    settings = Settings.model_validate({"data_dir": tmp_path, "gateway": said})
    producer = InMemoryLogProducer()
    async with running(
        create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
    ) as here:
        yield here, producer
    await asyncio.gather(*ends)
    server.close()


def steps(producer: InMemoryLogProducer) -> list[Step]:
    return [e for e in (CODEC.decode(m.value) for m in producer.messages) if isinstance(e, Step)]


def streamed(
    tmp_path: Path, events: bytes, kind: str = "text", **more: Any
) -> tuple[bytes, list[Step]]:
    """What a client gets of such a stream, and what is recorded of it."""

    async def body() -> tuple[bytes, list[Step]]:
        reply = HEAD % b"text/event-stream" + b"\r\n" + events
        async with (
            before(tmp_path, reply, kind) as (url, producer),
            aiohttp.ClientSession() as http,
        ):
            async with http.post(
                url + "/t/g/v1/chat/completions", json=ASK | {"stream": True} | more
            ) as got:
                return await got.read(), steps(producer)

    return asyncio.run(body())


def chunk(delta: Any, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]} | more).encode() + b"\n\n"


def test_an_error_that_is_null_is_none(tmp_path: Path) -> None:
    said = chunk({"content": "Hello"}, error=None) + chunk({}, "stop", error=None) + DONE
    got, (step,) = streamed(tmp_path, said)
    assert got == said
    assert step.status == "ok" and b"Hello" in step.response_json


def test_what_is_nested_deeply_is_recorded(tmp_path: Path) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    said = chunk({"content": "Hello"}) + chunk({"odd": deep}) + chunk({}, "stop") + DONE
    got, (step,) = streamed(tmp_path, said)
    assert got == said and step.status == "ok"
    assert orjson.loads(step.response_json) == {
        "role": "assistant",
        "content": "Hello",
        "odd": deep,
    }


def test_comments_of_a_stranger_tell_no_tokens(tmp_path: Path) -> None:
    told = engine_frames.Choice(0, pack_ids([1]), pack_logprobs([-1.0]), "stop", (("v", 0, 1),))
    comment = engine_frames.comment(
        engine_frames.encode(engine_frames.Frame(0, pack_ids([1]), (told,)))
    )
    said = comment + chunk({"content": "Hello"}) + chunk({}, "stop") + DONE
    got, (step,) = streamed(tmp_path, said)
    assert got == said
    assert (
        step.response_token_ids is None
        and step.tokens_absent_reason == "the provider reports no tokens"
    )


@pytest.mark.parametrize(
    "head",
    [{"g": 0, "c": [{"i": [], "n": 0}]}, {"g": 0, "c": [{"i": 0, "n": -1}]}, {"g": 0, "c": 7}],
)
def test_an_account_of_tokens_that_is_none_costs_the_tokens_alone(
    tmp_path: Path, head: Any
) -> None:
    comment = engine_frames.comment(orjson.dumps(head) + b"\n")
    got, (step,) = streamed(
        tmp_path, comment + chunk({"content": "Hello"}) + chunk({}, "stop") + DONE, "captured"
    )
    assert b"Hello" in got and got.endswith(DONE)
    assert step.status == "ok" and (step.tokens_absent_reason or "").startswith(
        "the engine's token frames"
    )


@pytest.mark.slow
def test_an_event_that_never_ends_passes_and_is_kept_as_far_as_there_is_room(
    tmp_path: Path,
) -> None:
    said = chunk({"content": "Hello"}) + b"data: " + b"x" * (9 << 20)
    got, (step,) = streamed(tmp_path, said)
    assert got == said
    assert step.status == "ok" and "an event of more than" in (step.tokens_absent_reason or "")
    assert b'"$blob"' in step.response_json  # 4 MiB of it, which the log does not take


@pytest.mark.slow
def test_choices_of_one_number_are_different_steps(tmp_path: Path) -> None:
    choices = [
        {"index": 0, "message": {"role": "assistant", "content": t}, "finish_reason": "stop"}
        for t in "ab"
    ]
    content = json.dumps({"choices": choices}).encode()
    reply = HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(content) + content

    async def body() -> None:
        async with before(tmp_path, reply) as (url, producer), aiohttp.ClientSession() as http:
            async with http.post(url + "/t/g/v1/chat/completions", json=ASK | {"n": 2}) as got:
                assert await got.read() == content
            assert [s.step_id.rpartition(".")[2] for s in steps(producer)] == ["0", "1"]
            assert got.headers["x-clawstream-step"].split(",") == [
                s.step_id for s in steps(producer)
            ]

    asyncio.run(body())


def test_choices_times_body_are_bounded(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        ask = ASK | {"n": 100, "pad": "x" * 40_000}
        async with w.http.post(w.url + "/t/g/v1/chat/completions", json=ask) as r:
            assert r.status == 413 and (await r.json())["error"]["param"] == "n"
        assert w.engine.requests == []
        async with w.http.post(w.url + "/t/g/v1/chat/completions", json=ASK) as r:
            assert r.status == 200

    run_scenario(scenario, Script([HI]), max_in_flight_bytes=1 << 20)


def test_many_step_ids_do_not_outgrow_a_header(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/t/g/v1/chat/completions", json=ASK | {"n": 40}) as r:
            named = r.headers["x-clawstream-step"].split(",")
            assert r.status == 200 and r.headers["x-clawstream-step-count"] == "40"
        assert named == [s.step_id for s in w.steps()][:32] and len(w.steps()) == 40

    run_scenario(scenario, Script([HI] * 40))


def test_a_client_that_stops_reading_is_let_go(tmp_path: Path) -> None:
    data = chunk({"content": "x" * 60_000})
    event = b"%x\r\n%s\r\n" % (len(data), data)
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    async def body() -> None:
        async with before(tmp_path, head, forever=event, client_timeout_s=0.5) as (url, producer):
            port = int(url.rpartition(":")[2])
            ask = orjson.dumps(ASK | {"stream": True})
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(
                    b"POST /t/g/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                    b"content-length: %d\r\n\r\n" % len(ask)
                )
                client.sendall(ask)
                async with asyncio.timeout(60):
                    while not producer.messages:  # noqa: ASYNC110 - the log is filled from elsewhere
                        await asyncio.sleep(0.02)
            (step,) = steps(producer)
            assert step.status == "aborted"

    asyncio.run(body())


def test_a_body_that_does_not_come_is_a_408(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(w.url.rpartition(":")[2]))
        writer.write(
            b"POST /t/g/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
        )
        async with asyncio.timeout(60):
            assert b" 408 " in await reader.readline()
        writer.close()
        assert w.records() == []

    run_scenario(scenario, Script([HI]), client_timeout_s=0.3)
