"""Test Claw-R1's own API: generate, compute_reward and init_trajectory."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.claw_r1 import BIG, CODEC, HI, RunScenario, post, step
from support.gateway import GatewayFixture, run_gateway
from support.log_producer import InMemoryLogProducer
from support.scripted.script import Script
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from clawstream.gateway.app import create_app
from clawstream.gateway.claw_r1.reward import ComputeReward, RewardFunction, trajectory_of
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.errors import Unprocessable
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import unpack_logprobs


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return a function that runs an async scenario against a new gateway.

    Call it as `run_scenario(scenario, script, **gateway settings)`.
    """
    return partial(run_gateway, tmp_path, CODEC)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Return a directory with the tokenizer of a model of four words."""
    made = Tokenizer(WordLevel({"so": 0, "it": 1, "is": 2, "42": 3, "?": 4}, unk_token="?"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


PARAMS = {
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "logprobs": True,
    "max_tokens": 5,
    "top_k": 20,
}
SPANS = [[{"version": "default/3.0", "start": 0, "end": 3}]]


@pytest.mark.parametrize("kind", ["captured", "vllm"])
def test_generate_gives_the_tokens_that_were_sampled(run_scenario: RunScenario, kind: str) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(
            w, "/generate", {"prompt_ids": [1, 2, 3], "sampling_params": PARAMS}
        )
        assert status == 200, said
        captured = kind == "captured"
        assert said == {
            "token_ids": [7, 8, 9], "log_probs": [-0.5, -0.25, -0.125], "stop_reason": "length",
            "policy_version": 3 if captured else None, "versions": SPANS[0] if captured else [],
        }  # fmt: skip
        (asked,) = w.engine.requests
        ours = {} if captured else {"logprobs": 0, "return_token_ids": True}
        assert asked == {
            **{k: v for k, v in PARAMS.items() if k != "logprobs"},
            "prompt": [1, 2, 3],
            **ours,
        }
        assert w.producer.messages == []
        # the agent submits the reply unchanged
        again = step(
            response_ids=said["token_ids"],
            rollout_log_probs=said["log_probs"],
            versions=said["versions"],
        )
        assert (await post(w, "/submit_steps", {"steps": [again]}))[0] == 200
        assert unpack_logprobs(w.steps()[0].response_logprobs or b"") == said["log_probs"]

    run_scenario(scenario, Script([HI], versions=SPANS), kind=kind)


def test_generate_has_the_defaults_of_claw_r1(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for params in ({}, {"model": "default", "max_tokens": None, "n": 1}):
            assert (await post(w, "/generate", {"prompt_ids": [5], "sampling_params": params}))[
                0
            ] == 200
        default = {
            "temperature": 1.0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            "max_tokens": 1024,
            "prompt": [5],
        }
        assert w.engine.requests == [default, default]

    run_scenario(scenario, Script([HI]), default_max_tokens=1024)


def test_generate_refuses_what_it_cannot_do(run_scenario: RunScenario) -> None:
    bad: list[tuple[Any, int, str]] = [
        (b"{", 400, "body"),
        ({"sampling_params": {}}, 422, "prompt_ids"),
        ({"prompt_ids": []}, 422, "prompt_ids"),
        ({"prompt_ids": "hi"}, 422, "prompt_ids"),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5, "n": 2}},
            422,
            "sampling_params.n",
        ),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5, "stream": True}},
            422,
            "sampling_params.stream",
        ),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5, "prompt": [2]}},
            422,
            "sampling_params.prompt",
        ),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5, "seed": BIG}},
            422,
            "sampling_params",
        ),
        ({"prompt_ids": [1], "sampling_params": {"max_tokens": 5, "model": 7}}, 400, "model"),
        ({"prompt_ids": [1], "sampling_params": {}}, 422, "sampling_params.max_tokens"),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5}, "image_data": ["x"]},
            422,
            "image_data",
        ),
        (
            {"prompt_ids": [1], "sampling_params": {"max_tokens": 5}, "video_data": ["x"]},
            422,
            "video_data",
        ),
        ({"prompt_ids": [1] * 9, "sampling_params": {"max_tokens": 5}}, 400, "prompt_ids"),
    ]

    async def scenario(w: GatewayFixture) -> None:
        for body, status, param in bad:
            found, said = await post(w, "/generate", body)
            assert (found, said["error"]["param"]) == (status, param), (body, said)
        assert "9 tokens, the limit of this gateway is 8" in said["error"]["message"]
        assert w.engine.requests == []

    run_scenario(scenario, Script([HI]), max_prompt_tokens=8)


def test_errors_of_the_engine_pass(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(
            w, "/generate", {"prompt_ids": [1], "sampling_params": {"max_tokens": 5}}
        )
        assert (status, said["error"]["message"]) == (400, "scripted")

    run_scenario(scenario, Script([HI], status=400))


def test_an_engine_that_tells_no_tokens_is_no_engine_for_generate(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(
            w, "/generate", {"prompt_ids": [1], "sampling_params": {"max_tokens": 5}}
        )
        assert (status, said["error"]["code"]) == (502, "upstream_failed")

    run_scenario(scenario, Script([HI]), kind="text")


def test_the_engine_stops_when_the_agent_leaves(run_scenario: RunScenario) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        call = asyncio.create_task(
            post(w, "/generate", {"prompt_ids": [1], "sampling_params": {"max_tokens": 5}})
        )
        await w.until(lambda: w.engine.requests)
        call.cancel()
        await w.until(lambda: w.engine.aborted == 1)
        assert w.producer.messages == []

    run_scenario(scenario, Script([HI], gate=gate))


OWN = Path(__file__).parents[3] / "support" / "own_functions.py"
ANSWER = {
    "prompt_ids": [0],
    "response_ids": [0, 1, 2, 3],
    "dataset_fields": {"reward_model": {"ground_truth": "42"}},
}


def test_a_reward_is_computed_by_the_function_of_the_settings(
    run_scenario: RunScenario, tokenizer: Path
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        info = {"function": "last_number", "function_version": "2"}
        assert await post(w, "/compute_reward", ANSWER) == (
            200,
            {"reward_score": 1.0, "reward_extra_info": info},
        )
        wrong = ANSWER | {"response_ids": [0, 1, 2]}
        assert (await post(w, "/compute_reward", wrong))[1]["reward_score"] == 0.0
        status, said = await post(w, "/compute_reward", {"prompt_ids": [0], "response_ids": [3]})
        assert (
            status == 422
            and said["error"]["message"] == "last_number@2: ValueError: metadata has no gold"
        )
        for body, param in (
            ({}, "prompt_ids"),
            (ANSWER | {"dataset_fields": {"a": BIG}}, "dataset_fields"),
        ):
            status, said = await post(w, "/compute_reward", body)
            assert (status, said["error"]["param"]) == (422, param)
        assert w.producer.messages == []
        # submitted steps now have their text
        await post(w, "/submit_steps", {"steps": [step(response_ids=[0, 1, 2])]})
        assert w.steps()[0].response_json == b'{"role":"assistant","content":"so it is"}'

    run_scenario(scenario, Script([HI]), compute_reward="last_number@2", tokenizer_path=tokenizer)


@pytest.mark.slow
def test_a_function_of_ones_own(run_scenario: RunScenario, tokenizer: Path) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(
            w, "/compute_reward", ANSWER | {"num_turns": 3, "extra_fields": {"bonus": 0.5}}
        )
        assert (status, said["reward_score"]) == (200, 3.5)

    run_scenario(
        scenario, Script([HI]), compute_reward=f"{OWN}:by_turns@1", tokenizer_path=tokenizer
    )

    async def nothing(w: GatewayFixture) -> None:
        status, said = await post(w, "/compute_reward", {"prompt_ids": [0], "response_ids": [1]})
        assert status == 422 and said["error"]["message"] == "of_nothing@1: None is no number"

    run_scenario(
        nothing, Script([HI]), compute_reward=f"{OWN}:of_nothing@1", tokenizer_path=tokenizer
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("loops", "timeout"),
        ("crashes", "crashed"),
        ("fails", "ValueError: no"),
    ],
)
def test_a_function_that_never_answers_costs_its_own_call_only(
    tmp_path: Path, name: str, why: str
) -> None:
    """The function runs in a child process: the event loop continues and answers the next call."""
    limits = {"timeout_s": 0.2, "processes": 1}
    settings = {"gateway": {"compute_reward": f"{OWN}:{name}@1"}, "functions": limits}
    body = ComputeReward(prompt_ids=[0], response_ids=[1])

    async def main() -> None:
        function = RewardFunction(
            Settings.model_validate({**settings, "data_dir": tmp_path}), lambda _: "42"
        )
        for _ in range(2):
            with pytest.raises(Unprocessable, match=f"{name}@1: {why}"):
                await function.score(body, "run")
        function.close()

    asyncio.run(main())


@pytest.mark.slow
def test_without_a_function_or_a_tokenizer_it_says_what_to_set(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, said = await post(w, "/compute_reward", ANSWER)
        assert (status, said["error"]["code"]) == (503, "not_configured")
        assert "gateway.compute_reward" in said["error"]["message"]

    run_scenario(scenario, Script([HI]))

    async def mute(w: GatewayFixture) -> None:
        status, said = await post(w, "/compute_reward", ANSWER)
        assert status == 503 and "gateway.tokenizer_path" in said["error"]["message"]

    run_scenario(mute, Script([HI]), compute_reward="last_number@1")


@pytest.mark.parametrize("wrong", [{"compute_reward": "nope@1"}, {"tokenizer_path": "/nowhere"}])
def test_wrong_settings_end_the_start(tmp_path: Path, wrong: dict[str, Any]) -> None:
    settings = Settings.model_validate({"data_dir": tmp_path, "gateway": wrong})
    (name,) = wrong
    with pytest.raises(SettingsError, match=rf"gateway\.{name}"):
        create_app(settings, InMemoryLogProducer(), EngineRegistry(()), CODEC)


def test_the_function_gets_a_whole_trajectory() -> None:
    said = ComputeReward.model_validate(ANSWER | {"multi_modal_data": {"images": []}})
    found = trajectory_of(said, "r-1", "so it is 42")
    assert CODEC.decode(CODEC.encode(found)) == found
    with pytest.raises(Unprocessable):
        trajectory_of(
            ComputeReward(prompt_ids=[], response_ids=[], extra_fields={"a": BIG}), "r-1", ""
        )


def test_init_trajectory_gives_a_base_url_that_works(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        found = [(await post(w, "/init_trajectory", b""))[1] for _ in range(2)]
        assert len({f["trajectory_uid"] for f in found}) == 2
        uid = found[0]["trajectory_uid"]
        assert found[0] == {"trajectory_uid": uid, "base_url": f"{w.url}/{uid}/{uid}/v1"}
        # as its black-box flow does: another group replaces the default one
        base = found[0]["base_url"].rsplit("/", 2)[0] + "/task-7/v1"
        for path, body in (
            ("/register_trajectory", {"channel": "val", "metadata": {"policy_version": 3}}),
            (
                "/chat/completions",
                {"model": "policy", "messages": [{"role": "user", "content": "hi"}]},
            ),
            ("/complete_trajectory", {"reward": 0.5, "channel": "val"}),
        ):
            status, said = await post(w, base.removeprefix(w.url) + path, body)
            assert status == 200 and (path == "/chat/completions" or said["status"] == "ok"), said
        opened, called, reward, ended = w.records()
        assert {r.trajectory_key for r in (opened, called, reward, ended)} == {uid}
        assert (opened.group_id, opened.channel, called.group_id, reward.value, ended.kind) == (
            "task-7", "val", "task-7", 0.5, "completed",
        )  # fmt: skip

    run_scenario(scenario, Script([HI]))


def test_the_model_default_of_its_agents_is_the_engines_own(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        asked = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
        assert (await post(w, "/t1/g1/v1/chat/completions", asked))[0] == 200
        assert w.engine.requests == [{"messages": asked["messages"]}]
        (found,) = w.steps()
        assert (found.model, json.loads(found.request_json)) == ("policy", asked)

    run_scenario(scenario, Script([HI]))


def test_the_base_url_is_the_one_that_agents_can_reach(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        _, said = await post(w, "/init_trajectory", b"")
        assert said["base_url"].startswith("https://claw.example/api/")

    run_scenario(scenario, Script([HI]), public_url="https://claw.example/api/")


def test_the_openapi_page_tells_the_bodies(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.get(w.url + "/openapi.json") as r:
            paths = (await r.json())["paths"]
        schema = paths["/submit_steps"]["post"]["requestBody"]["content"]["application/json"][
            "schema"
        ]
        assert "$ref" not in json.dumps(schema)
        assert "rollout_log_probs" in schema["properties"]["steps"]["items"]["properties"]
        assert {"/generate", "/compute_reward", "/init_trajectory"} <= paths.keys()

    run_scenario(scenario, Script([HI]))
