"""The model's turns, read from requests and replies of three protocols, give equal hashes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.conversation import RecordedRequest
from clawstream.stream_jobs.assemble.matching.conversation import reply_hashes, reply_of, turns_of

CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "ls", "arguments": '{"a": 1, "b": 2}'},
}
CODEX_CALL = {
    "type": "function_call",
    "id": "fc_9",
    "call_id": "call_1",
    "name": "ls",
    "arguments": '{"a":1}',
}


def linked(request: Any) -> int | None:
    turns = turns_of(RecordedRequest(orjson.dumps(request)))
    assert turns is not None
    return reply_hashes(turns, None).previous


def leads(request: Any, reply: Any) -> int | None:
    turn = reply_of(orjson.dumps(reply))
    assert turn is not None
    return reply_hashes(turns_of(RecordedRequest(orjson.dumps(request))), turn).reply_hash


USER = {"role": "user", "content": "u"}
PAIRS: dict[str, tuple[Any, Any, list[Any]]] = {
    "chat text": (
        {"content": "hi\n"}, "messages",
        [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}],
    ),
    "chat reasoning": (
        {"content": "hi", "reasoning_content": "hm"}, "messages",
        [{"role": "assistant", "content": "hi"}],
    ),
    "chat call": (
        {"content": "I look", "tool_calls": [CHAT_CALL]}, "messages",
        [{"role": "assistant", "content": None, "tool_calls": [
            {"id": "call1", "function": {"name": "ls", "arguments": '{"b":2,"a":1}'}}]}],
    ),
    "messages text": (
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]},
        "messages",
        [{"role": "assistant", "content": "hi"}],
    ),
    "messages calls": (
        {"content": [{"type": "tool_use", "id": "toolu_1", "name": "a", "input": {"x": 1}},
                     {"type": "tool_use", "id": "toolu_2", "name": "b", "input": {"x": 1}}]},
        "messages",
        [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "toolu_2", "name": "b", "input": {"x": 1},
             "cache_control": {}}]}],
    ),
    "responses text": (
        {"output": [{"type": "reasoning"}, {"type": "message", "role": "assistant",
                                            "content": [{"type": "output_text", "text": "hi"}]}]},
        "input",
        [{"role": "assistant", "content": "hi"}],
    ),
    "responses calls": (
        {"output": [{"type": "web_search_call", "id": "ws"}, {**CODEX_CALL, "call_id": "call_0"},
                    CODEX_CALL]},
        "input",
        [{**CODEX_CALL, "call_id": "call_0"}, {"type": "function_call_output", "call_id": "call_0"},
         {**CODEX_CALL, "id": None}],
    ),
    "responses custom": (
        {"output": [{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch",
                     "input": "*** Begin"}]},
        "input",
        [{"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin",
          "status": "completed"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_a_reply_and_the_request_that_goes_on_from_it_meet(name: str) -> None:
    reply, field, back = PAIRS[name]
    first, second = {field: [USER]}, {field: [USER, *back, {"role": "user", "content": "v"}]}
    assert leads(first, reply) == linked(second) is not None


def test_text_is_linked_with_all_that_was_said_before_and_a_call_by_itself() -> None:
    a, b, call = (
        [{"role": "assistant", "content": "a"}],
        [{"role": "assistant", "content": "b"}],
        [CODEX_CALL],
    )
    shown = [reply_hashes(turns, None).previous for turns in ([a, b], [b, b], [b], [call, a], [a])]
    assert len(set(shown)) == len(shown)
    assert reply_hashes([a], b) == (
        reply_hashes([a], None).previous,
        reply_hashes([a, b], None).previous,
    )
    by_call = [
        reply_hashes(turns, None).previous for turns in ([a, call], [b, call], [[*a, CODEX_CALL]])
    ]
    assert len(set(by_call)) == 1 and reply_hashes(None, call).reply_hash == by_call[0]
    assert (
        reply_hashes([], None) == reply_hashes(None, a) == reply_hashes(None, None) == (None, None)
    )


def test_turns_are_what_the_model_said_only() -> None:
    items = [
        {"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "tool", "content": "t"},
        {"role": "assistant", "content": ""}, USER,
    ]  # fmt: skip
    assert turns_of(RecordedRequest(orjson.dumps({"messages": items}))) == [
        [{"role": "assistant", "content": c} for c in "ab"]
    ]
    assert turns_of(RecordedRequest(b'{"input": "hello"}')) == []
    assert (
        turns_of(RecordedRequest(b'{"prompt": "hello"}')) is None
        and turns_of(RecordedRequest(b"\xff")) is None
        and turns_of(RecordedRequest(b"[]")) is None
    )
    assert reply_of(b"null") is None and reply_of(b'{"content": null}') is None
    assert reply_of(b'{"text": "x"}') == [{"content": "x", "role": "assistant"}]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "input",
                        "output",
                        "role",
                        "content",
                        "type",
                        "tool_calls",
                        "function_call",
                        "function",
                        "id",
                    ]
                ),
                inner
                | st.sampled_from(["assistant", "function_call", "tool_use", "text", "reasoning"]),
                max_size=6,
            )
        ),
        max_leaves=30,
    )
)
def test_no_shape_is_too_strange(value: Any) -> None:
    packed = orjson.dumps(value)
    turns, reply = turns_of(RecordedRequest(packed)), reply_of(packed)
    reply_hashes(turns, reply)


@pytest.mark.parametrize("depth", [250, 300, 1000])
@pytest.mark.parametrize(
    "message",
    [
        '{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":"DEEP"}}]}',
        '{"role":"assistant","tool_calls":[{"id":"c","function":{"name":DEEP,"arguments":"{}"}}]}',
        '{"role":"assistant","content":[{"type":"tool_use","id":"c","name":"f","input":DEEP}]}',
    ],
)
def test_arguments_of_any_depth_are_linked(message: str, depth: int) -> None:
    message = message.replace("DEEP", "[" * depth + "]" * depth)
    turns, reply = (
        turns_of(RecordedRequest(f'{{"messages":[{message}]}}'.encode())),
        reply_of(message.encode()),
    )
    assert (
        turns
        and reply_hashes(turns, None).previous == reply_hashes([], reply).reply_hash is not None
    )
