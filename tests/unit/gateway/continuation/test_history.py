"""Comparison of conversations: forms that agents change are equal, changes of content are not."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.continuation.history import (
    FIRST_TURN,
    PREFILLED,
    STORED_HISTORY,
    SYSTEM_CHANGED,
    after_reply,
    history_of,
)

Json = dict[str, Any]
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(str.strip)
CALLED: Json = {
    "role": "assistant",
    "content": None,
    "reasoning": "which key?",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "f", "arguments": '{"b":30,"a":1}'},
        }
    ],
}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
USER: Json = {"role": "user", "content": "hi"}


def chained(reply: Json, *later: Json, **body: Any) -> tuple[bytes | None, bytes | None]:
    """Digest after a reply to USER, and digest that a later request continues."""
    before, after = history_of({"messages": [USER]}), history_of({"messages": [*later], **body})
    assert before is not None and after is not None
    return after_reply(before, orjson.dumps(reply)), after.continued


@pytest.mark.parametrize(
    "echo",
    [
        CALLED,
        {k: v for k, v in CALLED.items() if k != "reasoning"} | {"refusal": None},
        CALLED | {"content": ""},
        CALLED
        | {
            "tool_calls": [
                {"id": "call1", "function": {"name": "f", "arguments": '{"a": 1.0, "b": 30}'}}
            ]
        },
    ],
)
def test_a_reply_that_agents_echo_in_another_form_is_continued(echo: Json) -> None:
    told, continued = chained(CALLED, USER, echo, RESULT)
    assert told is not None and told == continued


@pytest.mark.parametrize(
    "edited",
    [
        [{"role": "user", "content": "hello"}, CALLED, RESULT],
        [USER, CALLED | {"content": "Let me see."}, RESULT],
        [USER, CALLED | {"tool_calls": CALLED["tool_calls"] * 2}, RESULT],
        [CALLED, RESULT],
    ],
)
def test_an_edited_history_is_not_continued(edited: list[Json]) -> None:
    told, continued = chained(CALLED, *edited)
    assert told != continued


def test_messages_and_their_strings_are_equal_to_blocks() -> None:
    blocks = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
    thinking = [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "yes "}]
    told, continued = chained(
        {"role": "assistant", "content": thinking},
        USER | {"content": blocks},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why?"},
    )
    assert told == continued


def test_items_of_responses_are_one_turn() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I"}],
    }
    before = history_of({"input": "hi", "model": "m"})
    after = history_of(
        {
            "model": "m",
            "input": [
                USER,
                said,
                call,
                {"type": "function_call_output", "call_id": "c1", "output": "3"},
            ],
        }
    )
    assert before is not None and after is not None and after.blocked is None
    reply = {
        "output": [{"type": "reasoning", "content": []}, said | {"id": "i", "status": "x"}, call]
    }
    assert after_reply(before, orjson.dumps(reply)) == after.continued
    assert before.context == after.context


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [USER]}, FIRST_TURN),
        ({"messages": []}, FIRST_TURN),
        ({"messages": [USER, CALLED]}, PREFILLED),
        ({"messages": [USER, CALLED, {"role": "system", "content": "x"}, USER]}, SYSTEM_CHANGED),
        ({"input": "x", "previous_response_id": "r"}, STORED_HISTORY),
        ({"input": [USER, {"type": "item_reference", "id": "i"}, USER]}, STORED_HISTORY),
        ({"messages": [USER, CALLED, RESULT]}, None),
    ],
)
def test_requests_that_cannot_continue_have_a_reason(body: Json, reason: str | None) -> None:
    history = history_of(body)
    assert history is not None and history.blocked == reason


@pytest.mark.parametrize(
    ("later", "change"),
    [
        ({}, None),
        ({"temperature": 0, "max_tokens": 7, "stream": True, "tool_choice": "none"}, None),
        ({"system": "x-anthropic-billing-header: 7\nbe brief"}, None),
        ({"model": "other"}, "model_changed"),
        ({"system": "be long"}, "system_changed"),
        ({"tools": []}, "tools_changed"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "template_changed"),
    ],
)
def test_what_must_stay_the_same(later: Json, change: str | None) -> None:
    first: Json = {"model": "m", "system": "be brief", "tools": [{"name": "f"}], "messages": [USER]}
    old, new = history_of(first), history_of(first | later)
    assert old is not None and new is not None
    assert old.context.change(new.context) == change


def test_a_body_nested_too_deeply_cannot_be_compared() -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    assert history_of({"messages": [USER | {"content": deep}]}) is None


@given(st.lists(WORDS, min_size=1, max_size=6, unique=True), st.data())
def test_every_turn_of_a_conversation_continues_the_one_before(
    words: list[str], data: st.DataObject
) -> None:
    messages: list[Json] = []
    told = None
    for word in words:
        messages.append({"role": "user", "content": word})
        history = history_of({"messages": messages})
        assert history is not None and history.continued == told
        said = data.draw(WORDS)
        told = after_reply(history, orjson.dumps({"role": "assistant", "content": said}))
        messages.append({"role": "assistant", "content": said})
