"""Anthropic messages: requests, plain and streamed replies, errors; with and without a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import (
    ADD,
    LOOK,
    broken,
    json_values,
    plain,
    scripted_choices,
    streamed,
    takes_or_refuses,
    written,
)
from support.gateway import GatewayFixture, run_gateway
from support.scripted.messages import MessagesServer
from support.scripted.script import Json, Script, ScriptedChoice

from clawstream.gateway import errors
from clawstream.gateway.protocols.anthropic_messages import (
    ANTHROPIC_ERRORS,
    AnthropicMessages,
    finish_of,
    type_of,
)
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.tokens import unpack_ids, unpack_logprobs

ADAPTER, VOICE = AnthropicMessages(), MessagesServer()
ASK: Json = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
BODY = orjson.dumps(ASK)
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
THOUGHT = ScriptedChoice(
    [1, 2, 3, 4], ["Let ", "me", "Yes", "."], [-1.0, -2.0, -3.0, -4.0], reasoning=2
)
CALLS = ScriptedChoice(
    [4, 5, 6],
    ["Look: ", None, None],
    [-0.1, -0.2, -0.3],
    tool_calls=[LOOK, ADD],
    finish_reason="tool_calls",
)
PICTURE: Json = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
TOOL: Any = {
    "name": "lookup",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}},
}
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture(params=["captured", "vllm", "text"])
def run_scenario(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC, kind=request.param)


def sdk(w: GatewayFixture) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=w.url + "/t1/g1", api_key="none", max_retries=0, timeout=600)


def sse(*said: Json) -> bytes:
    return b"".join(
        f"event: {s['type']}\ndata: ".encode() + orjson.dumps(s) + b"\n\n" for s in said
    )


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_wrong_request_names_the_field(change: Json, param: str) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        ADAPTER.parse_request(orjson.dumps(ASK | change))
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["captured", "vllm", "text"])
def test_every_engine_gets_the_clients_bytes(kind: Any) -> None:
    odd = ASK | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see",
            "cache_control": {"type": "ephemeral"}}, PICTURE]},
            {"role": "system", "content": "in mid-list"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t",
            "signature": "s"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x",
            "content": [PICTURE]}]},
        ],
        "system": [{"type": "text", "text": "cc_is_subagent=true"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL],
        "unknown": {"of": "tomorrow"},
    }  # fmt: skip
    body = b" " + orjson.dumps(odd, option=orjson.OPT_INDENT_2) + b"\n"
    request = ADAPTER.parse_request(body)
    assert (request.model, request.stream, request.n) == ("policy", False, 1)
    assert ADAPTER.engine_body(request, kind) == body


# ---------------------------------------------------------------- replies


def test_plain_reply() -> None:
    body = plain(VOICE, ASK, [CALLS])
    answer = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "captured", body)
    (choice,) = answer.choices
    assert (answer.body, answer.model, choice.index, choice.finish_reason) == (
        body,
        "policy",
        0,
        "tool_calls",
    )
    assert choice.tokens is None
    assert json.loads(choice.message_json) == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Look: "},
            {"type": "tool_use", "id": "call_1", "name": "lookup", "input": {"key": "k1"}},
            {"type": "tool_use", "id": "call_2", "name": "add", "input": {"a": 1, "b": "ü\n"}},
        ],
    }


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"), ("stop_sequence", "stop"), ("pause_turn", "stop"),
        ("of tomorrow", "stop"),
        ("max_tokens", "length"), ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"), (None, "abort"),
    ],
)  # fmt: skip
def test_stop_reasons(reason: str | None, finish: str) -> None:
    assert finish_of(reason) == finish
    body = orjson.dumps({"role": "assistant", "content": [], "stop_reason": reason})
    assert (
        ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "text", body).choices[0].finish_reason
        == finish
    )


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"content": "x"}', b'{"content": [], "stop_reason": 3}']
)
def test_what_is_no_message_passes_unread(body: bytes) -> None:
    answer = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "text", body)
    assert (answer.body, answer.choices) == (body, ())
    assert (answer.unread or "").startswith("the reply is not a message")


@given(scripted_choices(), st.lists(st.integers(0, 10_000), max_size=8))
def test_streamed_equals_plain_however_it_is_cut(say: ScriptedChoice, cuts: list[int]) -> None:
    data = written(VOICE, ASK, [say])
    got = streamed(ADAPTER, BODY, "captured", data, cuts)
    assert (got.client, got.failure) == (data, None)
    (choice,) = ADAPTER.parse_reply(
        ADAPTER.parse_request(BODY), "captured", plain(VOICE, ASK, [say])
    ).choices
    (same,) = got.reply.choices
    message = json.loads(choice.message_json)
    if message["content"] == [{"type": "text", "text": ""}]:
        message["content"] = []  # of an empty text vLLM streams no block
    assert (json.loads(same.message_json), same.finish_reason) == (message, choice.finish_reason)


def test_everything_before_the_end_goes_out_at_once() -> None:
    data = written(VOICE, ASK, [THOUGHT])
    got = streamed(ADAPTER, BODY, "captured", data)
    assert got.held.startswith(b"event: message_delta") and data.endswith(got.held)
    (choice,) = got.reply.choices
    assert json.loads(choice.message_json)["content"] == [
        {"type": "thinking", "thinking": "Let me", "signature": "5c5c5c"},
        {"type": "text", "text": "Yes."},
    ]


def test_events_of_other_providers_pass() -> None:
    data = sse(
        {"type": "message_start", "message": {"role": "assistant", "model": "m", "content": []}},
        {"type": "ping"},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "text", "text": "", "citations": None},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "citations_delta", "citation": {"url": "u"}},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "of_tomorrow_delta", "what": 1},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "tomorrow", "x": 1},
        {"type": "message_delta", "delta": {"stop_reason": None}, "usage": {}},
        {"type": "message_delta", "delta": {"stop_reason": "refusal"}, "usage": {}},
        {"type": "message_stop"},
    )
    got = streamed(ADAPTER, BODY, "text", b": keep-alive\n\n" + data)
    assert (got.client, got.failure, got.reply.model) == (b": keep-alive\n\n" + data, None, "m")
    (choice,) = got.reply.choices
    assert choice.finish_reason == "content_filter"
    assert json.loads(choice.message_json)["content"] == [
        {"type": "text", "text": "hi", "what": 1, "citations": [{"url": "u"}]}
    ]


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    whole = written(VOICE, ASK, [ScriptedChoice([4], [None], [-0.1], [LOOK], "tool_calls")])
    data = whole[: whole.index(b"event: content_block_stop")].replace(b'k1\\"}', b"k")
    got = streamed(ADAPTER, BODY, "captured", data)
    assert got.failure is not None and "had not ended" in got.failure
    (choice,) = got.reply.choices
    assert choice.finish_reason is None
    (block,) = json.loads(choice.message_json)["content"]
    assert block == {
        "type": "tool_use",
        "id": "call_1",
        "name": "lookup",
        "input": {},
        "partial_json": '{"key": "k',
    }


def test_an_aborted_message_ends_as_one() -> None:
    say = ScriptedChoice([7], ["Hel"], [-0.5], finish_reason="abort")
    for choice in (
        streamed(ADAPTER, BODY, "captured", written(VOICE, ASK, [say])).reply.choices[0],
        ADAPTER.parse_reply(
            ADAPTER.parse_request(BODY), "captured", plain(VOICE, ASK, [say])
        ).choices[0],
    ):
        assert choice.finish_reason == "abort"


def test_nothing_was_said_before_the_first_block() -> None:
    first = written(VOICE, ASK, [HI]).partition(b"event: content_block_start")[0]
    assert streamed(ADAPTER, BODY, "captured", first).reply.choices == ()


@pytest.mark.slow
@given(broken(VOICE, ASK))
def test_no_event_can_break_the_accumulator(said: list[Any]) -> None:
    takes_or_refuses(ADAPTER, BODY, "captured", said)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequest("m"), "invalid_request_error"),
        (errors.WrongKey("m"), "authentication_error"),
        (errors.Forbidden("m"), "permission_error"), (errors.NotFound("m"), "not_found_error"),
        (errors.BodyTooLarge("m"), "request_too_large"),
        (errors.Unprocessable("m"), "invalid_request_error"),
        (errors.Overloaded("m"), "overloaded_error"), (errors.NotRecorded("m"), "overloaded_error"),
        (errors.UpstreamFailed("m"), "api_error"), (errors.UpstreamTimeout("m"), "timeout_error"),
    ],
)  # fmt: skip
def test_our_errors_are_anthropics(error: errors.GatewayError, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": "m"}}
    assert json.loads(ANTHROPIC_ERRORS.body(error)) == body
    event = ADAPTER.accumulator(ADAPTER.parse_request(BODY), "text").error(error)
    assert (
        event.startswith(b"event: error\ndata: ") and json.loads(event.split(b"data: ")[1]) == body
    )
    assert event.endswith(b"\n\n")


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, b'{"error":{"message":"body.max_tokens","type":"Bad Request","code":400}}',
        "invalid_request_error", "body.max_tokens"),
        (404, b'{"type":"error","error":{"type":"NotFoundError","message":"no model"}}',
        "not_found_error", "no model"),
        (404, b'{"detail":"Not Found"}', "not_found_error", "Not Found"),
        (429, b'"slow down"', "rate_limit_error", "slow down"),
        (500, b"<html>oh</html>", "api_error", "<html>oh</html>"),
        (529, b"[]", "overloaded_error", "[]"),
    ],
)  # fmt: skip
def test_an_engines_errors_become_anthropics(
    status: int, body: bytes, kind: str, message: str
) -> None:
    said = json.loads(ANTHROPIC_ERRORS.engine_error(status, body))
    assert said == {"type": "error", "error": {"type": kind, "message": message}}


def test_an_error_that_is_anthropics_stays_as_it_is() -> None:
    error = b'{"type": "overloaded_error", "message": "m"}'
    body = b'{"type": "error", "error": %s, "request_id": "r"}' % error
    assert ANTHROPIC_ERRORS.engine_error(529, body) is body


@given(json_values(), st.integers(400, 599))
def test_any_engine_error_can_be_written(said: Any, status: int) -> None:
    shown = json.loads(ANTHROPIC_ERRORS.engine_error(status, orjson.dumps(said)))
    assert shown["type"] == "error" and isinstance(shown["error"]["message"], str)
    assert (
        type_of(status) in {"api_error", shown["error"]["type"]}
        or status in (401, 403, 404, 408, 413, 429)
        or status < 500
    )


# -- through the gateway, with the official client


@pytest.mark.parametrize("say", [HI, THOUGHT, CALLS], ids=["text", "thinking", "tools"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_message_is_one_step(
    run_scenario: RunScenario, say: ScriptedChoice, stream: bool
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            if stream:
                async with client.messages.stream(**ASK, tools=[TOOL]) as s:
                    seen = [b.to_dict() for b in (await s.get_final_message()).content]
            else:
                seen = [
                    b.to_dict() for b in (await client.messages.create(**ASK, tools=[TOOL])).content
                ]
        (step,) = w.steps()
        said = json.loads(step.response_json)
        assert said["content"] == [{k: v for k, v in b.items() if v is not None} for b in seen]
        assert (step.protocol, step.status, step.streamed) == ("anthropic.messages", "ok", stream)
        assert step.finish_reason == say.finish_reason
        assert json.loads(step.request_json)["tools"] == [TOOL]
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


@pytest.mark.slow
def test_errors_reach_the_client_as_anthropics(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            with pytest.raises(BadRequestError) as ours:
                await client.messages.create(
                    model="policy",
                    max_tokens=3,
                    messages="hi",  # type: ignore[arg-type]
                )
            with pytest.raises(BadRequestError) as engines:
                await client.messages.create(**ASK)
        assert (
            isinstance(ours.value.body, dict)
            and ours.value.body["error"]["type"] == "invalid_request_error"
        )
        assert isinstance(engines.value.body, dict)
        assert engines.value.body["error"] == {
            "type": "invalid_request_error",
            "message": "scripted",
        }
        assert w.steps() == []

    run_scenario(scenario, Script([HI], status=400))


def test_an_error_in_mid_stream_reaches_the_client(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            with pytest.raises(APIStatusError, match="scripted"):
                async for _ in await client.messages.create(**ASK, stream=True):
                    pass

    run_scenario(scenario, Script([HI], fail_after=3))


def test_counting_tokens_passes_and_is_not_recorded(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with sdk(w) as client:
            count = await client.messages.count_tokens(
                model="policy", messages=[{"role": "user", "content": "hi"}]
            )
            with pytest.raises(BadRequestError) as caught:
                await client.messages.count_tokens(model="policy", messages=[])
        assert count.input_tokens == 3
        assert isinstance(caught.value.body, dict) and caught.value.body["type"] == "error"
        assert w.steps() == []

    run_scenario(scenario, Script([HI]))
