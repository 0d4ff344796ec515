"""The gateway over HTTP, between the official OpenAI client and a scripted engine. Loopback only, a log in memory."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import uvicorn
from openai import APIError, APIStatusError, AsyncOpenAI

from gateway.app import create_app
from gateway.bus import MemoryBus
from gateway.main import listen
from gateway.scripted_engine import Say, Script, ScriptedEngine
from gateway.spool import Spool
from gateway.workers import WorkerTable
from schemas.codec import Codec
from schemas.events import SessionEvent, Step, VersionSpan
from schemas.settings import Settings
from schemas.tokens import unpack_ids, unpack_logprobs

HI = Say([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
YO = Say([5, 6], ["Y", "o"], [-1.0, -2.0], finish_reason="length")
LOOK = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"key": "k1"}'}}
CALLS = Say([4, 5, 6], [None, None, None], [-0.1, -0.2, -0.3], tool_calls=[LOOK], finish_reason="tool_calls")
SPANS: list[dict[str, Any]] = [
    {"version": "default/3.0", "start": 0, "end": 2},
    {"version": "default/4.0", "start": 2, "end": 3},
]
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()  # dear to make: it parses all schemas
Scenario = Callable[["World"], Awaitable[None]]


@dataclass
class World:
    """A running gateway and all around it."""

    url: str
    engine: ScriptedEngine
    engine_url: str
    bus: MemoryBus
    http: aiohttp.ClientSession
    settings: Settings

    def client(self, path: str = "/t1/g1/v1", key: str = "none", **more: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url + path, api_key=key, max_retries=0, **more)

    def records(self) -> list[Any]:
        return [CODEC.decode(m.value) for m in self.bus.messages]

    def steps(self) -> list[Step]:
        return [r for r in self.records() if isinstance(r, Step)]

    def spooled(self) -> list[Any]:
        files = sorted((self.settings.spool_dir / "gateway-0").glob("*.spool"))
        found = []
        for file in files:
            from gateway.spool import frames

            found += [CODEC.decode(m.value) for m, _ in frames(file.read_bytes())]
        return found

    async def metric(self, name: str) -> float:
        text = await (await self.http.get(self.url + "/metrics")).text()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(10):
            while not (value := condition()):  # noqa: ASYNC110 - the conditions are of the outside
                await asyncio.sleep(0.005)
        return value


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[str]:
    """The app behind a real web server, without the server's own main loop and its ticks."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(app, http="httptools", ws="none", log_config=None, lifespan="on")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup([listening])
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        await server.shutdown([listening])


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """`play(scenario, script, **gateway settings)` runs an async scenario in a world of its own."""

    def run(scenario: Scenario, script: Script | Callable[[Any], Script], **gateway: Any) -> None:
        async def body() -> None:
            engine = ScriptedEngine(script if callable(script) else lambda _: script)
            bus = MemoryBus()
            async with engine.serve() as engine_url:
                settings = Settings.model_validate(
                    {
                        "data_dir": tmp_path,
                        "gateway": {"upstreams": [engine_url], "worker_wait_s": 0.5, "produce_timeout_s": 0.5}
                        | gateway,
                    }
                )
                app = create_app(settings, bus, WorkerTable(settings.gateway.upstreams), CODEC)
                async with running(app) as url, aiohttp.ClientSession() as http:
                    await scenario(World(url, engine, engine_url, bus, http, settings))

        asyncio.run(body())

    return run


def events(body: bytes) -> list[bytes]:
    return [e for e in body.split(b"\n\n") if e]


def assert_tokens(step: Step, say: Say, prompt: Iterable[int] = (1, 2, 3)) -> None:
    assert step.prompt_token_ids is not None and step.response_token_ids is not None
    assert step.response_logprobs is not None and step.tokens_absent_reason is None
    assert unpack_ids(step.prompt_token_ids) == list(prompt)
    assert unpack_ids(step.response_token_ids) == list(say.ids)
    assert unpack_logprobs(step.response_logprobs) == pytest.approx(list(say.logprobs))


# ---------------------------------------------------------------- what is recorded


def test_plain_call_is_one_step_with_everything(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client(default_headers={"x-clawstream-channel": "val", "idempotency-key": "once"}) as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK, temperature=0.5)
        reply = raw.parse()
        assert reply.choices[0].message.content == "Hello"
        (step,) = w.steps()
        assert raw.headers["x-clawstream-trajectory"] == "t1"
        assert raw.headers["x-clawstream-step"] == step.step_id
        assert "x-clawstream-versions" not in raw.headers
        assert step.step_id == f"{step.call_id}.0" and step.call_id.startswith("t1~")
        assert (step.run_id, step.trajectory_key, step.group_id, step.channel) == ("default", "t1", "g1", "val")
        assert (step.protocol, step.model, step.status, step.finish_reason) == ("openai.chat", "policy", "ok", "stop")
        assert json.loads(step.request_json) == ASK | {"temperature": 0.5}
        assert json.loads(step.response_json) == HI.message()
        assert_tokens(step, HI)
        assert step.versions == tuple(VersionSpan(**s) for s in SPANS)
        assert (step.version_first, step.version_last) == ("default/3.0", None)
        assert (step.retry_count, step.idempotency_key, step.streamed) == (0, "once", False)
        assert step.user_agent is not None and "OpenAI" in step.user_agent
        assert w.bus.messages[0].key == b"t1"
        assert w.engine.requests[0]["temperature"] == 0.5
        assert await w.metric("clawstream_gateway_steps_answered_total") == 1

    play(scenario, Script([HI], versions=[SPANS], version_start="default/3.0"))


def test_streamed_call_is_one_step_with_everything(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK, stream=True)
            text = ""
            async for chunk in raw.parse():
                text += chunk.choices[0].delta.content or ""
        assert text == "Hello"
        (step,) = w.steps()
        assert raw.headers["x-clawstream-step"] == step.step_id
        assert step.streamed and step.status == "ok" and step.finish_reason == "stop"
        assert json.loads(step.response_json) == {"role": "assistant", "content": "Hello"}
        assert_tokens(step, HI)
        assert step.versions == tuple(VersionSpan(**s) for s in SPANS)
        assert step.version_first == "default/3.0"

    play(scenario, Script([HI], versions=[SPANS], version_start="default/3.0"))


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_sibling_steps(play: Callable[..., None], stream: bool) -> None:
    async def scenario(w: World) -> None:
        async with w.http.post(w.url + "/t1/g1/chat/completions", json=ASK | {"n": 2, "stream": stream}) as r:
            assert r.status == 200
            await r.read()
        steps = w.steps()
        assert [s.choice_index for s in steps] == [0, 1]
        assert len({s.call_id for s in steps}) == 1
        assert r.headers["x-clawstream-step"].split(",") == [s.step_id for s in steps]
        assert_tokens(steps[0], HI)
        assert_tokens(steps[1], YO)
        assert [s.finish_reason for s in steps] == ["stop", "length"]
        assert steps[0].versions == tuple(VersionSpan(**s) for s in SPANS)
        assert steps[1].versions == (VersionSpan(version="default/4.0", start=0, end=2),)

    play(scenario, Script([HI, YO], versions=[SPANS, [{"version": "default/4.0", "start": 0, "end": 2}]]))


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_pass_and_are_recorded(play: Callable[..., None], stream: bool) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            if stream:
                parts = [c async for c in await client.chat.completions.create(**ASK, stream=True)]
                seen = [t for c in parts for t in c.choices[0].delta.tool_calls or []]
                assert seen[0].function is not None and seen[0].function.name == "lookup"
            else:
                message = (await client.chat.completions.create(**ASK)).choices[0].message
                assert message.tool_calls is not None and message.tool_calls[0].id == "call_1"
        (step,) = w.steps()
        assert json.loads(step.response_json)["tool_calls"] == [LOOK]
        assert step.finish_reason == "tool_calls"
        assert_tokens(step, CALLS)

    play(scenario, Script([CALLS]))


def test_tool_call_deltas_in_pieces_are_assembled() -> None:
    from gateway.openai_chat import OpenAIChat

    dialect = OpenAIChat()
    stream = dialect.stream(dialect.request(orjson.dumps(ASK | {"stream": True})))
    pieces: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]},
        {"reasoning": "be"}, {"reasoning": "cause"},
    ]  # fmt: skip
    for delta in pieces:
        stream.feed(b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": delta}]}) + b"\n\n")
    message = json.loads(stream.sent().choices[0].message_json)
    assert message == {
        "role": "assistant",
        "content": None,
        "reasoning": "because",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


# ---------------------------------------------------------------- what the client sees


@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 2}, {"logprobs": None}])
def test_client_sees_what_the_engine_would_have_said(play: Callable[..., None], more: dict[str, Any]) -> None:
    n = more.get("n", 1)
    says = iter([says[:n] for says in ([HI, YO], [CALLS, HI]) for _ in range(4)])

    async def scenario(w: World) -> None:
        for stream in (False, True, False, True):
            body = (
                ASK | more | {"stream": stream, "stream_options": {"include_usage": True}, "unknown": {"a": [1, 2.5]}}
            )
            direct = await (await w.http.post(w.engine_url + "/v1/chat/completions", json=body)).read()
            through = await (await w.http.post(w.url + "/t/g/v1/chat/completions", json=body)).read()
            assert events(through) == events(direct)
            assert w.engine.requests[-1]["unknown"] == {"a": [1, 2.5]}
            assert w.engine.requests[-1]["stream_options"] == {"include_usage": True}
        assert len(w.steps()) == 4 * n

    play(scenario, lambda _: Script(next(says)))


def test_engine_errors_pass_as_they_are(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK, stream=True)
        assert caught.value.status_code == 422
        assert caught.value.response.json()["error"] == {
            "message": "scripted", "type": "BadRequestError", "param": None, "code": 422,
        }  # fmt: skip
        assert w.bus.messages == []
        assert await w.metric('clawstream_gateway_calls_total{status="upstream_error"}') == 1

    play(scenario, Script([HI], status=422))


def test_missing_tokens_say_why(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            await client.chat.completions.create(**ASK)
        (step,) = w.steps()
        assert step.status == "ok" and step.response_token_ids is None
        assert step.tokens_absent_reason == "the engine gave no prompt token ids"

    play(scenario, Script([HI], no_tokens=True))


def test_engine_that_cut_a_reply_short_is_an_error(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            await client.chat.completions.create(**ASK)
        assert [s.status for s in w.steps()] == ["error"]
        assert await w.metric("clawstream_gateway_steps_answered_total") == 0

    play(scenario, Script([Say([1], ["x"], [-1.0], finish_reason="abort")]))


def test_models_come_from_an_engine(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.client() as client:
            assert [m.id async for m in client.models.list()] == ["policy"]

    play(scenario, Script([HI]))


# ---------------------------------------------------------------- invariant 2


def test_plain_reply_waits_for_the_acknowledgement(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.gate.clear()
        async with w.client() as client:
            call = asyncio.create_task(client.chat.completions.create(**ASK))
            await w.until(lambda: w.engine.requests)
            await asyncio.sleep(0.2)
            assert not call.done()
            w.bus.gate.set()
            await call
        assert len(w.steps()) == 1

    play(scenario, Script([HI]))


@pytest.mark.parametrize("n", [1, 2])
def test_stream_holds_back_from_the_first_finish_reason_on(play: Callable[..., None], n: int) -> None:
    async def scenario(w: World) -> None:
        w.bus.gate.clear()
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True, "n": n}) as r:
            seen = b""
            while b"lo" not in seen and not (n == 2 and b'"Y"' in seen):
                seen += await r.content.readany()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:
                        seen += await r.content.readany()
            assert b'"finish_reason":"' not in seen and b"[DONE]" not in seen
            assert w.bus.messages == []
            w.bus.gate.set()
            rest = await r.read()
            assert rest.count(b'"finish_reason":"') == n and rest.endswith(b"data: [DONE]\n\n")
        assert len(w.steps()) == n

    play(scenario, Script([HI, YO][:n]))


def test_acks_none_does_not_wait(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.gate.clear()
        async with w.client() as client:
            await client.chat.completions.create(**ASK)
        assert w.bus.messages == []
        w.bus.gate.set()
        await w.until(lambda: len(w.steps()) == 1)

    play(scenario, Script([HI]), acks="none")


@pytest.mark.parametrize("known", [True, False], ids=["known to be away", "does not acknowledge"])
def test_without_acknowledgement_the_step_is_spooled_and_drained_later(play: Callable[..., None], known: bool) -> None:
    async def scenario(w: World) -> None:
        w.bus.reachable, w.bus.acknowledges = not known, False
        async with w.client() as client:
            for _ in range(3):
                await client.chat.completions.create(**ASK)
        assert w.bus.messages == []
        spooled = [s.step_id for s in w.spooled()]
        assert len(spooled) == 3
        assert await w.metric("clawstream_gateway_steps_spooled_total") == 3
        assert await w.metric("clawstream_gateway_spool_bytes") > 0
        w.bus.reachable = w.bus.acknowledges = True
        await w.until(lambda: len(w.steps()) == 3)
        assert [s.step_id for s in w.steps()] == spooled
        await w.until(lambda: not w.spooled())

    play(scenario, Script([HI]))


def test_full_spool_refuses_plain_calls_after_sampling(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.acknowledges = False
        async with w.client() as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.code == "not_recorded"
        assert len(w.engine.requests) == 1 and w.bus.messages == [] and w.spooled() == []
        assert await w.metric("clawstream_gateway_not_recorded_total") == 1
        assert await w.metric('clawstream_gateway_calls_total{status="not_recorded"}') == 1

    play(scenario, Script([HI]), spool_max_bytes=10)


def test_full_spool_ends_streams_in_an_error_event(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.acknowledges = False
        async with w.client() as client:
            with pytest.raises(APIError, match="spool is full"):
                async for _ in await client.chat.completions.create(**ASK, stream=True):
                    pass
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            body = await r.read()
        assert b"[DONE]" not in body and b'"finish_reason":"' not in body
        assert json.loads(events(body)[-1].removeprefix(b"data: "))["error"]["code"] == "not_recorded"

    play(scenario, Script([HI]), spool_max_bytes=10)


def test_kafka_away_and_spool_full_refuses_before_sampling(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.reachable = False
        async with w.client() as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
        assert w.engine.requests == []

    play(scenario, Script([HI]), spool_max_bytes=10)


def test_records_too_large_for_kafka_are_not_spooled(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.max_bytes = 20
        async with w.client() as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (500, "record_too_large")
        assert w.spooled() == []

    play(scenario, Script([HI]))


# ---------------------------------------------------------------- what breaks


def test_client_that_leaves_a_stream_aborts_the_engine_and_leaves_what_it_got(play: Callable[..., None]) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: World) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            seen = b""
            while b'"role"' not in seen:
                seen += await r.content.readany()
            gate.release()
            while b'"Hel"' not in seen:
                seen += await r.content.readany()
            r.close()
        (step,) = await w.until(w.steps)
        assert step.status == "aborted" and step.finish_reason is None
        assert json.loads(step.response_json)["content"] == "Hel"
        assert step.response_token_ids is not None
        assert unpack_ids(step.response_token_ids) == [7]
        await w.until(lambda: w.engine.aborted == 1)
        assert await w.metric('clawstream_gateway_calls_total{status="aborted"}') == 1
        assert await w.metric("clawstream_gateway_steps_answered_total") == 0

    play(scenario, Script([Say([7, 8, 9, 10], ["Hel", "lo", "!", "!"], [-1.0] * 4)], gate=gate))


def test_client_that_leaves_a_plain_call_leaves_an_aborted_step(play: Callable[..., None]) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: World) -> None:
        call = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await w.until(lambda: w.engine.requests)
        call.cancel()
        (step,) = await w.until(w.steps)
        assert step.status == "aborted" and step.response_token_ids is None and step.tokens_absent_reason
        await w.until(lambda: w.engine.aborted == 1)

    play(scenario, Script([HI], gate=gate))


def test_client_that_leaves_while_no_engine_was_asked_leaves_nothing(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        call = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await asyncio.sleep(0.1)
        call.cancel()
        while await w.metric('clawstream_gateway_calls_total{status="refused"}') < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert w.bus.messages == []

    play(scenario, Script([HI]), upstreams=[])


@pytest.mark.parametrize("how", ["die", "fail"])
def test_engine_that_fails_midway_is_an_error_step_and_an_error_event(play: Callable[..., None], how: str) -> None:
    async def scenario(w: World) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            body = await r.read()
        told = [json.loads(e[6:]) for e in events(body) if e.startswith(b"data: {")]
        assert "error" in told[-1] and [t["choices"][0]["delta"].get("content") for t in told[:-1]] == ["", "Hel"]
        (step,) = w.steps()
        assert step.status == "error" and json.loads(step.response_json)["content"] == "Hel"
        assert await w.metric('clawstream_gateway_calls_total{status="error"}') == 1

    play(scenario, Script([HI], die_after=2) if how == "die" else Script([HI], fail_after=2))


def test_engine_that_dies_before_a_token_leaves_no_step(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            assert b"error" in await r.read()
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 502 and (await r.json())["error"]["code"] == "upstream_failed"
        assert w.bus.messages == []

    play(scenario, Script([HI], die_after=1))


def test_refused_connections_are_tried_again_until_an_engine_is_there(play: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    async def scenario(w: World) -> None:
        async with w.client() as client:
            call = asyncio.create_task(client.chat.completions.create(**ASK))
            await asyncio.sleep(0.3)
            late = ScriptedEngine(lambda _: Script([YO]))
            async with late.serve(port):
                assert (await call).choices[0].message.content == "Yo"
        assert len(w.steps()) == 1

    play(scenario, Script([HI]), upstreams=[f"http://127.0.0.1:{port}/v1"], worker_wait_s=10)


def test_no_engine_is_503_with_retry_after(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 503 and r.headers["retry-after"]
            assert (await r.json())["error"]["code"] == "no_worker"
        async with w.http.get(w.url + "/ready") as r:
            assert r.status == 503 and await r.json() == {"kafka": True, "worker": False}

    play(scenario, Script([HI]), upstreams=[], worker_wait_s=0.1)


def test_busy_engine_is_asked_again(play: Callable[..., None]) -> None:
    asked: list[int] = []

    def script(_: Any) -> Script:
        asked.append(1)
        return Script([HI], status=503 if len(asked) < 3 else 200)

    async def scenario(w: World) -> None:
        async with w.client() as client:
            await client.chat.completions.create(**ASK)
        assert len(asked) == 3 and len(w.steps()) == 1

    play(scenario, script, worker_wait_s=5)


# ---------------------------------------------------------------- bad input

BAD = [
    (b"{", 400, "body"),
    (b"[]", 400, "body"),
    (b'"x"', 400, "body"),
    (b"\xff", 400, "body"),
    (b"", 400, "body"),
    (b"{}", 400, "messages"),
    (b'{"messages":null}', 400, "messages"),
    (b'{"messages":"hi"}', 400, "messages"),
    (b'{"messages":["hi"]}', 400, "messages"),
    (b'{"messages":[],"stream":"yes"}', 400, "stream"),
    (b'{"messages":[],"stream":1}', 400, "stream"),
    (b'{"messages":[],"n":0}', 400, "n"),
    (b'{"messages":[],"n":"2"}', 400, "n"),
    (b'{"messages":[],"n":true}', 400, "n"),
    (b'{"messages":[],"n":1.5}', 400, "n"),
    (b'{"messages":[],"n":1000}', 400, "n"),
    (b'{"messages":[],"model":7}', 400, "model"),
    (b'{"messages":[],"x":"' + b"y" * 5000 + b'"}', 413, "body"),
]


def test_bad_bodies_name_the_field(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        for body, status, param in BAD:
            async with w.http.post(w.url + "/t/g/v1/chat/completions", data=body) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), body
                assert error["type"] == "invalid_request_error" and error["message"]
        assert w.engine.requests == [] and w.bus.messages == []
        assert await w.metric('clawstream_gateway_calls_total{status="refused"}') == len(BAD)

    play(scenario, Script([HI]), max_body_bytes=4000)


ADDRESSES: list[tuple[str, str, dict[str, str], int, str | None]] = [
    ("POST", "/t~x/g/v1/chat/completions", {}, 400, "trajectory_key"),
    ("POST", "/t/g/v1/chat/completions", {"x-clawstream-run": "No"}, 400, "run_id"),
    ("POST", "/t/g/v1/chat/completions", {"x-clawstream-channel": "test"}, 400, "x-clawstream-channel"),
    ("POST", "/t/" + "g" * 201 + "/chat/completions", {}, 400, "group_id"),
    ("POST", "/v1/chat/completions", {}, 401, "authorization"),
    ("POST", "/v1/chat/completions", {"authorization": "Bearer other"}, 401, "authorization"),
    ("POST", "/v1/chat/completions", {"authorization": "Bearer sk-claw-x.y"}, 401, "authorization"),
    ("POST", "/v1/messages", {}, 404, None),
    ("GET", "/t/g/v1/chat/completions", {}, 405, None),
    ("GET", "/v1/models", {}, 401, "authorization"),
    ("GET", "/nowhere", {}, 404, None),
]


def test_bad_addresses_are_answered_in_the_same_shape(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        for method, path, headers, status, param in ADDRESSES:
            async with w.http.request(method, w.url + path, json=ASK, headers=headers) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), (path, error)
        assert w.bus.messages == []

    play(scenario, Script([HI]))


def test_more_calls_than_allowed_are_refused(play: Callable[..., None]) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: World) -> None:
        first = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await w.until(lambda: w.engine.requests)
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 503 and r.headers["retry-after"] == "1"
        gate.release()
        assert (await first).status == 200

    play(scenario, Script([HI], gate=gate), max_in_flight=1)


# ---------------------------------------------------------------- sessions, completion, rewards


def test_session_key_finds_its_trajectory(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        said = {
            "run_id": "r-1",
            "group_id": "task 7",
            "group_size": 4,
            "round": 1,
            "channel": "val",
            "metadata": {"a": 1},
        }
        async with w.http.post(w.url + "/sessions", json=said) as r:
            assert r.status == 201
            session = await r.json()
        (opened,) = w.records()
        assert opened == SessionEvent(
            event_id=opened.event_id, run_id="r-1", trajectory_key=session["trajectory_key"], kind="opened",
            group_id="task 7", channel="val", group_size=4, round=1, metadata_json=b'{"a":1}',
            created_at=opened.created_at,
        )  # fmt: skip
        assert session["base_url"] == w.url + "/v1"
        assert session["path_base_url"] == f"{w.url}/{session['trajectory_key']}/task%207/v1"
        async with w.client("/v1", session["session_key"]) as client:
            await client.chat.completions.create(**ASK)
        async with w.client(session["path_base_url"].removeprefix(w.url)) as client:
            await client.chat.completions.create(**ASK)
        steps = w.steps()
        assert {(s.trajectory_key, s.group_id) for s in steps} == {(session["trajectory_key"], "task 7")}
        assert [(s.run_id, s.channel) for s in steps] == [("r-1", "val"), ("default", None)]
        assert "authorization" not in {k.lower() for h in w.engine.headers for k in h}
        auth = {"authorization": f"Bearer {session['session_key']}"}
        async with w.http.post(w.url + "/sessions/complete", json={"reward": 1.0}, headers=auth) as r:
            assert r.status == 200
        reward, completed = w.records()[-2:]
        assert (reward.value, reward.source, reward.run_id) == (1.0, "env", "r-1")
        assert (completed.kind, completed.run_id, completed.group_id) == ("completed", "r-1", "task 7")

    play(scenario, Script([HI]))


def test_register_and_complete_by_path(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        for path, body in [
            ("/t/g/register_trajectory", {"channel": "val", "metadata": {"k": "v"}, "group_size": 2}),
            ("/t/g/v1/register_trajectory", None),
            ("/t/g/v1/complete_trajectory", {"outcome": "failed", "reason": "gave up", "channel": "val"}),
            ("/complete_trajectory/t", None),
            ("/complete_trajectory/t", {}),
        ]:
            async with w.http.post(w.url + path, json=body) as r:
                assert r.status == 200, await r.text()
        opened, again, failed, done, done_again = w.records()
        assert (opened.kind, opened.group_id, opened.channel, opened.group_size) == ("opened", "g", "val", 2)
        assert again.event_id == opened.event_id
        assert (failed.kind, failed.reason, failed.channel) == ("failed", "gave up", "val")
        assert (done.kind, done.group_id) == ("completed", None)
        assert done.event_id == done_again.event_id != failed.event_id

    play(scenario, Script([HI]))


def test_rewards_of_trajectories_and_steps(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        base = {"source": "rule", "name": "exact", "function_version": "2"}
        step = "t~01ARZ3NDEKTSV4RRFFQ69G5FAV.0"
        for more in (
            {"trajectory_id": "t", "value": 0.5, "by": "me", "detail": {"why": 1}},
            {"trajectory_id": "t", "value": 0.5},
            {"trajectory_id": "t", "value": 0.75, "reward_revision": 1},
            {"step_id": step, "value": 1, "run_id": "other"},
            {"step_id": step, "value": None, "reason": "no answer"},
        ):
            async with w.http.post(w.url + "/rewards", json=base | more) as r:
                assert r.status == 201, await r.text()
        first, same, revised, of_step, none = w.records()
        assert all(m.topic == "claw.rewards" and m.key == b"t" for m in w.bus.messages)
        assert (first.value, first.by, first.detail_json, first.step_id) == (0.5, "me", b'{"why":1}', None)
        assert first.event_id == same.event_id != revised.event_id
        assert (of_step.step_id, of_step.run_id, of_step.value) == (step, "other", 1.0)
        assert (none.value, none.reason) == (None, "no answer")

    play(scenario, Script([HI]))


REWARD = {"trajectory_id": "t", "source": "rule", "name": "x", "function_version": "1", "value": 1.0}


REQUESTS: list[tuple[str, Any, int, str]] = [
    ("/rewards", {**REWARD, "value": 1e9}, 422, "value"),
    ("/rewards", {**REWARD, "value": "1"}, 422, "value"),
    ("/rewards", {**REWARD, "value": True}, 422, "value"),
    ("/rewards", {**REWARD, "value": None}, 422, "reason"),
    ("/rewards", {**REWARD, "source": "guess"}, 422, "source"),
    ("/rewards", {**REWARD, "name": ""}, 422, "name"),
    ("/rewards", {**REWARD, "reward_revision": -1}, 422, "reward_revision"),
    ("/rewards", {**REWARD, "trajectory_id": None}, 422, "trajectory_id"),
    ("/rewards", {**REWARD, "trajectory_id": "a/b"}, 422, "trajectory_id"),
    ("/rewards", {**REWARD, "step_id": "t~x.0"}, 422, "step_id"),
    ("/rewards", {**REWARD, "step_id": "u~01ARZ3NDEKTSV4RRFFQ69G5FAV.0"}, 422, "step_id"),
    ("/rewards", {**REWARD, "run_id": "NO"}, 400, "run_id"),
    ("/rewards", {**REWARD, "surprise": 1}, 422, "surprise"),
    ("/rewards", {k: v for k, v in REWARD.items() if k != "name"}, 422, "name"),
    ("/rewards", b"{", 400, "body"),
    ("/rewards", orjson.dumps(REWARD).replace(b"1.0", b"NaN"), 422, "value"),
    ("/rewards", b'{"x": "' + b"y" * (1 << 20) + b'"}', 413, "body"),
    ("/sessions", {"group_size": 0}, 422, "group_size"),
    ("/sessions", {"channel": "test"}, 422, "channel"),
    ("/sessions", {"trajectory_key": "a b"}, 400, "trajectory_key"),
    ("/sessions", {"metadata": [1]}, 422, "metadata"),
    ("/sessions/complete", {}, 401, "authorization"),
    ("/complete_trajectory/a~b", {}, 400, "trajectory_key"),
    ("/t/g/complete_trajectory", {"outcome": "timed_out"}, 422, "outcome"),
    ("/t/g/complete_trajectory", {"reward": 1e300}, 422, "reward"),
    ("/t/g/register_trajectory", {"round": "1"}, 422, "round"),
]


def test_bad_control_requests_name_the_field(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        for path, body, status, param in REQUESTS:
            data = io.BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
            async with w.http.post(w.url + path, data=data, headers={"content-type": "application/json"}) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), (path, error)
        assert w.bus.messages == []

    play(scenario, Script([HI]))


def test_completion_without_a_log_is_spooled_behind_its_step(play: Callable[..., None]) -> None:
    async def scenario(w: World) -> None:
        w.bus.reachable = False
        async with w.client() as client:
            await client.chat.completions.create(**ASK)
        async with w.http.post(w.url + "/complete_trajectory/t1", json={"reward": 1}) as r:
            assert r.status == 200
        w.bus.reachable = True
        await w.until(lambda: len(w.bus.messages) == 3)
        assert [type(r).__name__ for r in w.records()] == ["Step", "Reward", "SessionEvent"]

    play(scenario, Script([HI]))


def test_two_gateways_need_two_spools(tmp_path: Path) -> None:
    from gateway.errors import SpoolTaken

    one, two = Spool(tmp_path, 1000), Spool(tmp_path, 1000)
    one.open()
    with pytest.raises(SpoolTaken, match="gateway_id"):
        two.open()
    one.close()
    two.open()
    two.close()
