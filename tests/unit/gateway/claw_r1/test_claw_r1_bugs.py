"""Test that the gateway has none of the faults measured in Claw-R1's gateway and data pool.

Each fault has a test, named after the fault and its number in docs/claw-r1.md. Faults of Claw-R1's
trainer, rollouter or dashboard alone have no test here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from openai import APITimeoutError, AsyncOpenAI
from support.assemble import InMemoryPartition
from support.gateway import GatewayFixture, run_gateway, running
from support.ports import free_port
from support.scripted.script import Script, ScriptedChoice
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from clawstream.gateway.app import create_app
from clawstream.gateway.claw_r1.tokenizer import TextOf
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Candidate, Reward, Step, Tick
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
SPANS = [[{"version": "default/3.0", "start": 0, "end": 3}]]
SCRIPT = Script([HI], versions=SPANS)
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return a function that runs an async scenario against a new gateway.

    Call it as `run_scenario(scenario, script, **gateway settings)`.
    """
    return partial(run_gateway, tmp_path, CODEC)


def sdk(w: GatewayFixture, path: str = "/t1/g1/v1", **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=w.url + path, api_key="not-used", **({"max_retries": 0, "timeout": 600} | more)
    )


class Impatient(httpx.AsyncHTTPTransport):
    """Simulate a client that times out as soon as an engine was called, `times` times."""

    def __init__(self, asked: Sequence[Any], times: int) -> None:
        super().__init__()
        self._asked, self._times = asked, times

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        before, waits = len(self._asked), asyncio.create_task(super().handle_async_request(request))
        if self._times:
            self._times -= 1
            while len(self._asked) == before:  # noqa: ASYNC110 - polls the engine's list
                await asyncio.sleep(0.005)
            waits.cancel()
            await asyncio.gather(waits, return_exceptions=True)
            raise httpx.ReadTimeout("no answer in time", request=request)
        return await waits


async def post(w: GatewayFixture, path: str, body: Any = None) -> tuple[int, Any]:
    async with w.http.post(w.url + path, json=body) as r:
        return r.status, await r.json()


def assembled(w: GatewayFixture) -> InMemoryPartition:
    """Return the result of assemble for the current log."""
    worker = InMemoryPartition()
    for at, record in enumerate(w.records()):
        worker.feed((REWARDS if isinstance(record, Reward) else STEPS, at, record))
    return worker


def candidate(w: GatewayFixture, key: str = "t1") -> Candidate:
    return assembled(w).last(key)


def submitted(**more: Any) -> dict[str, Any]:
    said: dict[str, Any] = {
        "prompt_ids": [1, 2], "response_ids": [3, 4], "rollout_log_probs": [-0.5, -0.5],
        "trajectory_uid": "t1", "prompt_uid": "g1", "policy_version": 3,
    }  # fmt: skip
    return {"steps": [said | more]}


# ---------------------------------------------------------------- the gateway, 2.3


def test_1_tokens_are_not_made_from_text_again(run_scenario: RunScenario) -> None:
    """Five sampled tokens, whose text would encode to two, keep five log-probabilities."""
    say = ScriptedChoice(
        [10, 11, 12, 13, 14], ["a", "b", "a", "b", ""], [-1.0, -2.0, -3.0, -4.0, -5.0]
    )

    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        status, said = await post(
            w, "/generate", {"prompt_ids": [1], "sampling_params": {"max_tokens": 9}}
        )
        assert status == 200 and said["token_ids"] == list(say.ids) and len(said["log_probs"]) == 5
        (found,) = w.steps()
        assert unpack_ids(found.response_token_ids or b"") == list(say.ids)
        assert unpack_logprobs(found.response_logprobs or b"") == list(say.logprobs)
        short = submitted(response_ids=[10, 11], rollout_log_probs=list(say.logprobs))
        assert (await post(w, "/submit_steps", short))[0] == 422

    run_scenario(scenario, Script([say]))


@pytest.mark.slow
def test_2_more_than_100_calls_are_asked_at_once(run_scenario: RunScenario) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

            async def call(i: int) -> int:
                async with http.post(f"{w.url}/t{i}/g/v1/chat/completions", json=ASK) as r:
                    await r.read()
                    return r.status

            calls = [asyncio.create_task(call(i)) for i in range(250)]
            await w.until(lambda: len(w.engine.requests) == 250, 300)
            for _ in calls:
                gate.release()
            assert set(await asyncio.gather(*calls)) == {200}

    run_scenario(scenario, Script([HI], gate=gate))


def test_3_bad_requests_do_not_fill_a_pipe_that_nobody_reads(
    run_scenario: RunScenario, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        capfd.readouterr()
        for i in range(200):
            async with w.http.post(
                w.url + ("/t/g/v1/chat/completions", "/submit_steps")[i % 2], data=b"{"
            ) as r:
                assert r.status == 400
        said = "".join(capfd.readouterr()).splitlines()
        # No output about the requests; a slow probe of an engine may be logged.
        assert [line for line in said if " engine_" not in line] == []

    run_scenario(scenario, SCRIPT)


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b'{"messages":null}', b'{"messages":["hi"]}', b'{"messages":[{}]}']
)
def test_4_a_malformed_body_is_not_a_500(run_scenario: RunScenario, body: bytes) -> None:
    """The engine refuses a message without a role, as vLLM does."""

    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/t/g/v1/chat/completions", data=body) as r:
            assert r.status == 400 and (await r.json())["error"]["message"]

    run_scenario(scenario, Script([HI], status=400))


def test_5_completing_a_val_trajectory_finds_it_whatever_channel_is_said(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        await post(w, "/t1/g1/v1/register_trajectory", {"channel": "val", "metadata": {"gold": 1}})
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        assert (
            await post(w, "/t1/g1/v1/complete_trajectory", {"reward": 0.5, "channel": "train"})
        )[0] == 200
        found = candidate(w)
        assert (found.channel, found.outcome, [r.value for r in found.rewards]) == (
            "val",
            "completed",
            [0.5],
        )

    run_scenario(scenario, SCRIPT)


def test_5_an_unknown_trajectory_does_not_disappear(run_scenario: RunScenario) -> None:
    """Only the log shows whether a trajectory exists.

    There the completion waits for the steps, then becomes a dead letter.
    """

    async def scenario(w: GatewayFixture) -> None:
        await post(w, "/complete_trajectory/nobody", {"reward": 0.5})
        worker = assembled(w)
        assert not worker.dead_letters
        worker.feed((STEPS, 10_000, Tick(partition=0)), (REWARDS, 10_000, Tick(partition=0)))
        assert [b.reason for b in worker.dead_letters] == ["unknown_target"] * 2

    run_scenario(scenario, SCRIPT)


def test_6_a_call_that_is_tried_three_times_is_trained_once(run_scenario: RunScenario) -> None:
    never = asyncio.Semaphore(0)
    asked: list[Any] = []

    def script(request: Any) -> Script:
        asked.append(request)
        return Script([HI], versions=SPANS, gate=never if len(asked) < 3 else None)

    async def scenario(w: GatewayFixture) -> None:
        impatient = httpx.AsyncClient(transport=Impatient(asked, 2))
        async with sdk(w, max_retries=2, http_client=impatient) as client:
            await client.chat.completions.create(**ASK)
        await w.until(lambda: len(w.steps()) == 3)
        assert sorted(s.status for s in w.steps()) == ["aborted", "aborted", "ok"]
        await post(w, "/complete_trajectory/t1")
        assert [s.trainable for s in candidate(w).steps].count(True) == 1

    run_scenario(scenario, script)


def test_7_a_long_prompt_is_never_cut(run_scenario: RunScenario) -> None:
    """The engine's limit or the gateway's refuses the prompt and reports its length.

    The engine receives the whole prompt.
    """
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "word " * 5000},
    ]

    async def scenario(w: GatewayFixture) -> None:
        status, _ = await post(w, "/t1/g1/v1/chat/completions", ASK | {"messages": messages})
        assert status == 400 and w.engine.requests[0]["messages"] == messages
        status, said = await post(
            w, "/generate", {"prompt_ids": [1] * 65, "sampling_params": {"max_tokens": 5}}
        )
        assert status == 400 and "65 tokens" in said["error"]["message"]
        assert w.records() == []

    run_scenario(scenario, Script([HI], status=400), max_prompt_tokens=64)


def test_8_a_gateway_started_anew_goes_on_with_a_trajectory(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        await post(w, "/t1/g1/v1/register_trajectory", {"channel": "val", "metadata": {"gold": 1}})
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        other = w.settings.gateway.model_copy(update={"gateway_id": "gateway-1"})
        again = create_app(
            w.settings.model_copy(update={"gateway": other}),
            w.producer,
            EngineRegistry(other.upstreams),
            CODEC,
        )
        async with running(again) as url:
            async with w.http.post(f"{url}/t1/g1/v1/chat/completions", json=ASK) as r:
                assert r.status == 200
            async with w.http.post(f"{url}/t1/g1/v1/complete_trajectory") as r:
                assert r.status == 200
        whole = assembled(w).trajectories["t1"]
        assert (whole.channel, whole.metadata_json, [s.index for s in whole.steps]) == (
            "val",
            b'{"gold":1}',
            [0, 1],
        )
        assert {s.oldest_version for s in whole.steps} == {"default/3.0"}

    run_scenario(scenario, SCRIPT)


def test_9_without_a_log_no_sampled_call_is_lost_and_a_log_that_comes_back_is_found(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.reachable = w.producer.acknowledges = False
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        assert w.records() == [] and len(w.spooled()) == 1
        w.producer.reachable = w.producer.acknowledges = True
        await w.until(lambda: len(w.steps()) == 1)
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        await w.until(
            lambda: len(w.steps()) == 2
        )  # through the spool, if the drain has not finished

    run_scenario(scenario, SCRIPT)


def test_9_without_a_log_and_without_room_no_engine_is_asked(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.reachable = w.producer.acknowledges = False
        status, _ = await post(w, "/t1/g1/v1/chat/completions", ASK)
        assert status == 503 and w.engine.requests == []

    run_scenario(scenario, SCRIPT, spool_max_bytes=1000)


def test_10_a_reward_of_a_billion_is_refused(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path, body, param in (
            ("/submit_steps", submitted(reward=1e9), "steps.0.reward"),
            ("/complete_trajectory/t1", {"reward": 1e9}, "reward"),
            ("/t1/g1/v1/complete_trajectory", {"reward": -1e9}, "reward"),
        ):
            status, said = await post(w, path, body)
            assert (status, said["error"]["param"]) == (422, param)
        assert w.records() == []

    run_scenario(scenario, SCRIPT)


def test_10_strangers_write_nothing_where_others_can_reach_the_gateway(
    run_scenario: RunScenario,
) -> None:
    assert Settings.model_validate({"gateway": {"host": "0.0.0.0"}}).gateway.auth_required

    async def scenario(w: GatewayFixture) -> None:
        for path in (
            "/submit_steps",
            "/t1/g1/v1/complete_trajectory",
            "/t1/g1/v1/register_trajectory",
            "/rewards",
        ):
            assert (await post(w, path, {}))[0] == 401
        assert w.records() == []

    run_scenario(scenario, SCRIPT, auth="required")


def test_10_no_code_of_a_models_directory_runs(tmp_path: Path) -> None:
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    remote = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(remote))
    assert TextOf(tmp_path)([0, 0, 2**31 - 1]) == "a a"
    assert not (tmp_path / "ran").exists()


def test_14_sampling_parameters_and_version_are_those_of_the_call(
    run_scenario: RunScenario,
) -> None:
    """Claw-R1's black-box agents lost the parameters.

    Its version was set when a batch was prepared, not when the call was sampled.
    """

    async def scenario(w: GatewayFixture) -> None:
        await post(w, "/t1/g1/v1/register_trajectory", {"metadata": {"policy_version": 1}})
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK, temperature=0.3, top_p=0.8)
        (asked,) = w.engine.requests
        assert (asked["temperature"], asked["top_p"]) == (0.3, 0.8)
        assert [s.version for s in w.steps()[0].versions] == ["default/3.0"]

    run_scenario(scenario, SCRIPT)


def test_15_agents_on_other_machines_are_given_a_url_that_they_can_reach(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        port = w.url.rpartition(":")[2]
        async with w.http.post(
            w.url + "/init_trajectory", headers={"host": f"gateway.local:{port}"}
        ) as r:
            assert (await r.json())["base_url"].startswith(f"http://gateway.local:{port}/")

    run_scenario(scenario, SCRIPT)


# ---------------------------------------------------------------- documented, but not there, 2.1


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_2_1_1_the_documented_base_url_works(run_scenario: RunScenario, suffix: str) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w, "/t1/g1" + suffix) as client:
            assert (await client.chat.completions.create(**ASK)).choices[
                0
            ].message.content == "Hello"
        assert [(s.trajectory_key, s.group_id) for s in w.steps()] == [("t1", "g1")]

    run_scenario(scenario, SCRIPT)


def test_2_1_2_and_17_the_documented_routes_are_there(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path in ("/ready", "/health", "/metrics", "/v1/models", "/t1/g1/v1/models"):
            async with w.http.get(w.url + path) as r:
                assert r.status == 200, path
        assert await post(w, "/complete_trajectory/t1") == (
            200,
            {"status": "ok", "trajectory_key": "t1"},
        )
        for path, body in (
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/responses", {"model": "policy", "input": "hi"}),
            ("/v1/messages", ASK | {"max_tokens": 9}),
        ):
            assert (await post(w, "/t1/g1" + path, body))[0] == 200, path
        assert len(w.steps()) == 3

    run_scenario(scenario, SCRIPT)


def test_2_1_9_a_client_of_its_own_is_a_group_of_its_own(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for _ in range(2):
            base = (await post(w, "/init_trajectory"))[1]["base_url"]
            async with sdk(w, base.removeprefix(w.url)) as client:
                await client.chat.completions.create(**ASK)
        assert len({s.group_id for s in w.steps()}) == 2

    run_scenario(scenario, SCRIPT)


def test_2_1_13_one_dead_engine_of_two_fails_no_call(run_scenario: RunScenario) -> None:
    dead = f"http://127.0.0.1:{free_port()}"

    async def scenario(w: GatewayFixture) -> None:
        both = w.settings.gateway.model_copy(
            update={
                "upstreams": Settings.model_validate(
                    {"gateway": {"upstreams": [dead, w.engine_url]}}
                ).gateway.upstreams,
                "gateway_id": "gateway-1",
            }
        )
        app = create_app(
            w.settings.model_copy(update={"gateway": both}),
            w.producer,
            EngineRegistry(both.upstreams),
            CODEC,
        )
        async with running(app) as url:
            for i in range(20):
                async with w.http.post(f"{url}/t{i}/g/v1/chat/completions", json=ASK) as r:
                    assert r.status == 200

    run_scenario(scenario, SCRIPT)


def test_2_1_14_streams_are_streams(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            stream = await client.chat.completions.create(**ASK, stream=True)
            texts = [c.choices[0].delta.content async for c in stream if c.choices]
        assert "".join(t or "" for t in texts) == "Hello" and len(texts) > 2
        assert unpack_ids(w.steps()[0].response_token_ids or b"") == [7, 8, 9]

    run_scenario(scenario, SCRIPT)


def test_2_1_15_tools_and_parameters_go_through_and_tool_calls_come_back(
    run_scenario: RunScenario,
) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "lookup", "arguments": '{"key":"k1"}'},
    }
    asked: Mapping[str, Any] = ASK | {
        "tools": [
            {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto", "n": 1, "stop": ["x"], "seed": 3, "presence_penalty": 0.1,
        "response_format": {"type": "text"}, "logprobs": True, "top_k": 5, "min_p": 0.1,
    }  # fmt: skip

    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(w, "/t1/g1/v1/chat/completions", asked)
        assert status == 200 and w.engine.requests == [asked]
        assert said["choices"][0]["message"]["tool_calls"] == [call]
        assert said["choices"][0]["finish_reason"] == "tool_calls"

    run_scenario(
        scenario,
        Script(
            [
                ScriptedChoice(
                    [1, 2], ["", ""], [-1.0, -1.0], tool_calls=[call], finish_reason="tool_calls"
                )
            ]
        ),
    )


def test_2_1_16_images_reach_the_engine_and_are_kept(run_scenario: RunScenario) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = ASK | {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}]
    }

    async def scenario(w: GatewayFixture) -> None:
        assert (await post(w, "/t1/g1/v1/chat/completions", asked))[0] == 200
        assert w.engine.requests == [asked] and json.loads(w.steps()[0].request_json) == asked
        pixels = {"images": ["AAAA"]}
        await post(w, "/submit_steps", submitted(multi_modal_data=pixels, routed_experts=[[1]]))
        kept = json.loads(w.steps()[1].request_json)
        assert (kept["multi_modal_data"], kept["routed_experts"]) == (pixels, [[1]])

    run_scenario(scenario, SCRIPT)


# -------------------------------------------------- the pool, seen from the gateway, 2.2


def test_2_2_2_a_late_step_does_not_open_its_trajectory_again(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for said in (submitted(is_last=True), submitted(step_index=1)):
            assert (await post(w, "/submit_steps", said))[0] == 200
        worker = assembled(w)
        assert len(worker.trajectories["t1"].steps) == 1 and [m.kind for m in worker.marks] == [
            "late"
        ]
        assert not worker.state.opened

    run_scenario(scenario, SCRIPT)


def test_2_2_9_a_step_submitted_twice_is_one_step(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for said in (submitted(), submitted(), submitted(step_index=1, is_last=True)):
            assert (await post(w, "/submit_steps", said))[0] == 200
        assert len(w.steps()) == 3 and len(assembled(w).trajectories["t1"].steps) == 2

    run_scenario(scenario, SCRIPT)


def test_2_2_9_a_missing_reward_is_not_zero(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for said in (submitted(reward=None), submitted(step_index=1, reward=1.0, is_last=True)):
            await post(w, "/submit_steps", said)
        assert [(r.step_id, r.value) for r in candidate(w).rewards] == [(None, 1.0)]

    run_scenario(scenario, SCRIPT)


def test_2_2_9_a_step_without_logprobs_takes_them_from_no_other(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for i in range(8):
            bare = {"rollout_log_probs": None} if i == 4 else {}
            await post(w, "/submit_steps", submitted(step_index=i, is_last=i == 7, **bare))
        steps = candidate(w).steps
        assert [s.trainable for s in steps] == [i != 4 for i in range(8)]
        assert steps[4].reason == "the agent submitted no log-probabilities"

    run_scenario(scenario, SCRIPT)


def test_2_2_8_no_trajectory_is_trained_before_it_ends(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for said in (submitted(is_last=True), submitted(trajectory_uid="t2")):
            await post(w, "/submit_steps", said)
        assert set(assembled(w).trajectories) == {"t1"}
        await post(
            w,
            "/submit_steps",
            submitted(trajectory_uid="t2", step_index=1, reward=0.5, is_last=True),
        )
        found = candidate(w, "t2")
        assert len(found.steps) == 2 and [r.value for r in found.rewards] == [0.5]

    run_scenario(scenario, SCRIPT)


def test_a_client_that_gives_up_gets_its_own_timeout_and_leaves_no_half_step(
    run_scenario: RunScenario,
) -> None:
    never = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        impatient = httpx.AsyncClient(transport=Impatient(w.engine.requests, 1))
        async with sdk(w, http_client=impatient) as client:
            with pytest.raises(APITimeoutError):
                await client.chat.completions.create(**ASK)
        await w.until(w.steps)
        (found,) = w.steps()
        assert (
            isinstance(found, Step)
            and found.status == "aborted"
            and found.response_token_ids is None
        )

    run_scenario(scenario, Script([HI], gate=never))
