"""The end of a reply, and the records in failures of Kafka, the spool, the engine or the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI
from support.gateway import GatewayFixture, run_gateway
from support.ports import free_port
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.durability.spool import Spool
from clawstream.gateway.errors import SpoolTaken
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Reward, SessionEvent
from clawstream.schemas.tokens import unpack_ids

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
YO = ScriptedChoice([5, 6], ["Y", "o"], [-1.0, -2.0], finish_reason="length")
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Provide `run_scenario(scenario, script, **gateway settings)`.

    It runs an async scenario against a new gateway.
    """
    return partial(run_gateway, tmp_path, CODEC)


def sdk(w: GatewayFixture, path: str = "/t1/g1/v1", key: str = "none", **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=w.url + path, api_key=key, max_retries=0, timeout=600, **more)


async def counted(w: GatewayFixture, name: str, count: float) -> None:
    """Wait until a metric has reached a value."""
    async with asyncio.timeout(60):
        while await w.metric(name) < count:  # noqa: ASYNC110 - the metric is read over HTTP
            await asyncio.sleep(0.01)


def events(body: bytes) -> list[bytes]:
    return [e for e in body.split(b"\n\n") if e]


# ---------------------------------------------------------------- invariant 2


def test_plain_reply_waits_for_the_acknowledgement(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        async with sdk(w) as client:
            call = asyncio.create_task(client.chat.completions.create(**ASK))
            await w.until(lambda: w.engine.requests)
            await asyncio.sleep(0.2)
            assert not call.done()
            w.producer.gate.set()
            await call
        assert len(w.steps()) == 1

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize("n", [1, 2])
def test_stream_holds_back_from_the_first_finish_reason_on(
    run_scenario: RunScenario, n: int
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        async with w.http.post(
            w.url + "/t/g/chat/completions", json=ASK | {"stream": True, "n": n}
        ) as r:
            seen = b""
            while b"lo" not in seen and not (n == 2 and b'"Y"' in seen):
                seen += await r.content.readany()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    while True:
                        seen += await r.content.readany()
            assert b'"finish_reason":"' not in seen and b"[DONE]" not in seen
            assert w.records() == []
            w.producer.gate.set()
            rest = await r.read()
            assert rest.count(b'"finish_reason":"') == n and rest.endswith(b"data: [DONE]\n\n")
        assert len(w.steps()) == n

    run_scenario(scenario, Script([HI, YO][:n]))


def test_acks_none_does_not_wait(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        assert w.records() == []
        w.producer.gate.set()
        await w.until(lambda: len(w.steps()) == 1)

    run_scenario(scenario, Script([HI]), acks="none")


@pytest.mark.parametrize("known", [True, False], ids=["known to be away", "does not acknowledge"])
def test_without_acknowledgement_the_step_is_spooled_and_drained_later(
    run_scenario: RunScenario, known: bool
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.reachable, w.producer.acknowledges = not known, False
        async with sdk(w) as client:
            for _ in range(3):
                await client.chat.completions.create(**ASK)
        assert w.records() == []
        spooled = [s.step_id for s in w.spooled()]
        assert len(spooled) == 3
        assert await w.metric("clawstream_gateway_steps_spooled_total") == 3
        assert await w.metric("clawstream_gateway_spool_bytes") > 0
        w.producer.reachable = w.producer.acknowledges = True
        await w.until(lambda: len(w.steps()) == 3)
        assert [s.step_id for s in w.steps()] == spooled
        await w.until(lambda: not w.spooled())

    run_scenario(scenario, Script([HI]))


def test_full_spool_refuses_plain_calls_after_sampling(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.acknowledges = False
        async with sdk(w) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "2"
        assert caught.value.code == "not_recorded"
        assert len(w.engine.requests) == 1 and w.records() == [] and w.spooled() == []
        assert await w.metric("clawstream_gateway_not_recorded_total") == 1
        assert await w.metric('clawstream_gateway_calls_total{status="not_recorded"}') == 1

    run_scenario(scenario, Script([HI]), spool_max_bytes=10)


def test_full_spool_ends_streams_in_an_error_event(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.acknowledges = False
        async with sdk(w) as client:
            with pytest.raises(APIError, match="spool is full"):
                async for _ in await client.chat.completions.create(**ASK, stream=True):
                    pass
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            body = await r.read()
        assert b"[DONE]" not in body and b'"finish_reason":"' not in body
        assert (
            json.loads(events(body)[-1].removeprefix(b"data: "))["error"]["code"] == "not_recorded"
        )

    run_scenario(scenario, Script([HI]), spool_max_bytes=10)


def test_kafka_away_and_spool_full_refuses_before_sampling(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.reachable = False
        async with sdk(w) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert caught.value.status_code == 503 and "retry-after" in caught.value.response.headers
        assert w.engine.requests == []

    run_scenario(scenario, Script([HI]), spool_max_bytes=10)


@pytest.mark.slow
def test_records_too_large_for_kafka_are_not_spooled(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.max_bytes = 20
        async with sdk(w) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK)
        assert (caught.value.status_code, caught.value.code) == (500, "record_too_large")
        assert w.spooled() == []

    run_scenario(scenario, Script([HI]))


# ---------------------------------------------------------------- failures


def test_client_that_leaves_a_stream_aborts_the_engine_and_leaves_what_it_got(
    run_scenario: RunScenario,
) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
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

    run_scenario(
        scenario,
        Script([ScriptedChoice([7, 8, 9, 10], ["Hel", "lo", "!", "!"], [-1.0] * 4)], gate=gate),
    )


def test_client_that_leaves_a_plain_call_leaves_an_aborted_step(run_scenario: RunScenario) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        call = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await w.until(lambda: w.engine.requests)
        call.cancel()
        (step,) = await w.until(w.steps)
        assert (
            step.status == "aborted"
            and step.response_token_ids is None
            and step.tokens_absent_reason
        )
        await w.until(lambda: w.engine.aborted == 1)

    run_scenario(scenario, Script([HI], gate=gate))


def test_client_that_leaves_while_no_engine_was_asked_leaves_nothing(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        call = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await counted(w, "clawstream_gateway_waiting", 1)
        call.cancel()
        await counted(w, 'clawstream_gateway_calls_total{status="refused"}', 1)
        assert w.records() == []

    run_scenario(scenario, Script([HI]), upstreams=[], worker_wait_s=300)


@pytest.mark.parametrize("how", ["die", "fail"])
def test_engine_that_fails_midway_is_an_error_step_and_an_error_event(
    run_scenario: RunScenario, how: str
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            body = await r.read()
        told = [json.loads(e[6:]) for e in events(body) if e.startswith(b"data: {")]
        assert "error" in told[-1] and [
            t["choices"][0]["delta"].get("content") for t in told[:-1]
        ] == ["", "Hel"]
        (step,) = w.steps()
        assert step.status == "error" and json.loads(step.response_json)["content"] == "Hel"
        assert await w.metric('clawstream_gateway_calls_total{status="error"}') == 1

    run_scenario(
        scenario, Script([HI], die_after=2) if how == "die" else Script([HI], fail_after=2)
    )


def test_engine_that_dies_before_a_token_leaves_a_step_only_where_one_was_named(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK | {"stream": True}) as r:
            assert b"error" in await r.read()
            named = r.headers["x-clawstream-step"]
        (step,) = w.steps()
        assert (step.step_id, step.status, step.response_token_ids) == (named, "error", None)
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 502 and (await r.json())["error"]["code"] == "upstream_failed"
        assert len(w.steps()) == 1

    run_scenario(scenario, Script([HI], die_after=1))


def test_refused_connections_are_tried_again_until_an_engine_is_there(
    run_scenario: RunScenario,
) -> None:
    port = free_port()

    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            call = asyncio.create_task(client.chat.completions.create(**ASK))
            await counted(w, "clawstream_gateway_waiting", 1)
            late = ScriptedEngine(lambda _: Script([YO]))
            async with late.serve(port):
                assert (await call).choices[0].message.content == "Yo"
        assert len(w.steps()) == 1

    run_scenario(
        scenario, Script([HI]), upstreams=[f"http://127.0.0.1:{port}/v1"], worker_wait_s=60
    )


def test_no_engine_is_503_with_retry_after(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 503 and r.headers["retry-after"]
            assert (await r.json())["error"]["code"] == "no_engine"
        async with w.http.get(w.url + "/ready") as r:
            assert r.status == 503 and await r.json() == {"kafka": True, "worker": False}

    run_scenario(scenario, Script([HI]), upstreams=[], worker_wait_s=0.1)


def test_busy_engine_is_asked_again(run_scenario: RunScenario) -> None:
    asked: list[int] = []

    def script(_: Any) -> Script:
        asked.append(1)
        return Script([HI], status=503 if len(asked) < 3 else 200)

    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        assert len(asked) == 3 and len(w.steps()) == 1

    run_scenario(scenario, script)


def test_completion_without_a_log_is_spooled_behind_its_step(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.reachable = False
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        async with w.http.post(w.url + "/complete_trajectory/t1", json={"reward": 1}) as r:
            assert r.status == 200
        w.producer.reachable = True
        await w.until(lambda: len(w.producer.messages) == 3)
        assert [type(r).__name__ for r in w.records()] == ["Step", "Reward", "SessionEvent"]
        assert w.records()[-1].rewards == {"complete_trajectory": 1.0}

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize("path", ["/complete_trajectory/t1", "/submit_steps"])
def test_an_end_carries_its_reward_and_is_sent_after_the_reward_is_durable(
    run_scenario: RunScenario, path: str
) -> None:
    """A gateway that is killed in between leaves a reward without an end, never the reverse."""
    last = {"trajectory_uid": "t1", "prompt_ids": [1], "response_ids": [2], "is_last": True}

    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        body = {"steps": [{**last, "reward": 0.5}]} if "steps" in path else {"reward": 0.5}
        request = asyncio.create_task(w.http.post(w.url + path, json=body))
        await w.until(lambda: w.producer.held)
        assert not any(isinstance(CODEC.decode(m.value), SessionEvent) for m in w.producer.held)
        w.producer.gate.set()
        async with await request as r:
            assert r.status == 200
        *_, reward, end = w.records()
        assert (type(reward), reward.value) == (Reward, 0.5)
        assert (end.kind, end.rewards) == ("completed", {"complete_trajectory": 0.5})

    run_scenario(scenario, Script([HI]))


def test_two_gateways_need_two_spools(tmp_path: Path) -> None:
    one, two = Spool(tmp_path, 1000), Spool(tmp_path, 1000)
    one.open()
    with pytest.raises(SpoolTaken, match="gateway_id"):
        two.open()
    one.close()
    two.open()
    two.close()


# ---------------------------------------------------------------- limits


def test_bytes_in_flight_are_bounded_and_given_back(run_scenario: RunScenario) -> None:
    gate = asyncio.Semaphore(0)
    large = ASK | {"messages": [{"role": "user", "content": "x" * 6000}]}

    async def scenario(w: GatewayFixture) -> None:
        held = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=large))
        await w.until(lambda: w.engine.requests)
        for _ in range(2):
            async with w.http.post(w.url + "/t/g/chat/completions", json=large) as r:
                assert r.status == 503 and r.headers["retry-after"]
                error = (await r.json())["error"]
                assert error["code"] == "overloaded" and "max_in_flight_bytes" in error["message"]
        async with w.http.post(w.url + "/t/g/chat/completions", data=b"x" * 8001) as r:
            assert r.status == 413
        gate.release()
        assert (await held).status == 200
        gate.release()
        async with w.http.post(w.url + "/t/g/chat/completions", json=large) as r:
            assert r.status == 200
        assert len(w.engine.requests) == 2

    run_scenario(
        scenario, Script([HI], gate=gate), max_in_flight_bytes=10_000, max_body_bytes=8_000
    )


def test_a_producer_that_takes_nothing_more_is_what_the_spool_is_for(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        w.producer.acknowledges = False
        calls = [
            asyncio.create_task(w.http.post(w.url + f"/t{i}/g/chat/completions", json=ASK))
            for i in range(5)
        ]
        await w.until(lambda: len(w.engine.requests) == 5)
        w.producer.gate.set()
        assert [(await call).status for call in calls] == [200] * 5
        assert len(w.spooled()) == 5
        w.producer.acknowledges = True
        await w.until(lambda: len(w.steps()) == 5)

    run_scenario(scenario, Script([HI]))
