"""OpenAI Responses: requests, plain and streamed replies, errors; with and without a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError
from support.adapters import (
    ADD,
    LOOK,
    broken,
    plain,
    scripted_choices,
    streamed,
    takes_or_refuses,
    written,
)
from support.gateway import GatewayFixture, run_gateway
from support.scripted.responses import ResponsesServer
from support.scripted.script import Json, Script, ScriptedChoice

from clawstream.gateway import errors
from clawstream.gateway.protocols.openai_responses import OpenAIResponses, finish_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

ADAPTER, VOICE = OpenAIResponses(), ResponsesServer()
ASK: Json = {"model": "policy", "input": "hi"}
BODY = orjson.dumps(ASK)
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
THOUGHT = ScriptedChoice(
    [1, 2, 3, 4],
    ["Let ", "me", "Yes", "."],
    [-1.0, -2.0, -3.0, -4.0],
    reasoning=2,
    finish_reason="length",
)
CALLS = ScriptedChoice(
    [4, 5, 6],
    ["Look: ", None, None],
    [-0.1, -0.2, -0.3],
    tool_calls=[LOOK, ADD],
    finish_reason="tool_calls",
)
TOOL: Any = {
    "type": "function",
    "name": "lookup",
    "strict": False,
    "parameters": {"type": "object", "properties": {}},
}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture(params=["captured", "vllm", "text"])
def run_scenario(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC, kind=request.param)


def sdk(w: GatewayFixture) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=w.url + "/t1/g1/v1", api_key="none", max_retries=0, timeout=600)


def sse(*said: Json) -> bytes:
    return b"".join(
        f"event: {s['type']}\ndata: ".encode() + orjson.dumps(s) + b"\n\n" for s in said
    )


def same_in_both(message_json: bytes) -> Any:
    """Return the message without the status of reasoning items, which differs in vLLM streams."""
    said = json.loads(message_json)
    for item in said["output"]:
        if item["type"] == "reasoning":
            del item["status"]
    return said


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": 3}, "input"), ({"input": ["hi"]}, "input"),
        ({"input": {"role": "user"}}, "input"),
        ({"model": 3}, "model"), ({"stream": "yes"}, "stream"),
        ({"background": True}, "background"),
    ],
)  # fmt: skip
def test_a_wrong_request_names_the_field(change: Json, param: str) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        ADAPTER.parse_request(orjson.dumps(ASK | change))
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["captured", "vllm", "text"])
def test_every_engine_gets_the_clients_bytes(kind: Any) -> None:
    odd = ASK | {
        "input": [
            {"type": "message", "role": "developer",
            "content": [{"type": "input_text", "text": "be good"}]},
            {"role": "user", "content": [{"type": "input_image",
            "image_url": "data:image/png;base64,iVBORw0KGgo="}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
            {"type": "function_call", "call_id": "c", "name": "spawn", "namespace": "multi_agent",
            "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
            "output": [{"type": "input_text", "text": "done"}]},
        ],
        "tools": [
            {"type": "namespace", "name": "multi_agent", "description": "", "tools": [TOOL]},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        ],
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "t",
        "client_metadata": {"a": "b"},
    }  # fmt: skip
    body = b" " + orjson.dumps(odd, option=orjson.OPT_INDENT_2) + b"\n"
    request = ADAPTER.parse_request(body)
    assert (request.model, request.stream, request.n) == ("policy", False, 1)
    assert ADAPTER.engine_body(request, kind) == body


def test_a_stored_prompt_may_stand_for_the_input() -> None:
    assert ADAPTER.parse_request(b'{"prompt": {"id": "p"}, "background": false}').model is None


# ---------------------------------------------------------------- replies


def test_plain_reply() -> None:
    body = plain(VOICE, ASK, [CALLS])
    answer = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "vllm", body)
    (choice,) = answer.choices
    assert (answer.body, answer.model, choice.index, choice.finish_reason) == (
        body,
        "policy",
        0,
        "tool_calls",
    )
    assert choice.tokens is None
    message, look, add = json.loads(choice.message_json)["output"]
    assert message["content"] == [
        {"annotations": [], "text": "Look: ", "type": "output_text", "logprobs": None}
    ]
    assert (look["call_id"], look["name"], look["arguments"]) == (
        "call_1",
        "lookup",
        '{"key": "k1"}',
    )
    assert (add["call_id"], add["name"]) == ("call_2", "add")


@pytest.mark.parametrize(
    ("response", "finish"),
    [
        ({"status": "completed"}, "stop"),
        ({}, "stop"),
        ({"status": "completed", "output": [{"type": "function_call"}]}, "tool_calls"),
        (
            {"status": "completed", "output": [{"type": "message"}, {"type": "custom_tool_call"}]},
            "tool_calls",
        ),
        (
            {"status": "completed", "output": [{"type": "web_search_call"}, {"type": "message"}]},
            "stop",
        ),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}},
            "content_filter",
        ),
        ({"status": "incomplete", "incomplete_details": None}, "length"),
        ({"status": "cancelled"}, "abort"),
        ({"status": "failed"}, "abort"),
        ({"status": "in_progress"}, None),
        ({"status": "queued"}, None),
    ],
)
def test_statuses(response: Json, finish: str | None) -> None:
    assert finish_of(response, response.get("output", [])) == finish
    body = orjson.dumps({"output": []} | response)
    assert (
        ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "text", body).choices[0].finish_reason
        == finish
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"output": 3}', b'{"output": ["x"]}'])
def test_what_is_no_response_passes_unread(body: bytes) -> None:
    answer = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "text", body)
    assert (answer.body, answer.choices) == (body, ())
    assert (answer.unread or "").startswith("the reply is not a response")


@given(scripted_choices(), st.lists(st.integers(0, 10_000), max_size=8))
def test_streamed_equals_plain_however_it_is_cut(say: ScriptedChoice, cuts: list[int]) -> None:
    data = written(VOICE, ASK, [say])
    got = streamed(ADAPTER, BODY, "captured", data, cuts)
    assert (got.client, got.failure, got.reply.model) == (data, None, "policy")
    (choice,) = ADAPTER.parse_reply(
        ADAPTER.parse_request(BODY), "captured", plain(VOICE, ASK, [say])
    ).choices
    (same,) = got.reply.choices
    assert same.finish_reason == choice.finish_reason
    assert same_in_both(same.message_json) == same_in_both(choice.message_json)


@given(scripted_choices())
def test_what_came_before_the_end_is_put_together(say: ScriptedChoice) -> None:
    whole = written(VOICE, ASK, [say])
    cut = whole[: whole.index(b"event: response.completed")]
    parts = streamed(ADAPTER, BODY, "captured", cut)
    assert parts.failure is not None and "had not ended" in parts.failure
    (choice,) = streamed(ADAPTER, BODY, "captured", whole).reply.choices
    if not (output := json.loads(choice.message_json)["output"]):
        assert parts.reply.choices == ()
        return
    (part,) = parts.reply.choices
    assert part.finish_reason is None and json.loads(part.message_json)["output"] == output


def test_everything_before_the_last_event_goes_out_at_once() -> None:
    data = written(VOICE, ASK, [THOUGHT])
    got = streamed(ADAPTER, BODY, "captured", data)
    assert got.held.startswith(b"event: response.completed") and data.endswith(got.held)
    assert got.reply.choices[0].finish_reason == "length"


def test_items_in_the_middle_are_put_together_from_their_deltas() -> None:
    data = sse(
        {"type": "response.created", "response": {"model": "m"}},
        {"type": "response.output_item.added", "output_index": 0,
        "item": {"type": "reasoning", "id": "r", "summary": []}},
        {"type": "response.reasoning_summary_part.added", "output_index": 0, "summary_index": 0,
        "part": {"type": "summary_text", "text": ""}},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "summary_index": 0,
        "delta": "I th"},
        {"type": "response.reasoning_summary_text.delta", "output_index": 0, "summary_index": 0,
        "delta": "ink"},
        {"type": "response.output_item.added", "output_index": 1,
        "item": {"type": "message", "content": []}},
        {"type": "response.output_text.delta", "output_index": 1, "content_index": 0,
        "delta": "Hel"},
        {"type": "response.output_text.delta", "output_index": 1, "content_index": 0,
        "delta": "lo"},
        {"type": "response.refusal.delta", "output_index": 1, "content_index": 1, "delta": "no"},
        {"type": "response.output_item.added", "output_index": 2,
        "item": {"type": "function_call", "name": "f", "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "output_index": 2, "delta": '{"k'},
        {"type": "response.output_item.added", "output_index": 3,
        "item": {"type": "custom_tool_call", "name": "g", "input": ""}},
        {"type": "response.custom_tool_call_input.delta", "output_index": 3, "delta": "free"},
        {"type": "response.web_search_call.searching", "output_index": 4},
        {"type": "response.of_tomorrow"},
    )  # fmt: skip
    got = streamed(ADAPTER, BODY, "text", data)
    assert got.client.startswith(data)
    (choice,) = got.reply.choices
    assert json.loads(choice.message_json)["output"] == [
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "I think"}]},
        {
            "type": "message",
            "content": [
                {"type": "output_text", "text": "Hello"},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"type": "function_call", "name": "f", "arguments": '{"k'},
        {"type": "custom_tool_call", "name": "g", "input": "free"},
    ]


@pytest.mark.parametrize(
    ("last", "finish", "failure"),
    [
        ({"type": "response.incomplete",
        "response": {"incomplete_details": {"reason": "content_filter"}}}, "content_filter", None),
        ({"type": "response.failed", "response": {"error": {"code": "x", "message": "boom"}}},
        "abort", "boom"),
        ({"type": "response.completed", "response": {"output": None}}, "stop", None),
    ],
)  # fmt: skip
def test_other_ways_to_end(last: Json, finish: str, failure: str | None) -> None:
    item = {"type": "response.output_item.added", "item": {"type": "message", "content": []}}
    text = {"type": "response.output_text.delta", "delta": "Hi"}
    data = sse(item, text, last) + b"data: [DONE]\n\n"
    got = streamed(ADAPTER, BODY, "text", data)
    assert (got.client, got.failure) == (data, failure)
    (choice,) = got.reply.choices
    assert choice.finish_reason == finish
    assert json.loads(choice.message_json)["output"][0]["content"] == [
        {"type": "output_text", "text": "Hi"}
    ]


def test_an_engines_error_event_is_a_failure() -> None:
    for event, message in (
        (VOICE.failure(), "scripted"),
        (sse({"type": "error", "error": {"message": "boom", "code": None}}), "boom"),
        (b'data: {"error": {"message": "bang"}}\n\n', "bang"),
    ):
        assert streamed(ADAPTER, BODY, "text", event).failure == message


def test_logprobs_that_were_asked_for_stay() -> None:
    ask = ASK | {"include": ["message.output_text.logprobs"]}
    data = written(VOICE, ask, [HI])
    got = streamed(ADAPTER, orjson.dumps(ask), "vllm", data)
    assert got.client == data
    for message_json in (
        got.reply.choices[0].message_json,
        ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "vllm", plain(VOICE, ask, [HI]))
        .choices[0]
        .message_json,
    ):
        told = json.loads(message_json)["output"][0]["content"][0]["logprobs"]
        assert [e["logprob"] for e in told] == [-0.5, -0.25]


@pytest.mark.slow
@given(broken(VOICE, ASK))
def test_no_event_can_break_the_accumulator(said: list[Any]) -> None:
    takes_or_refuses(ADAPTER, BODY, "captured", said)


def test_our_error_is_the_next_event_of_the_stream() -> None:
    accumulator = ADAPTER.accumulator(ADAPTER.parse_request(BODY), "text")
    data = b'{"type": "response.in_progress", "sequence_number": 6}'
    accumulator.read(b"data: " + data + b"\n\n", data)
    event = accumulator.error(errors.UpstreamFailed("it died", "x"))
    assert event.startswith(b"event: error\ndata: ") and event.endswith(b"\n\n")
    assert json.loads(event.split(b"data: ")[1]) == {
        "type": "error", "code": "upstream_failed", "message": "it died", "param": "x",
        "sequence_number": 7,
    }  # fmt: skip


# -- through the gateway, with the official client


@pytest.mark.slow
@pytest.mark.parametrize("say", [HI, THOUGHT, CALLS], ids=["text", "reasoning", "tools"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_one_step(
    run_scenario: RunScenario, say: ScriptedChoice, stream: bool
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            if stream:
                async with client.responses.stream(model="policy", input="hi", tools=[TOOL]) as s:
                    seen = (await s.get_final_response()).output_text
            else:
                seen = (await client.responses.create(**ASK, tools=[TOOL])).output_text
        (step,) = w.steps()
        output = json.loads(step.response_json)["output"]
        assert seen == "".join(t for t in say.texts[say.reasoning :] if t)
        assert seen == "".join(
            p["text"] for i in output if i["type"] == "message" for p in i["content"]
        )
        assert len([i for i in output if i["type"] == "function_call"]) == len(say.tool_calls)
        assert (step.protocol, step.status, step.streamed) == ("openai.responses", "ok", stream)
        assert step.finish_reason == say.finish_reason
        if w.engine.kind != "captured":
            assert step.tokens_absent_reason is not None and step.response_token_ids is None
            return
        assert step.prompt_token_ids is not None and unpack_ids(step.prompt_token_ids) == [1, 2, 3]
        assert step.response_token_ids is not None and unpack_ids(step.response_token_ids) == list(
            say.ids
        )
        assert step.response_logprobs is not None
        assert unpack_logprobs(step.response_logprobs) == pytest.approx(list(say.logprobs))
        assert step.tokens_absent_reason is None

    run_scenario(scenario, Script([say]))


def test_errors_reach_the_client_as_openais(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            with pytest.raises(BadRequestError) as ours:
                await client.responses.create(**ASK, background=True)
            with pytest.raises(BadRequestError) as engines:
                await client.responses.create(**ASK)
        assert (ours.value.param, ours.value.code) == ("background", "invalid_request")
        assert engines.value.type == "BadRequestError"
        assert w.steps() == []

    run_scenario(scenario, Script([HI], status=400))


def test_a_stream_that_breaks_ends_with_an_error_event(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            events = [e async for e in await client.responses.create(**ASK, stream=True)]
        assert [e.sequence_number for e in events] == list(range(len(events)))
        assert events[-1].type == "error" and events[-1].code == "upstream_failed"

    run_scenario(scenario, Script([HI], die_after=5))


def test_an_aborted_generation_is_an_error_where_the_engine_tells_its_tokens(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            assert (await client.responses.create(**ASK)).status == "completed"
        (step,) = w.steps()
        captured = w.engine.kind == "captured"
        assert (step.status, step.finish_reason) == (
            ("error", "abort") if captured else ("ok", "stop")
        )

    run_scenario(scenario, Script([ScriptedChoice([7], ["Hel"], [-0.5], finish_reason="abort")]))
