"""Test bad input, sessions, completions and rewards over HTTP."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi.responses import StreamingResponse
from multidict import CIMultiDict
from openai import AsyncOpenAI
from support.gateway import GatewayFixture, run_gateway, running
from support.log_producer import InMemoryLogProducer
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import SessionEvent
from clawstream.schemas.settings import Settings

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
YO = ScriptedChoice([5, 6], ["Y", "o"], [-1.0, -2.0], finish_reason="length")
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return a function that runs an async scenario against a new gateway.

    Call it as `run_scenario(scenario, script, **gateway settings)`.
    """
    return partial(run_gateway, tmp_path, CODEC)


def sdk(w: GatewayFixture, path: str = "/t1/g1/v1", key: str = "none", **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=w.url + path, api_key=key, max_retries=0, timeout=600, **more)


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


def test_bad_bodies_name_the_field(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for body, status, param in BAD:
            async with w.http.post(w.url + "/t/g/v1/chat/completions", data=body) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), body
                assert error["type"] == "invalid_request_error" and error["message"]
        assert w.engine.requests == [] and w.records() == []
        assert await w.metric('clawstream_gateway_calls_total{status="refused"}') == len(BAD)

    run_scenario(scenario, Script([HI]), max_body_bytes=4000)


ADDRESSES: list[tuple[str, str, dict[str, str], int, str | None]] = [
    ("POST", "/t~x/g/v1/chat/completions", {}, 400, "trajectory_key"),
    ("POST", "/t/g/v1/chat/completions", {"x-clawstream-run": "No"}, 400, "run_id"),
    (
        "POST",
        "/t/g/v1/chat/completions",
        {"x-clawstream-channel": "test"},
        400,
        "x-clawstream-channel",
    ),
    ("POST", "/t/" + "g" * 201 + "/chat/completions", {}, 400, "group_id"),
    ("POST", "/v1/chat/completions", {"x-clawstream-trajectory": "a b"}, 400, "trajectory_key"),
    ("POST", "/v1/chat/completions", {"authorization": "Bearer sk-claw-x.y"}, 401, "authorization"),
    ("POST", "/v1/chat/completions", {"x-api-key": "claw-not-one-of-ours"}, 401, "authorization"),
    ("POST", "/v1/audio/speech", {}, 404, None),
    ("GET", "/t/g/v1/chat/completions", {}, 405, None),
    ("GET", "/v1/models", {"authorization": "Bearer sk-claw-x.y"}, 401, "authorization"),
    ("GET", "/nowhere", {}, 404, None),
]


def test_bad_addresses_are_answered_in_the_same_shape(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for method, path, headers, status, param in ADDRESSES:
            async with w.http.request(method, w.url + path, json=ASK, headers=headers) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), (path, error)
        assert w.records() == []

    run_scenario(scenario, Script([HI]))


def test_a_header_said_twice_means_the_same_on_every_path(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        twice = CIMultiDict([("x-clawstream-run", "first"), ("x-clawstream-run", "last")])
        step = {"prompt_ids": [1], "response_ids": [2], "trajectory_uid": "t"}
        reward = {
            "trajectory_id": "t",
            "source": "env",
            "name": "x",
            "function_version": "1",
            "value": 1.0,
        }
        for path, body in [
            ("/t/g/v1/chat/completions", ASK),
            ("/t/g/complete_trajectory", {}),
            ("/rewards", reward),
            ("/submit_steps", {"steps": [step]}),
        ]:
            async with w.http.post(w.url + path, json=body, headers=twice) as r:
                assert r.status < 300, await r.text()
        assert [r.run_id for r in w.records()] == ["last"] * 4

    run_scenario(scenario, Script([HI]))


def test_openings_that_say_different_things_are_different_events(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        said: list[tuple[str, dict[str, Any]]] = [
            ("/sessions", {"trajectory_key": "t", "group_id": "g"}),
            ("/t/g/register_trajectory", {}),  # equal to the first
            ("/t/g/register_trajectory", {"metadata": {"a": 1, "b": 2}}),
            (
                "/sessions",
                {"trajectory_key": "t", "group_id": "g", "metadata": {"b": 2, "a": 1}},
            ),  # equal to the third
            ("/t/g/register_trajectory", {"metadata": {"a": 1}}),
            ("/t/g/register_trajectory", {"metadata": {}}),
            ("/t/g/register_trajectory", {"group_size": 4}),
            ("/t/g/register_trajectory", {"round": 4}),
            ("/t/g/register_trajectory", {"channel": "val"}),
            ("/t/h/register_trajectory", {}),
            ("/sessions", {"trajectory_key": "t"}),
        ]
        for path, body in said:
            async with w.http.post(w.url + path, json=body) as r:
                assert r.status < 300, await r.text()
        ids = [r.event_id for r in w.records()]
        assert ids[0] == ids[1] and ids[2] == ids[3] and len(set(ids)) == len(said) - 2

    run_scenario(scenario, Script([HI]))


def test_bodies_of_all_routes_together_are_bounded(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        body = orjson.dumps({"metadata": {"a": "x" * 3000}})
        go_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:-1]
            await go_on.wait()
            yield body[-1:]

        async def send(data: Any) -> tuple[int, Any]:
            headers = {"content-type": "application/json"}
            async with w.http.post(w.url + "/sessions", data=data, headers=headers) as r:
                return r.status, await r.json()

        held = asyncio.create_task(send(slowly()))
        async with asyncio.timeout(60):
            status, reply = 0, dict[str, Any]()
            while status != 503:
                status, reply = await send(io.BytesIO(body))
        assert "max_in_flight_bytes" in reply["error"]["message"]
        go_on.set()
        assert (await held)[0] == 201
        for _ in range(3):  # every outcome releases the reserved bytes
            assert (await send(io.BytesIO(body)))[0] == 201
            assert (await send(io.BytesIO(body[:-1])))[0] == 400
            assert (await send(io.BytesIO(body * 2)))[0] == 413

    run_scenario(scenario, Script([HI]), max_in_flight_bytes=5000)


@pytest.mark.parametrize("started", [False, True])
def test_an_unforeseen_error_is_logged_without_what_a_client_said(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    started: bool,
) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "gateway": {"upstreams": ["http://127.0.0.1:9"]}}
    )
    app = create_app(
        settings, InMemoryLogProducer(), EngineRegistry(settings.gateway.upstreams), CODEC
    )

    @app.get("/bug")
    async def bug() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"x"
            raise KeyError("their-words")

        if started:
            return StreamingResponse(parts())
        raise KeyError("their-words")

    async def scenario() -> None:
        async with running(app) as url, aiohttp.ClientSession() as http:
            async with http.get(url + "/bug") as r:
                if started:
                    with pytest.raises(aiohttp.ClientPayloadError):
                        await r.read()
                else:
                    assert (r.status, (await r.json())["error"]["type"]) == (500, "server_error")

    asyncio.run(scenario())
    said = "".join(capfd.readouterr()) + caplog.text
    assert "KeyError" in said and "test_input.py:" in said
    assert "their-words" not in said


def test_more_calls_than_allowed_are_refused(run_scenario: RunScenario) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        first = asyncio.create_task(w.http.post(w.url + "/t/g/chat/completions", json=ASK))
        await w.until(lambda: w.engine.requests)
        async with w.http.post(w.url + "/t/g/chat/completions", json=ASK) as r:
            assert r.status == 503 and r.headers["retry-after"] == "1"
        gate.release()
        assert (await first).status == 200

    run_scenario(scenario, Script([HI], gate=gate), max_in_flight=1)


# ---------------------------------------------------------------- sessions, completion, rewards


def test_session_key_finds_its_trajectory(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
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
            event_id=opened.event_id, run_id="r-1", trajectory_key=session["trajectory_key"],
            kind="opened",
            group_id="task 7", channel="val", group_size=4, round=1, metadata_json=b'{"a":1}',
            created_at=opened.created_at,
        )  # fmt: skip
        assert session["base_url"] == w.url + "/v1"
        assert session["path_base_url"] == f"{w.url}/{session['trajectory_key']}/task%207/v1"
        async with sdk(w, "/v1", session["session_key"]) as client:
            await client.chat.completions.create(**ASK)
        async with sdk(w, session["path_base_url"].removeprefix(w.url)) as client:
            await client.chat.completions.create(**ASK)
        steps = w.steps()
        assert {(s.trajectory_key, s.group_id) for s in steps} == {
            (session["trajectory_key"], "task 7")
        }
        assert [(s.run_id, s.channel) for s in steps] == [("r-1", "val"), ("default", None)]
        assert "authorization" not in {k.lower() for h in w.engine.headers for k in h}
        auth = {"authorization": f"Bearer {session['session_key']}"}
        async with w.http.post(
            w.url + "/sessions/complete", json={"reward": 1.0}, headers=auth
        ) as r:
            assert r.status == 200
        reward, completed = w.records()[-2:]
        assert (reward.value, reward.source, reward.run_id) == (1.0, "env", "r-1")
        assert (completed.kind, completed.run_id, completed.group_id) == (
            "completed",
            "r-1",
            "task 7",
        )

    run_scenario(scenario, Script([HI]))


def test_register_and_complete_by_path(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path, body in [
            (
                "/t/g/register_trajectory",
                {"channel": "val", "metadata": {"k": "v"}, "group_size": 2},
            ),
            ("/t/g/v1/register_trajectory", None),
            (
                "/t/g/v1/complete_trajectory",
                {"outcome": "failed", "reason": "gave up", "channel": "val"},
            ),
            ("/complete_trajectory/t", None),
            ("/complete_trajectory/t", {}),
        ]:
            async with w.http.post(w.url + path, json=body) as r:
                assert r.status == 200, await r.text()
        opened, again, failed, done, done_again = w.records()
        assert (opened.kind, opened.group_id, opened.channel, opened.group_size) == (
            "opened",
            "g",
            "val",
            2,
        )
        assert again.event_id != opened.event_id  # it has fewer fields
        assert (failed.kind, failed.reason, failed.channel) == ("failed", "gave up", "val")
        assert (done.kind, done.group_id) == ("completed", None)
        assert done.event_id == done_again.event_id != failed.event_id

    run_scenario(scenario, Script([HI]))


def test_a_completion_with_several_rewards_by_name(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for rewards in ({"exact": 1, "style": 0.5}, {"style": 0.5, "exact": 1}, {"exact": 0.0}, {}):
            async with w.http.post(w.url + "/t/g/complete_trajectory", json={"rewards": rewards}):
                pass
        exact, style, end, *again, other, _, without = w.records()
        assert [(r.source, r.name, r.value, r.step_id) for r in (exact, style)] == [
            ("env", "exact", 1.0, None),
            ("env", "style", 0.5, None),
        ]
        assert end.rewards == {"exact": 1.0, "style": 0.5} and without.rewards is None
        assert {r.event_id for r in again} == {r.event_id for r in (exact, style, end)}
        assert len({e.event_id for e in w.records() if isinstance(e, SessionEvent)}) == 3
        assert other.value == 0.0

    run_scenario(scenario, Script([HI]))


def test_in_an_anonymous_session_a_step_says_which_trajectory_a_reward_is_of(
    run_scenario: RunScenario,
) -> None:
    session = "anonymous-" + "0" * 32
    step = f"{session}~01ARZ3NDEKTSV4RRFFQ69G5FAV.0"

    async def scenario(w: GatewayFixture) -> None:
        base = {
            "source": "rule",
            "name": "x",
            "function_version": "1",
            "value": 1.0,
            "step_id": step,
        }
        for path, said in (
            ("/rewards", base),
            ("/rewards", base | {"trajectory_id": session}),
            (f"/complete_trajectory/{session}", {"step_id": step, "reward": 0.5}),
        ):
            async with w.http.post(w.url + path, json=said) as r:
                assert r.status in (200, 201), await r.text()
        of_step, of_all, of_all_at_end, ended = w.records()
        assert [(r.trajectory_id, r.step_id) for r in (of_step, of_all, of_all_at_end)] == [
            (None, step), (session, step), (session, step),
        ]  # fmt: skip
        assert of_step.event_id != of_all.event_id
        assert (ended.kind, ended.trajectory_key, ended.step_id) == ("completed", session, step)

    run_scenario(scenario, Script([HI]))


def test_rewards_of_trajectories_and_steps(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
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
        assert all(m.topic == "claw.rewards" and m.key == b"t" for m in w.producer.messages)
        assert (first.value, first.by, first.detail_json, first.step_id) == (
            0.5,
            "me",
            b'{"why":1}',
            None,
        )
        assert first.event_id == same.event_id != revised.event_id
        assert (of_step.step_id, of_step.run_id, of_step.value) == (step, "other", 1.0)
        assert (none.value, none.reason) == (None, "no answer")

    run_scenario(scenario, Script([HI]))


REWARD = {
    "trajectory_id": "t",
    "source": "rule",
    "name": "x",
    "function_version": "1",
    "value": 1.0,
}


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
    ("/sessions", b'{"metadata": {"a": 1%s}}' % (b"0" * 30), 422, "metadata"),
    ("/t/g/register_trajectory", b'{"metadata": {"a": "\\ud800"}}', 400, "body"),
    (
        "/t/g/register_trajectory",
        b'{"metadata": {"a": %s}}' % (b"[" * 300 + b"]" * 300),
        400,
        "body",
    ),
    ("/rewards", orjson.dumps(REWARD | {"detail": 1})[:-1] + b"0" * 30 + b"}", 422, "detail"),
    ("/sessions", b'{"metadata": {"a": NaN}}', 400, "body"),
    ("/sessions", b'{"metadata": {"a": [-1e400]}}', 400, "body"),
    ("/rewards", orjson.dumps(REWARD | {"detail": 1})[:-2] + b"-Infinity}", 400, "body"),
    ("/sessions", {"trajectory_key": ".."}, 400, "trajectory_key"),
    ("/sessions", {"trajectory_key": "t", "group_id": "."}, 400, "group_id"),
    ("/sessions/complete", {}, 400, "x-clawstream-trajectory"),
    ("/complete_trajectory/a~b", {}, 400, "trajectory_key"),
    ("/t/g/complete_trajectory", {"outcome": "timed_out"}, 422, "outcome"),
    ("/t/g/complete_trajectory", {"reward": 1e300}, 422, "reward"),
    ("/t/g/complete_trajectory", {"rewards": {"a": 1e300}}, 422, "rewards.a"),
    ("/t/g/complete_trajectory", {"rewards": {"a": "1"}}, 422, "rewards.a"),
    ("/t/g/complete_trajectory", {"rewards": {"a": 1.0}, "reward": 1.0}, 422, "rewards"),
    ("/t/g/complete_trajectory", {"rewards": {str(n): 1.0 for n in range(101)}}, 422, "rewards"),
    ("/t/g/register_trajectory", {"round": "1"}, 422, "round"),
]


def test_bad_control_requests_name_the_field(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path, body, status, param in REQUESTS:
            data = io.BytesIO(body if isinstance(body, bytes) else orjson.dumps(body))
            async with w.http.post(
                w.url + path, data=data, headers={"content-type": "application/json"}
            ) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), (path, error)
        assert w.records() == []

    run_scenario(scenario, Script([HI]))


def test_all_wrong_fields_of_a_request_are_named(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        wrong = {**REWARD, "source": "guess", "value": "x"}
        async with w.http.post(w.url + "/rewards", json=wrong) as r:
            error = (await r.json())["error"]
        assert error["param"] == "source"
        assert [said.partition(":")[0] for said in error["message"].split("; ")] == [
            "source",
            "value",
        ]

    run_scenario(scenario, Script([HI]))
