"""Test Claw-R1's own API: submission of steps."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.claw_r1 import BIG, CODEC, HI, RunScenario, post, step
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script

from clawstream.gateway.api.recorder import AT_ONCE
from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.auth.api_keys import create_key
from clawstream.gateway.claw_r1.steps import (
    MAX_STEPS,
    PROTOCOL,
    AttributedStep,
    RequestContext,
    StepPayload,
    step_of,
)
from clawstream.schemas.ids import key_of_step
from clawstream.schemas.records import Reward, SessionEvent, Step, VersionSpan
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

WHERE = TrajectoryRef("default", "t1", "g1", None)
CONTEXT = RequestContext("gateway-0", 5)


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return a function that runs an async scenario against a new gateway.

    Call it as `run_scenario(scenario, script, **gateway settings)`.
    """
    return partial(run_gateway, tmp_path, CODEC)


def test_a_step_is_recorded_as_it_was_said(run_scenario: RunScenario) -> None:
    images = {"images": [{"url": "s3://b/1.png", "n": 1.5}]}
    said = step(
        step_index=2,
        policy_version=3,
        multi_modal_data=images,
        routed_experts=[[[1, 2]], [[3, 4]]],
        mine={"a": None},
    )

    async def scenario(w: GatewayFixture) -> None:
        headers = {"user_agent": "flow/1", "x_clawstream_run": "r-1"}
        assert await post(w, "/submit_steps?channel=val", {"steps": [said]}, **headers) == (
            200,
            {"accepted": 1},
        )
        (found,) = w.records()
        assert isinstance(found, Step)
        assert found == Step(
            step_id=found.step_id, run_id="r-1", trajectory_key="t1", call_id=found.step_id[:-2],
            choice_index=0, group_id="g1",
            channel="val", protocol=PROTOCOL, model="", status="ok", streamed=False,
            request_json=found.request_json, response_json=b'{"role":"assistant","content":null}',
            prompt_token_ids=found.prompt_token_ids,
            response_token_ids=found.response_token_ids, response_logprobs=found.response_logprobs,
            version_first="r-1/3.0",
            version_last="r-1/3.0", user_agent="flow/1", gateway_id="gateway-0",
            received_at=found.received_at, finished_at=found.received_at,
        )  # fmt: skip
        assert key_of_step(found.step_id) == "t1"
        assert unpack_ids(found.prompt_token_ids or b"") == [1, 2, 3]
        assert unpack_ids(found.response_token_ids or b"") == [7, 8, 9]
        assert unpack_logprobs(found.response_logprobs or b"") == [-0.5, -0.25, -0.125]
        packed = ("prompt_ids", "response_ids", "rollout_log_probs", "reward", "is_last")
        assert json.loads(found.request_json) == {k: v for k, v in said.items() if k not in packed}

    run_scenario(scenario, Script([HI]))


def test_a_request_has_a_bound_in_steps(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        status, reply = await post(
            w,
            "/submit_steps",
            {"steps": [{"prompt_ids": [1], "response_ids": [2]}] * (MAX_STEPS + 1)},
        )
        assert (
            status == 422
            and reply["error"]["param"] == "steps"
            and str(MAX_STEPS) in reply["error"]["message"]
        )
        assert w.producer.messages == []

    run_scenario(scenario, Script([HI]))


@pytest.mark.slow
def test_many_steps_leave_room_for_other_calls_between_them(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        body = {
            "steps": [
                {"prompt_ids": [1], "response_ids": [n], "trajectory_uid": "t"} for n in range(1000)
            ]
        }
        said = asyncio.create_task(post(w, "/submit_steps", body))
        seen = [0]
        while not said.done():
            await asyncio.sleep(0)
            seen.append(len(w.producer.messages))
        assert await said == (200, {"accepted": 1000})
        assert max(after - before for before, after in pairwise(seen)) <= AT_ONCE
        assert [unpack_ids(s.response_token_ids or b"") for s in w.steps()] == [
            [n] for n in range(1000)
        ]

    run_scenario(scenario, Script([HI]))


def test_a_trajectory_in_one_request_comes_onto_the_log_in_its_order(
    run_scenario: RunScenario,
) -> None:
    dataset = {"uid": "g1", "data_source": "gsm8k", "reward_model": {"ground_truth": "42"}}
    steps = [
        step(
            step_index=1, prompt_ids=[1, 2, 3, 7, 8, 9, 4], is_last=True, reward=1, metadata=dataset
        ),
        step(step_index=0, reward=0.25, metadata=dataset),
        step(trajectory_uid="t2", prompt_uid=""),
    ]

    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, "/submit_steps", {"steps": steps}) == (200, {"accepted": 3})
        found = w.records()
        opened, *middle, ended = found
        assert isinstance(opened, SessionEvent) and isinstance(ended, SessionEvent)
        assert (opened.kind, opened.group_id, opened.channel) == ("opened", "g1", None)
        assert json.loads(opened.metadata_json or b"") == dataset
        assert (ended.kind, ended.trajectory_key) == ("completed", "t1")
        sent = [s for s in middle if isinstance(s, Step)]
        assert [
            (s.trajectory_key, s.group_id, json.loads(s.request_json)["step_index"]) for s in sent
        ] == [("t1", "g1", 0), ("t2", None, 0), ("t1", "g1", 1)]
        rewards = [r for r in middle if isinstance(r, Reward)]
        assert [(r.trajectory_key, r.step_id, r.source, r.name, r.value) for r in rewards] == [
            ("t1", sent[0].step_id, "env", "submit_steps", 0.25),
            ("t1", None, "env", "complete_trajectory", 1.0),
        ]

    run_scenario(scenario, Script([HI]))


def test_what_is_submitted_twice_has_the_same_ids(run_scenario: RunScenario) -> None:
    steps = {
        "steps": [step(reward=0.5), step(step_index=1, is_last=True, reward=1, metadata={"a": 1})]
    }

    async def scenario(w: GatewayFixture) -> None:
        for _ in range(2):
            assert await post(w, "/submit_steps", steps) == (200, {"accepted": 2})
        ids = [getattr(r, "event_id", None) or r.step_id for r in w.records()]
        assert ids[:6] == ids[6:] and len(set(ids[:6])) == 6

    run_scenario(scenario, Script([HI]))


@pytest.mark.slow
def test_a_large_submission_is_taken(run_scenario: RunScenario) -> None:
    ids = list(range(2304))
    many = [
        step(
            trajectory_uid=f"t{i}",
            prompt_ids=ids,
            response_ids=ids[:256],
            rollout_log_probs=[-0.123456789] * 256,
        )
        for i in range(100)
    ]

    async def scenario(w: GatewayFixture) -> None:
        assert len(json.dumps({"steps": many})) > 1 << 20
        assert await post(w, "/submit_steps", {"steps": many}) == (200, {"accepted": 100})
        assert [s.trajectory_key for s in w.steps()] == [f"t{i}" for i in range(100)]
        status, said = await post(w, "/submit_steps", {"steps": many * 4})
        assert (status, said["error"]["param"]) == (413, "body")
        assert len(w.producer.messages) == 100

    run_scenario(scenario, Script([HI]), max_body_bytes=4 << 20)


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "body"),
    (b"", 400, "body"),
    (b"\xff", 400, "body"),
    (b"[]", 422, "body"),
    ({}, 422, "steps"),
    ({"steps": [{}]}, 422, "steps.0.prompt_ids"),
    ({"steps": [step(), step(prompt_ids=[1, "2"])]}, 422, "steps.1.prompt_ids.1"),
    ({"steps": [step(prompt_ids=[2**31])]}, 422, "steps.0.prompt_ids.0"),
    ({"steps": [step(prompt_ids=[-1])]}, 422, "steps.0.prompt_ids.0"),
    ({"steps": [step(response_ids=[1.5])]}, 422, "steps.0.response_ids.0"),
    ({"steps": [step(response_ids=[True, 1, 2])]}, 422, "steps.0.response_ids.0"),
    ({"steps": [step(rollout_log_probs=[-1.0])]}, 422, "steps.0.rollout_log_probs"),
    (
        {"steps": [step(rollout_log_probs=[float("-inf"), -1.0, -1.0])]},
        422,
        "steps.0.rollout_log_probs.0",
    ),
    ({"steps": [step(rollout_log_probs=[1e300, -1.0, -1.0])]}, 422, "steps.0.rollout_log_probs.0"),
    ({"steps": [step(rollout_log_probs=[-1.0, 0.5, -1.0])]}, 422, "steps.0.rollout_log_probs.1"),
    (
        {"steps": [step(rollout_log_probs=[-1.0, -1.0, float("nan")])]},
        422,
        "steps.0.rollout_log_probs.2",
    ),
    ({"steps": [step(reward=1e9)]}, 422, "steps.0.reward"),
    ({"steps": [step(), step(reward=1e9, is_last=True)]}, 422, "steps.1.reward"),
    ({"steps": [step(reward=float("nan"))]}, 422, "steps.0.reward"),
    ({"steps": [step(trajectory_uid="")]}, 422, "steps.0.trajectory_uid"),
    ({"steps": [step(trajectory_uid="a~b")]}, 422, "steps.0.trajectory_uid"),
    ({"steps": [step(), step(prompt_uid="x\n")]}, 422, "steps.1.prompt_uid"),
    ({"steps": [step(step_index=-1)]}, 422, "steps.0.step_index"),
    ({"steps": [step(policy_version=-1)]}, 422, "steps.0.policy_version"),
    ({"steps": [step(metadata=[1])]}, 422, "steps.0.metadata"),
    ({"steps": [step(metadata={"a": BIG})]}, 422, "steps.0.metadata"),
    ({"steps": [step(routed_experts=[BIG])]}, 422, "steps.0.routed_experts"),
    ({"steps": [step(mine=BIG)]}, 422, "steps.0.mine"),
    (b'{"steps":[{"prompt_ids":[],"response_ids":[],"trajectory_uid":"\\ud800"}]}', 400, "body"),
    (
        {"steps": [step(versions=[{"version": "default/1.0", "start": 0, "end": 2}])]},
        422,
        "steps.0.versions",
    ),
    (
        {"steps": [step(versions=[{"version": "default/1.0", "start": 1, "end": 3}])]},
        422,
        "steps.0.versions",
    ),
]


def test_bad_steps_name_the_field_and_nothing_is_recorded(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for body, status, param in BAD:
            found, said = await post(w, "/submit_steps", body)
            assert (found, said["error"]["param"]) == (status, param), (body, said)
        status, said = await post(w, "/submit_steps?channel=test", {"steps": []})
        assert status == 422 and "channel" in said["error"]["param"]
        assert w.producer.messages == []
        assert await post(w, "/submit_steps", {"steps": []}) == (200, {"accepted": 0})

    run_scenario(scenario, Script([HI]))


def test_a_session_key_names_the_trajectory_that_a_step_does_not(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        _, session = await post(
            w, "/sessions", {"run_id": "r-1", "group_id": "g9", "channel": "val"}
        )
        said = {"steps": [step(trajectory_uid="", prompt_uid="")]}
        assert (
            await post(w, "/submit_steps", said, authorization=f"Bearer {session['session_key']}")
        )[0] == 200
        (found,) = w.steps()
        assert (found.run_id, found.trajectory_key, found.group_id, found.channel) == (
            "r-1", session["trajectory_key"], "g9", "val",
        )  # fmt: skip

    run_scenario(scenario, Script([HI]))


def test_rewards_are_protected(run_scenario: RunScenario, tmp_path: Path) -> None:
    agent = create_key(tmp_path / "api-keys.json", "agent", ("agent",))
    judge = create_key(tmp_path / "api-keys.json", "judge", ("agent", "reward"))
    rewarded = [
        {"steps": [step(reward=1.0)]},
        {"steps": [step(), step(step_index=1, reward=1.0, is_last=True)]},
    ]

    async def scenario(w: GatewayFixture) -> None:
        for path in ("/submit_steps", "/generate", "/compute_reward", "/init_trajectory"):
            status, said = await post(w, path, b"")
            assert (status, said["error"]["param"]) == (401, "authorization"), path
        for steps in rewarded:
            status, said = await post(w, "/submit_steps", steps, authorization=f"Bearer {agent}")
            assert (status, said["error"]["code"]) == (403, "insufficient_scope")
        assert w.producer.messages == []
        for steps in rewarded:
            assert (await post(w, "/submit_steps", steps, authorization=f"Bearer {judge}"))[
                0
            ] == 200
        assert {r.by for r in w.records() if isinstance(r, Reward)} == {"judge"}
        assert (
            await post(w, "/submit_steps", {"steps": [step()]}, authorization=f"Bearer {agent}")
        )[0] == 200

    run_scenario(scenario, Script([HI]), auth="required")


def placed(**more: Any) -> AttributedStep:
    return AttributedStep(0, StepPayload.model_validate(step(**more)), WHERE)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ({"policy_version": 4}, "default/4.0"),
        ({"policy_version": 0}, "default/0.0"),
        ({"policy_version": 0, "metadata": {"policy_version": 7}}, "default/7.0"),
        ({"policy_version": 5, "metadata": {"policy_version": 7}}, "default/5.0"),
        ({"policy_version": None}, None),
        ({"policy_version": None, "metadata": {"policy_version": "7"}}, None),
        ({"policy_version": None, "metadata": {"policy_version": True}}, None),
    ],
)
def test_the_version_is_the_one_that_the_agent_states(
    said: dict[str, Any], version: str | None
) -> None:
    found = step_of(placed(**said), CONTEXT, None)
    assert (found.version_first, found.version_last, found.versions) == (version, version, ())


def test_exact_versions_can_be_stated() -> None:
    spans = [
        {"version": "default/1.0", "start": 0, "end": 1},
        {"version": "default/2.0", "start": 1, "end": 3},
    ]
    found = step_of(placed(versions=spans), CONTEXT, "Hello")
    assert found.versions == tuple(VersionSpan(**s) for s in spans)  # type: ignore[arg-type]
    assert found.response_json == b'{"role":"assistant","content":"Hello"}'


def test_a_step_without_logprobs_says_so() -> None:
    found = step_of(placed(rollout_log_probs=None), CONTEXT, None)
    assert (found.response_logprobs, found.tokens_absent_reason) == (
        None,
        "the agent submitted no log-probabilities",
    )


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@given(prompt=IDS, response=IDS, index=st.integers(0, 3), other=IDS)
def test_ids_are_of_the_content(
    prompt: list[int], response: list[int], index: int, other: list[int]
) -> None:
    def made(**more: Any) -> Step:
        said: dict[str, Any] = {
            "prompt_ids": prompt,
            "response_ids": response,
            "rollout_log_probs": None,
            "step_index": index,
        }
        return step_of(placed(**(said | more)), CONTEXT, None)

    one = made()
    assert made() == one and made(reward=1.0, is_last=True).step_id == one.step_id
    assert (made(prompt_ids=other).step_id == one.step_id) == (other == prompt)
    assert (made(response_ids=other).step_id == one.step_id) == (other == response)
    assert made(step_index=index + 1).step_id != one.step_id
    assert made(multi_modal_data={"images": [1]}).step_id != one.step_id
    # prompt and response are distinguished
    assert (made(prompt_ids=prompt + response, response_ids=[]).step_id == one.step_id) == (
        not response
    )
    elsewhere = AttributedStep(
        0,
        placed(
            prompt_ids=prompt, response_ids=response, rollout_log_probs=None, step_index=index
        ).payload,
        TrajectoryRef("other", "t1", "g1", None),
    )
    assert step_of(elsewhere, CONTEXT, None).step_id != one.step_id
