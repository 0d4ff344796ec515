"""Model calls between the official OpenAI client and a scripted engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai import APIStatusError, AsyncOpenAI
from openai.types import CompletionUsage
from support.gateway import GatewayFixture, run_gateway
from support.scripted.chat import chunks, plain
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.capture.engine_tokens import NOT_REPORTED, CapturedTokens
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.token_fields import NO_PROMPT
from clawstream.schemas import engine_frames
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import call_span_id
from clawstream.schemas.records import Step, VersionSpan
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
YO = ScriptedChoice([5, 6], ["Y", "o"], [-1.0, -2.0], finish_reason="length")
LOOK = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": '{"key": "k1"}'},
}
CALLS = ScriptedChoice(
    [4, 5, 6], [None, None, None], [-0.1, -0.2, -0.3], tool_calls=[LOOK], finish_reason="tool_calls"
)
SPANS: list[dict[str, Any]] = [
    {"version": "default/3.0", "start": 0, "end": 2},
    {"version": "default/4.0", "start": 2, "end": 3},
]
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture(params=["captured", "vllm"])
def run_scenario(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC, kind=request.param)


def spans_in(w: GatewayFixture, spans: list[dict[str, Any]]) -> tuple[VersionSpan, ...]:
    """What a step says of them: a vLLM without our middleware tells none."""
    return tuple(VersionSpan(**s) for s in spans) if w.engine.kind == "captured" else ()


def sdk(w: GatewayFixture, path: str = "/t1/g1/v1", key: str = "none", **more: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=w.url + path, api_key=key, max_retries=0, timeout=600, **more)


TRACEPARENT = f"00-{'ab' * 16}-{'cd' * 8}-03"


def events(body: bytes) -> list[bytes]:
    return [e for e in body.split(b"\n\n") if e]


def assert_tokens(step: Step, say: ScriptedChoice, prompt: Iterable[int] = (1, 2, 3)) -> None:
    assert step.prompt_token_ids is not None and step.response_token_ids is not None
    assert step.response_logprobs is not None and step.tokens_absent_reason is None
    assert unpack_ids(step.prompt_token_ids) == list(prompt)
    assert unpack_ids(step.response_token_ids) == list(say.ids)
    assert unpack_logprobs(step.response_logprobs) == pytest.approx(list(say.logprobs))


# ---------------------------------------------------------------- what is recorded


@pytest.mark.slow
def test_plain_call_is_one_step_with_everything(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        headers = {
            "x-clawstream-channel": "val",
            "idempotency-key": "once",
            "traceparent": TRACEPARENT,
            "tracestate": "vendor=1",
        }
        async with sdk(w, default_headers=headers) as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK, temperature=0.5)
        reply = raw.parse()
        assert reply.choices[0].message.content == "Hello"
        (step,) = w.steps()
        assert raw.headers["x-clawstream-trajectory"] == "t1"
        assert raw.headers["x-clawstream-step"] == step.step_id
        assert not [
            h
            for h in raw.headers
            if h in (engine_frames.ASK, engine_frames.OWN_BODY, engine_frames.VERSION_START)
        ]
        assert step.step_id == f"{step.call_id}.0" and step.call_id.startswith("t1~")
        assert (step.run_id, step.trajectory_key, step.group_id, step.channel) == (
            "default",
            "t1",
            "g1",
            "val",
        )
        assert (step.protocol, step.model, step.status, step.finish_reason) == (
            "openai.chat",
            "policy",
            "ok",
            "stop",
        )
        assert json.loads(step.request_json) == ASK | {"temperature": 0.5}
        assert json.loads(step.response_json) == HI.message()
        assert_tokens(step, HI)
        assert step.versions == spans_in(w, SPANS)
        assert (step.version_first, step.version_last) == ("default/3.0", None)
        assert step.tokenizer_fingerprint == "f00d"
        assert (step.retry_count, step.idempotency_key, step.streamed) == (0, "once", False)
        assert step.user_agent is not None and "OpenAI" in step.user_agent
        assert step.traceparent == TRACEPARENT and step.time_to_first_token_ms is None
        assert w.engine.headers[0]["tracestate"] == "vendor=1"
        parent = call_span_id(step.call_id)
        assert w.engine.headers[0]["traceparent"] == f"00-{'ab' * 16}-{parent}-03"
        assert w.producer.messages[0].key == b"t1"
        assert w.engine.requests[0]["temperature"] == 0.5
        assert await w.metric("clawstream_gateway_steps_answered_total") == 1

    run_scenario(
        scenario,
        Script([HI], versions=[SPANS], version_start="default/3.0", tokenizer="f00d"),
    )


def test_streamed_call_is_one_step_with_everything(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            raw = await client.chat.completions.with_raw_response.create(**ASK, stream=True)
            text = ""
            async for chunk in raw.parse():
                text += chunk.choices[0].delta.content or ""
        assert text == "Hello"
        (step,) = w.steps()
        assert raw.headers["x-clawstream-step"] == step.step_id
        assert step.streamed and step.status == "ok" and step.finish_reason == "stop"
        assert step.time_to_first_token_ms is not None and step.time_to_first_token_ms > 0
        assert "traceparent" not in w.engine.headers[0] and step.traceparent is None
        assert json.loads(step.response_json) == {"role": "assistant", "content": "Hello"}
        assert_tokens(step, HI)
        assert step.versions == spans_in(w, SPANS)
        assert step.version_first == "default/3.0"

    run_scenario(scenario, Script([HI], versions=[SPANS], version_start="default/3.0"))


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_are_sibling_steps(run_scenario: RunScenario, stream: bool) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(
            w.url + "/t1/g1/chat/completions", json=ASK | {"n": 2, "stream": stream}
        ) as r:
            assert r.status == 200
            await r.read()
        steps = w.steps()
        assert [s.choice_index for s in steps] == [0, 1]
        assert len({s.call_id for s in steps}) == 1
        assert r.headers["x-clawstream-step"].split(",") == [s.step_id for s in steps]
        assert_tokens(steps[0], HI)
        assert_tokens(steps[1], YO)
        assert [s.finish_reason for s in steps] == ["stop", "length"]
        assert steps[0].versions == spans_in(w, SPANS)
        assert steps[1].versions == spans_in(w, [{"version": "default/4.0", "start": 0, "end": 2}])

    run_scenario(
        scenario,
        Script([HI, YO], versions=[SPANS, [{"version": "default/4.0", "start": 0, "end": 2}]]),
    )


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_pass_and_are_recorded(run_scenario: RunScenario, stream: bool) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
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

    run_scenario(scenario, Script([CALLS]))


def test_tool_call_deltas_in_pieces_are_assembled() -> None:
    adapter = OpenAIChat()
    accumulator = adapter.accumulator(
        adapter.parse_request(orjson.dumps(ASK | {"stream": True})), "captured"
    )
    stream = EventStream(accumulator, CapturedTokens())
    pieces: list[dict[str, Any]] = [
        {"role": "assistant", "content": None},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function",
        "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x"'}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function",
        "function": {"name": "g", "arguments": "{}"}}]},
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


@pytest.mark.parametrize(
    "more", [{}, {"logprobs": True}, {"return_token_ids": True}, {"n": 2}, {"logprobs": None}]
)
def test_client_sees_what_the_engine_would_have_said(
    run_scenario: RunScenario, more: dict[str, Any]
) -> None:
    n = more.get("n", 1)
    says = iter([says[:n] for says in ([HI, YO], [CALLS, HI]) for _ in range(4)])

    async def scenario(w: GatewayFixture) -> None:
        for stream in (False, True, False, True):
            body = (
                ASK
                | more
                | {
                    "stream": stream,
                    "stream_options": {"include_usage": True},
                    "unknown": {"a": [1, 2.5]},
                }
            )
            direct = await (
                await w.http.post(w.engine_url + "/v1/chat/completions", json=body)
            ).read()
            through = await (
                await w.http.post(w.url + "/t/g/v1/chat/completions", json=body)
            ).read()
            assert events(through) == events(direct)
            assert w.engine.requests[-1]["unknown"] == {"a": [1, 2.5]}
            assert w.engine.requests[-1]["stream_options"] == {"include_usage": True}
        assert len(w.steps()) == 4 * n

    run_scenario(scenario, lambda _: Script(next(says)))


def test_engine_errors_pass_as_they_are(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            with pytest.raises(APIStatusError) as caught:
                await client.chat.completions.create(**ASK, stream=True)
        assert caught.value.status_code == 422
        assert caught.value.response.json()["error"] == {
            "message": "scripted", "type": "BadRequestError", "param": None, "code": 422,
        }  # fmt: skip
        assert w.records() == []
        assert await w.metric('clawstream_gateway_calls_total{status="upstream_error"}') == 1

    run_scenario(scenario, Script([HI], status=422))


def test_missing_tokens_say_why(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        (step,) = w.steps()
        assert step.status == "ok" and step.response_token_ids is None
        assert step.tokens_absent_reason == (
            NOT_REPORTED if w.engine.kind == "captured" else NO_PROMPT
        )

    run_scenario(scenario, Script([HI], no_tokens=True))


def test_engine_that_cut_a_reply_short_is_an_error(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            await client.chat.completions.create(**ASK)
        assert [s.status for s in w.steps()] == ["error"]
        assert await w.metric("clawstream_gateway_steps_answered_total") == 0

    run_scenario(scenario, Script([ScriptedChoice([1], ["x"], [-1.0], finish_reason="abort")]))


def test_models_come_from_an_engine(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            assert [m.id async for m in client.models.list()] == ["policy"]

    run_scenario(scenario, Script([HI]))


def test_the_scripted_engine_tells_the_usage_that_the_protocol_has() -> None:
    """Strict clients refuse a usage without one of its three numbers."""
    ask, script = ASK | {"stream_options": {"include_usage": True}}, Script([HI, HI])
    *_, (last, _) = chunks(ask, script)
    told = CompletionUsage.model_validate(last["usage"])
    assert (told.prompt_tokens, told.completion_tokens, told.total_tokens) == (
        3,
        2 * len(HI.ids),
        3 + 2 * len(HI.ids),
    )
    assert plain(ask, script)["usage"] == last["usage"]
