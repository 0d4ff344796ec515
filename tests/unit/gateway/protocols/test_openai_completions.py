"""OpenAI completions: requests, plain and streamed replies, tokens; with and without a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError
from support.adapters import broken, plain, scripted_choices, streamed, takes_or_refuses, written
from support.gateway import GatewayFixture, run_gateway
from support.scripted.completions import CompletionsServer
from support.scripted.script import Json, Script, ScriptedChoice

from clawstream.gateway import errors
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.protocols.base import Choice, EngineKind, ParsedReply
from clawstream.gateway.protocols.openai_completions import (
    ECHOED,
    NOTHING_SAMPLED,
    OpenAICompletions,
)
from clawstream.gateway.protocols.token_fields import NO_IDS, NO_LOGPROBS
from clawstream.schemas import engine_frames
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids, unpack_logprobs

ADAPTER, VOICE = OpenAICompletions(), CompletionsServer()
ASK: Json = {"model": "policy", "prompt": "hi"}
BODY = orjson.dumps(ASK)
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
YO = ScriptedChoice([5, 6], ["Y", "o"], [-1.0, -2.0], finish_reason="length")
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture(params=["captured", "vllm", "text"])
def run_scenario(request: pytest.FixtureRequest, tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC, kind=request.param)


def asked(ask: Json, kind: EngineKind = "vllm") -> Json:
    """What an engine is asked for a client's request."""
    said: Json = orjson.loads(ADAPTER.engine_body(ADAPTER.parse_request(orjson.dumps(ask)), kind))
    return said


def answered(
    ask: Json, says: Sequence[ScriptedChoice], kind: EngineKind = "vllm", **more: Any
) -> ParsedReply:
    return ADAPTER.parse_reply(
        ADAPTER.parse_request(orjson.dumps(ask)), kind, plain(VOICE, asked(ask, kind), says, **more)
    )


def told(choice: Choice) -> tuple[list[int], list[int], list[float], str | None]:
    """Prompt ids, ids, log-probabilities, and why they are missing."""
    tokens = choice.tokens
    assert tokens is not None
    return (
        unpack_ids(tokens.prompt_ids or b""),
        unpack_ids(tokens.ids or b""),
        unpack_logprobs(tokens.logprobs or b""),
        tokens.absent,
    )


# ---------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": 3}, "prompt"), ({"prompt": {"text": "hi"}}, "prompt"),
        ({"prompt": [{"text": "hi"}]}, "prompt"),
        ({"prompt": [None]}, "prompt"), ({"model": 3}, "model"), ({"stream": 1}, "stream"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"), ({"n": True}, "n"), ({"n": "2"}, "n"),
    ],
)  # fmt: skip
def test_a_wrong_request_names_the_field(change: Json, param: str) -> None:
    with pytest.raises(errors.BadRequest) as caught:
        ADAPTER.parse_request(orjson.dumps(ASK | change))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("change", "choices"),
    [
        ({}, 1), ({"n": 3}, 3), ({"prompt": ["a", "b"]}, 2), ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1), ({"prompt": [[1, 2], [3]], "n": 2}, 4), ({"prompt": []}, 1),
        ({"prompt": None}, 1),
        ({"prompt": ""}, 1), ({"prompt": None, "prompt_embeds": "AA=="}, 1),
        ({"prompt": None, "prompt_embeds": ["AA==", "AA=="]}, 2),
        ({"prompt": "x", "prompt_embeds": ["AA==", "AA=="]}, 3),
    ],
)  # fmt: skip
def test_a_choice_for_each_prompt_and_each_n(change: Json, choices: int) -> None:
    assert ADAPTER.parse_request(orjson.dumps(ASK | change)).n == choices


def test_only_a_stock_vllm_is_asked_for_tokens() -> None:
    body = b' {"prompt": "hi",\n "unknown": {"of": "tomorrow"}} '
    request = ADAPTER.parse_request(body)
    assert ADAPTER.engine_body(request, "captured") == ADAPTER.engine_body(request, "text") == body
    added = (
        b' {"prompt": "hi",\n "unknown": {"of": "tomorrow"},"return_token_ids":true,"logprobs":0}'
    )
    assert ADAPTER.engine_body(request, "vllm") == added


@pytest.mark.parametrize(
    ("change", "added"),
    [
        ({"logprobs": 0}, {"return_token_ids": True}),
        ({"logprobs": 2}, {"return_token_ids": True}),
        ({"return_token_ids": True}, {"logprobs": 0}),
        ({"return_token_ids": False, "logprobs": None}, {"return_token_ids": True, "logprobs": 0}),
        ({"return_token_ids": True, "logprobs": 1}, {}),
        # Asking for them without logprobs is the client's error, and stays one.
        ({"logprob_token_ids": [1]}, {"return_token_ids": True}),
        # With return_token_ids a vLLM would leave the prompt out of the echo.
        ({"echo": True}, {}),
        ({"echo": True, "logprobs": 1}, {}),
    ],
)
def test_what_was_asked_for_is_not_asked_again(change: Json, added: Json) -> None:
    assert asked(ASK | change) == ASK | change | added


# ---------------------------------------------------------------- replies


@pytest.mark.parametrize(
    "change",
    [{}, {"logprobs": 0}, {"return_token_ids": True}, {"return_token_ids": True, "logprobs": 0}],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_sees_what_it_asked_for_and_we_see_all(change: Json, stream: bool) -> None:
    ask = ASK | {"n": 2} | change
    if stream:
        got = streamed(ADAPTER, orjson.dumps(ask), "vllm", written(VOICE, asked(ask), [HI, YO]))
        body, answer = got.client, got.reply
        assert body == written(VOICE, ask, [HI, YO])
    else:
        answer = answered(ask, [HI, YO])
        assert answer.body == plain(VOICE, ask, [HI, YO])
    first, second = answer.choices
    assert told(first) == ([1, 2, 3], [7, 8, 9], [-0.5, -0.25, -0.125], None)
    assert told(second) == ([1, 2, 3], [5, 6], [-1.0, -2.0], None)
    assert [json.loads(c.message_json) for c in answer.choices] == [
        {"text": "Hello"},
        {"text": "Yo"},
    ]
    assert [c.finish_reason for c in answer.choices] == ["stop", "length"]
    assert answer.model == "policy"


@pytest.mark.parametrize("kind", ["captured", "text"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_another_engine_says_passes_as_it_is(kind: EngineKind, stream: bool) -> None:
    ask = ASK | {"return_token_ids": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    if stream:
        data = written(VOICE, ask, [HI])
        got = streamed(ADAPTER, orjson.dumps(ask), kind, data)
        assert got.client == data
        (choice,) = got.reply.choices
    else:
        answer = answered(ask, [HI], kind)
        assert answer.body == plain(VOICE, ask, [HI])
        (choice,) = answer.choices
    assert choice.tokens is None  # they come beside the reply, or not at all


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_is_no_sampled_token(stream: bool) -> None:
    def choice_of(ask: Json) -> Choice:
        if stream:
            got = streamed(ADAPTER, orjson.dumps(ask), "vllm", written(VOICE, asked(ask), [HI]))
            assert got.client == written(VOICE, ask, [HI])
            return got.reply.choices[0]
        return answered(ask, [HI]).choices[0]

    echo = choice_of(ASK | {"echo": True})
    assert json.loads(echo.message_json) == {"text": "hiHello"}
    assert told(echo) == ([], [], [], ECHOED)
    assert told(choice_of(ASK | {"echo": True, "max_tokens": 0}))[3] == NOTHING_SAMPLED
    both = choice_of(ASK | {"echo": True, "return_token_ids": True, "logprobs": 1})
    assert told(both) == ([1, 2, 3], [7, 8, 9], [-0.5, -0.25, -0.125], None)


def test_a_vllm_that_tells_nothing_is_said_so() -> None:
    (choice,) = answered(ASK, [HI], no_tokens=True).choices
    assert told(choice)[3] is not None
    said = orjson.loads(plain(VOICE, asked(ASK), [HI]))
    said["choices"][0]["logprobs"] = None
    (choice,) = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "vllm", orjson.dumps(said)).choices
    assert told(choice) == ([1, 2, 3], [7, 8, 9], [], NO_LOGPROBS)
    said["choices"][0]["token_ids"] = None
    (choice,) = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "vllm", orjson.dumps(said)).choices
    assert told(choice) == ([1, 2, 3], [], [], NO_IDS)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"choices": 3}', b'{"choices": [{"index": 0, "text": 1}]}',
    b'{"choices": [{"index": "x", "text": ""}]}']
)  # fmt: skip
def test_what_is_no_completion_passes_unread(body: bytes) -> None:
    answer = ADAPTER.parse_reply(ADAPTER.parse_request(BODY), "vllm", body)
    assert (answer.body, answer.choices) == (body, ())
    assert (answer.unread or "").startswith("the reply is not a completion")


@given(
    st.lists(scripted_choices(tools=False), min_size=1, max_size=3),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(["captured", "vllm", "text"]),
    st.sampled_from([{}, {"logprobs": 0}, {"return_token_ids": True}]),
)
def test_streamed_equals_plain_however_it_is_cut(
    said: list[ScriptedChoice], cuts: list[int], kind: EngineKind, change: Json
) -> None:
    ask = ASK | {"n": len(said)} | change
    got = streamed(ADAPTER, orjson.dumps(ask), kind, written(VOICE, asked(ask, kind), said), cuts)
    assert (got.client, got.failure) == (written(VOICE, ask, said), None)
    whole = answered(ask, said, kind)
    assert got.reply.choices == whole.choices
    assert whole.body == plain(VOICE, ask, said)


def test_from_the_first_finish_on_it_waits() -> None:
    data = written(VOICE, ASK | {"n": 2}, [HI, YO])
    got = streamed(ADAPTER, orjson.dumps(ASK | {"n": 2}), "captured", data)
    first = orjson.loads(got.held.split(b"\n\n")[0].removeprefix(b"data: "))
    assert first["choices"][0]["finish_reason"] == "length" and data.endswith(got.held)


def test_tokens_told_once_count_once_whatever_waits_beside_them() -> None:
    """A real engine sends one comment with the tokens of all choices, then an event for each."""

    def comment(*choices: engine_frames.Choice) -> bytes:
        return engine_frames.comment(
            engine_frames.encode(engine_frames.Frame(0, pack_ids([1, 2, 3]), choices))
        )

    def told(which: int, at: int, say: ScriptedChoice) -> engine_frames.Choice:
        finish = say.finish_reason if at == len(say.ids) - 1 else None
        return engine_frames.Choice(
            which, pack_ids([say.ids[at]]), pack_logprobs([say.logprobs[at]]), finish
        )

    said = [ScriptedChoice([4], ["x"], [-4.0]), HI, YO]
    ask = ASK | {"n": 3}
    events = [e.data for e in VOICE.events(ask, Script(said))]
    first, second, third = events[:3], events[3:5], events[5:]
    captured = CapturedTokens()
    stream = EventStream(
        ADAPTER.accumulator(ADAPTER.parse_request(orjson.dumps(ask)), "captured"), captured
    )
    sent = stream.feed(comment(*(told(i, 0, s) for i, s in enumerate(said))) + b"".join(first))
    sent += stream.feed(comment(told(1, 1, HI), told(2, 1, YO)) + b"".join(second))
    sent += stream.feed(comment(told(1, 2, HI)) + b"".join(third))
    stream.close()
    assert len(stream.whole().choices) == 3
    assert sent + stream.held() == b"".join(events)
    assert [
        unpack_ids(captured.tokens(i, ADAPTER.parse_request(orjson.dumps(ask))).ids or b"")
        for i in range(3)
    ] == [
        [4],
        [7, 8, 9],
        [5, 6],
    ]


def test_an_engines_error_event_is_a_failure() -> None:
    data = written(VOICE, ASK, [HI]).split(b"\n\n")[0] + b"\n\n" + VOICE.failure()
    got = streamed(ADAPTER, BODY, "captured", data)
    assert (got.client, got.failure) == (data, "scripted")
    assert [c.finish_reason for c in got.reply.choices] == [None]


@pytest.mark.slow
@given(
    broken(VOICE, ASK | {"return_token_ids": True, "logprobs": 0}),
    st.sampled_from(["captured", "vllm", "text"]),
)
def test_no_event_can_break_the_accumulator(said: list[Any], kind: EngineKind) -> None:
    takes_or_refuses(ADAPTER, BODY, kind, said)


# -- through the gateway, with the official client


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_prompts_are_sibling_steps(run_scenario: RunScenario, stream: bool) -> None:
    async def scenario(w: GatewayFixture) -> None:
        ask: Any = {"model": "policy", "prompt": ["a", "b"], "n": 2}
        texts = ["", "", "", ""]
        async with AsyncOpenAI(
            base_url=w.url + "/t1/g1/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            if stream:
                async for chunk in await client.completions.create(**ask, stream=True):
                    texts[chunk.choices[0].index] += chunk.choices[0].text
            else:
                texts = [c.text for c in (await client.completions.create(**ask)).choices]
        assert texts == ["Hello", "Yo", "Yo", "Hello"]
        steps = w.steps()
        assert [(s.choice_index, s.protocol, s.status) for s in steps] == [
            (i, "openai.completions", "ok") for i in range(4)
        ]
        assert len({s.call_id for s in steps}) == 1
        for step, say in zip(steps, [HI, YO, YO, HI], strict=True):
            assert (json.loads(step.response_json), step.finish_reason) == (
                {"text": say.text},
                say.finish_reason,
            )
            if w.engine.kind == "text":
                assert step.response_token_ids is None and step.tokens_absent_reason is not None
                continue
            assert step.prompt_token_ids is not None and unpack_ids(step.prompt_token_ids) == [
                1,
                2,
                3,
            ]
            assert step.response_token_ids is not None and unpack_ids(
                step.response_token_ids
            ) == list(say.ids)
            assert step.response_logprobs is not None and unpack_logprobs(
                step.response_logprobs
            ) == list(say.logprobs)
            assert step.tokens_absent_reason is None

    run_scenario(scenario, Script([HI, YO, YO, HI]))


def test_an_engines_error_passes_as_it_is(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with AsyncOpenAI(
            base_url=w.url + "/t1/g1/v1", api_key="none", max_retries=0, timeout=600
        ) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.completions.create(model="policy", prompt="hi")
        assert caught.value.type == "BadRequestError" and w.steps() == []

    run_scenario(scenario, Script([HI], status=400))
