"""Adapter of chat completions, stream relay, and the steps built from them."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import broken, takes_or_refuses
from support.scripted.chat import ChatServer, plain
from support.scripted.engine import frames_of, whole_frames
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.attribution.resolver import TrajectoryRef
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.capture.steps import Call, steps_of
from clawstream.gateway.capture.stream import EventStream
from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.base import Choice, EngineKind, ParsedReply, Request
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.token_fields import packed_tokens
from clawstream.schemas import engine_frames
from clawstream.schemas.tokens import pack_ids, pack_logprobs, unpack_ids

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hé"}]}
ADDED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
FUNCTION = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = OpenAIChat()


def a_request(**more: Any) -> Request:
    return CHAT.parse_request(orjson.dumps(ASK | more))


def a_stream(kind: EngineKind = "captured", **more: Any) -> EventStream:
    return EventStream(CHAT.accumulator(a_request(stream=True, **more), kind), CapturedTokens())


# ---------------------------------------------------------------- requests


def test_the_clients_own_bytes_stay_as_they_are() -> None:
    body = b'{ "messages": [],  "seed": 123456789012345678901234567890, "top_p": 1.0e0 }\n'
    request = CHAT.parse_request(body)
    assert (
        CHAT.engine_body(request, "captured") is body and CHAT.engine_body(request, "text") is body
    )
    sent = CHAT.engine_body(request, "vllm")
    assert sent.startswith(body.rstrip()[:-1])
    assert json.loads(sent) == json.loads(body) | ADDED


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({}, ADDED),
        ({"logprobs": True}, {"return_token_ids": True}),
        ({"logprobs": True, "top_logprobs": 3, "return_token_ids": True}, {}),
        ({"logprobs": False, "return_token_ids": False}, ADDED),
        ({"logprobs": None, "top_logprobs": None}, ADDED),
        (
            {"top_logprobs": 3},
            {"return_token_ids": True},
        ),  # an error of the client's, which the engine shall tell
        ({"logprob_token_ids": [1]}, {"return_token_ids": True}),
    ],
)
def test_a_plain_vllm_is_asked_for_tokens_unless_the_client_does(
    said: dict[str, Any], added: dict[str, Any]
) -> None:
    assert json.loads(CHAT.engine_body(a_request(**said), "vllm")) == ASK | said | added


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"), (b"[]", "body"), (b"{}", "messages"), (b'{"messages":null}', "messages"),
        (b'{"messages":[1]}', "messages"), (b'{"messages":[],"n":0}', "n"),
        (b'{"messages":[],"n":true}', "n"),
        (b'{"messages":[],"n":129}', "n"), (b'{"messages":[],"stream":1}', "stream"),
        (b'{"messages":[],"model":7}', "model"),
    ],
)  # fmt: skip
def test_bad_requests_name_the_field(body: bytes, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        CHAT.parse_request(body)
    assert caught.value.param == field


# ---------------------------------------------------------------- streams


says = st.lists(
    st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.none(), st.text(max_size=3))),
        min_size=1,
        max_size=5,
    ).map(
        lambda tokens: ScriptedChoice(
            [i for i, _ in tokens], [t for _, t in tokens], [-float(i) for i, _ in tokens]
        )
    ),
    min_size=1,
    max_size=3,
)


def written(body: dict[str, Any], script: Script) -> bytes:
    return b"".join(event.data for event in ChatServer().events(body, script))


def in_pieces(data: st.DataObject, stream: EventStream, incoming: bytes) -> bytes:
    out, at = b"", 0
    while at < len(incoming):
        size = data.draw(st.integers(1, 400))
        out += stream.feed(incoming[at : at + size])
        at += size
    return out


@pytest.mark.slow
@given(says, st.booleans(), st.booleans(), st.data())
def test_a_vllm_stream_tells_the_client_what_it_asked_for_and_us_everything(
    script: list[ScriptedChoice], logprobs: bool, ids: bool, data: st.DataObject
) -> None:
    more = {"n": len(script), "logprobs": logprobs, "return_token_ids": ids}
    request = a_request(stream=True, **more)
    incoming = written(json.loads(CHAT.engine_body(request, "vllm")), Script(script))
    stream = a_stream("vllm", **more)
    out = in_pieces(data, stream, incoming)
    assert stream.ended and stream.failure is None
    assert out.count(b'"finish_reason":"') < len(script) and b"[DONE]" not in out
    sent = sum(len(c.tokens.ids or b"") // 4 for c in stream.sent().choices if c.tokens)
    assert sent < sum(len(say.ids) for say in script)
    answer = stream.whole()
    assert out + stream.held() == written(ASK | {"stream": True} | more, Script(script))
    for choice, say in zip(answer.choices, script, strict=True):
        assert choice.tokens == packed_tokens([1, 2, 3], say.ids, say.logprobs)
        assert json.loads(choice.message_json) == {"role": "assistant", "content": say.text}


@pytest.mark.slow
@given(says, st.booleans(), st.data())
def test_a_captured_stream_goes_through_and_tells_us_everything(
    script: list[ScriptedChoice], logprobs: bool, data: st.DataObject
) -> None:
    more = {"n": len(script), "logprobs": logprobs}
    ask, incoming, own = ASK | {"stream": True} | more, b"", b""
    for at, event in enumerate(ChatServer().events(ask, Script(script))):
        frames = frames_of(Script(script), event, 1, at == 0)
        incoming += (
            engine_frames.comment(b"".join(map(engine_frames.encode, frames))) if frames else b""
        )
        incoming += event.data
        own += event.data
    captured = CapturedTokens()
    stream = EventStream(CHAT.accumulator(a_request(stream=True, **more), "captured"), captured)
    out = in_pieces(data, stream, incoming)
    assert stream.ended and stream.failure is None
    assert out.count(b'"finish_reason":"') < len(script) and b"[DONE]" not in out
    for i in range(len(stream.sent().choices)):
        told = captured.tokens(i, a_request(**more))
        last = len(script) == 1  # its last token is held
        assert len(told.ids or b"") <= 4 * (len(script[i].ids) - last)
    answer = stream.whole()
    assert out + stream.held() == own
    for choice, say in zip(answer.choices, script, strict=True):
        told = captured.tokens(choice.index, a_request(**more))
        assert (told.prompt_ids, told.ids, told.logprobs) == (
            pack_ids([1, 2, 3]), pack_ids(say.ids), pack_logprobs(say.logprobs)
        )  # fmt: skip
        assert captured.finish(choice.index, a_request(**more)) == say.finish_reason


@pytest.mark.parametrize(
    "event", [b"{", b"[]", b"1", b'{"choices":[{"index":"x","delta":{}}]}', b'{"choices":[7]}']
)
def test_what_is_no_chunk_passes_and_is_kept(event: bytes) -> None:
    stream, good = a_stream(), b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    wrong = b"data: " + event + b"\n\n"
    assert stream.feed(good + wrong + good) == good + wrong + good
    assert stream.failure is None and stream.unread
    assert orjson.loads(stream.sent().choices[0].message_json)["content"] == "xx"
    (kept,) = orjson.loads(stream.unread.beside(b"null"))["unread"]
    assert kept["bytes"].encode() == wrong


def test_a_stream_that_ends_too_early_is_a_failure() -> None:
    stream = a_stream()
    stream.feed(b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n')
    stream.close()
    assert stream.failure is not None and "1 choices had not ended" in stream.failure.message


def test_a_broken_account_of_tokens_costs_the_tokens_not_the_reply() -> None:
    captured = CapturedTokens()
    stream = EventStream(CHAT.accumulator(a_request(stream=True), "captured"), captured)
    out = stream.feed(
        b': clawstream eHg=\n\ndata: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    )
    assert b'"x"' in out and stream.failure is None
    assert (captured.tokens(0, a_request()).absent or "").startswith(
        "the engine's token frames are invalid"
    )


@pytest.mark.slow
@given(broken(ChatServer(), ASK | {"stream": True}), st.sampled_from(["captured", "vllm", "text"]))
def test_no_event_breaks_the_accumulator(events: list[Any], kind: EngineKind) -> None:
    takes_or_refuses(CHAT, orjson.dumps(ASK | {"stream": True}), kind, events)


# ---------------------------------------------------------------- replies and steps


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"{}", b'{"choices":3}', b'{"choices":[{}]}', b'{"choices":[1]}']
)
def test_what_is_no_reply_passes_unread(body: bytes) -> None:
    answer = CHAT.parse_reply(a_request(), "captured", body)
    assert (answer.body, answer.choices) == (body, ())
    assert (answer.unread or "").startswith("the reply is not a chat completion")


@pytest.mark.parametrize(
    "say", [HI, ScriptedChoice([1, 2], ["a", "b"], [-1.0, -2.0], tool_calls=[FUNCTION])]
)
def test_kinds_of_engines_give_the_same_message_and_tokens(say: ScriptedChoice) -> None:
    request, script = a_request(), Script([say])
    told = CHAT.parse_reply(
        request, "vllm", orjson.dumps(plain(json.loads(CHAT.engine_body(request, "vllm")), script))
    )
    own = orjson.dumps(plain(ASK, script))
    captured = CapturedTokens()
    body = captured.split_trailer(
        engine_frames.trail(own, map(engine_frames.encode, whole_frames(script, 1))), str(len(own))
    )
    answer = CHAT.parse_reply(request, "captured", body)
    assert answer.body == own and orjson.loads(told.body) == plain(ASK, script)
    assert answer.choices[0].message_json == told.choices[0].message_json
    assert (
        captured.tokens(0, a_request())
        == told.choices[0].tokens
        == packed_tokens([1, 2, 3], say.ids, say.logprobs)
    )


def a_call(captured: CapturedTokens) -> Call:
    call = Call("openai.chat", {}, 1)
    call.trajectory, call.call_id = TrajectoryRef("r", "t", "g", None), "t~1"
    call.request, call.body, call.gateway_id = a_request(), b"{}", "gw"
    call.captured, call.worker_id, call.version_first = captured, "w", "r/1.0"
    return call


def one_step(captured: CapturedTokens, choice: Choice) -> Any:
    (step,) = steps_of(a_call(captured), ParsedReply((choice,), "m", b""), "ok", 2)
    return step


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"ids": None}, "the engine reported no token ids"),
        ({"logprobs": None}, "the engine reported no log-probabilities"),
        ({"logprobs": [-1.0]}, "1 log-probabilities for 2 token ids"),
        ({"prompt_ids": None}, "the engine reported no prompt token ids"),
        ({"ids": [2**40, 1]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"ids": ["a", 1]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"logprobs": [None, -1.0]}, "the engine's token ids or log-probabilities are not numbers"),
        ({"prompt_ids": [1.5]}, "the engine's prompt token ids are not 32-bit integers"),
    ],
)
def test_step_without_tokens_says_why(said: dict[str, Any], reason: str) -> None:
    tokens = packed_tokens(**{"prompt_ids": [1], "ids": [5, 6], "logprobs": [-1.0, -2.0]} | said)
    step = one_step(CapturedTokens(), Choice(0, b"{}", "stop", tokens))
    assert step.tokens_absent_reason.startswith(reason)
    assert step.response_logprobs is None or said.keys() == {"prompt_ids"}


def test_no_tokens_at_all_are_tokens_too() -> None:
    step = one_step(CapturedTokens(), Choice(0, b"{}", "stop", packed_tokens([1], [], [])))
    assert (step.response_token_ids, step.response_logprobs, step.tokens_absent_reason) == (
        b"",
        b"",
        None,
    )
    assert unpack_ids(step.prompt_token_ids) == [1]


def told(spans: Any, finish: str = "stop") -> CapturedTokens:
    captured = CapturedTokens()
    choice = engine_frames.Choice(0, pack_ids([5, 6]), pack_logprobs([-1.0, -2.0]), finish, spans)
    captured.add([engine_frames.Frame(0, pack_ids([1]), (choice,))])
    return captured


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [("r/1.0", 0, 1)],
        [("r/1.0", 1, 2)],
        [("r/1.0", 0, 3)],
        [("r/1.0", 0, 1), ("r/1.0", 0, 2)],
    ],
)
def test_spans_that_do_not_cover_the_tokens_are_not_recorded(spans: Any) -> None:
    step = one_step(told(spans), Choice(0, b"{}", "stop"))
    assert step.versions == () and step.version_first == "r/1.0" and step.version_last is None
    assert step.tokens_absent_reason is None


def test_what_the_engine_broke_off_is_an_error_whatever_the_protocol_says() -> None:
    step = one_step(told([("r/1.0", 0, 2)], "abort"), Choice(0, b"{}", "stop"))
    assert (step.status, step.finish_reason) == ("error", "abort")


def test_prompts_of_a_batch_share_the_choices_evenly() -> None:
    captured = CapturedTokens()
    for g in (0, 1):
        choices = tuple(
            engine_frames.Choice(i, pack_ids([10 * g + i]), pack_logprobs([-1.0]), "stop")
            for i in (0, 1)
        )
        captured.add([engine_frames.Frame(g, pack_ids([g]), choices)])
    request = a_request()._replace(n=6, prompts=3)  # of the third prompt nothing came yet
    assert [unpack_ids(captured.tokens(i, request).ids or b"") for i in range(6)] == [
        [0],
        [1],
        [10],
        [11],
        [],
        [],
    ]
    assert [unpack_ids(captured.tokens(i, request).prompt_ids or b"") for i in range(4)] == [
        [0],
        [0],
        [1],
        [1],
    ]
    assert (captured.tokens(0, a_request()).absent or "").startswith("2 generations for 1 prompts")


def grown_of(*deltas: Any) -> Any:
    """The message of a stream of these deltas."""
    said = b"".join(
        b"data: " + orjson.dumps({"choices": [{"index": 0, "delta": d}]}) + b"\n\n" for d in deltas
    )
    stream = a_stream()
    assert stream.feed(said) == said and not stream.unread
    return orjson.loads(stream.sent().choices[0].message_json)


def a_part(name: str | None, arguments: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": name, "arguments": arguments}, **more}]}


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        (
            [
                a_part("f", "{", id="a"),
                a_part("g", "[", id="b"),
                a_part(None, "}", id="a"),
                a_part(None, "]", id="b"),
            ],
            ["{}", "[]"],
        ),
        ([a_part("f", "{", id="a"), a_part(None, "}")], ["{}"]),
        ([a_part("f", "1"), a_part("g", "2"), a_part("", "3", id="")], ["1", "23"]),
        (
            [a_part("f", "1", index=4), a_part("g", "2", id="b"), a_part(None, "3", index=4)],
            ["13", "2"],
        ),
        ([a_part("f", "1", index=0, id="a"), a_part(None, "2", index=0, id="a")], ["12"]),
    ],
)
def test_parts_of_calls_find_their_call(deltas: list[Any], calls: list[str]) -> None:
    found = grown_of(*deltas)["tool_calls"]
    assert [call["function"]["arguments"] for call in found] == calls
    assert [call["function"]["name"] for call in found] == ["f", "g"][: len(calls)]


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        (["a", None, "b"], "ab"),
        (["", [{"type": "text", "text": "a"}], "b"], [{"type": "text", "text": "ab"}]),
        (["a", [{"type": "image"}], [{"type": "image"}]],
        [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]),
        ([[{"index": 1, "a": "x"}, {"index": 1, "a": "y"}],
        [{"index": 0, "a": "z"}, {"index": 1, "b": 1}]],
         [{"index": 1, "a": "xy", "b": 1}, {"index": 0, "a": "z"}]),
        ([{"a": 1, "b": None}, {"a": 2, "b": {"c": "x"}}, {"b": {"c": "y"}}],
        {"a": 3, "b": {"c": "xy"}}),
        ([["a"], ["b"]], ["a", "b"]),
        ([True, False], False),
        ([1, "a"], 1),
    ],
)  # fmt: skip
def test_a_field_grows_by_the_rules_of_the_client(pieces: list[Any], whole: Any) -> None:
    assert grown_of(*({"field": piece} for piece in pieces))["field"] == whole
