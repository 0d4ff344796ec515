"""Recorded requests and replies of each protocol as chat messages."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.schemas.conversation import chat_of

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = (
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "wait", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "7"},
    {"role": "assistant", "content": "seven"},
)
SCHEMA = {"type": "object", "properties": {}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": SCHEMA},
}


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_chat_completions_stay_as_they_are() -> None:
    request = {"messages": MESSAGES[:-1], "tools": [TOOL], "temperature": 1}
    chat = chat_of("openai.chat", packed(request), packed({"content": "seven"}))
    assert chat is not None and (chat.messages, chat.tools) == (MESSAGES, (TOOL,))


def test_messages_of_anthropic() -> None:
    request = {
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "wait"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "7"}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    }
    reply = {"role": "assistant", "content": [{"type": "text", "text": "seven"}]}
    chat = chat_of("anthropic.messages", packed(request), packed(reply))
    assert chat is not None and (chat.messages, chat.tools) == (MESSAGES, (TOOL,))


def test_responses_of_openai() -> None:
    request = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "wait"}],
            },
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ],
        "tools": [{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA}],
    }
    output = [
        {"type": "message", "role": "assistant", "content": [
            {"type": "output_text", "text": "seven"}
        ]}
    ]  # fmt: skip
    chat = chat_of("openai.responses", packed(request), packed({"output": output}))
    assert chat is not None and (chat.messages, chat.tools) == (MESSAGES, (TOOL,))


def test_completions_are_one_turn() -> None:
    chat = chat_of("openai.completions", packed({"prompt": "1 +"}), packed({"text": " 1"}))
    assert chat is not None and chat.messages == (
        {"role": "user", "content": "1 +"},
        {"role": "assistant", "content": " 1"},
    )


def test_images_stay_among_the_parts() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image", "source": {}}]
    request = {"messages": [{"role": "user", "content": parts}]}
    chat = chat_of("anthropic.messages", packed(request), packed({"content": "a cat"}))
    assert chat is not None and chat.messages[0] == {"role": "user", "content": parts}


@pytest.mark.parametrize("request_json", [b"", b"[]", b"{}", b'{"messages": 3}'])
def test_what_is_no_chat_is_none(request_json: bytes) -> None:
    assert chat_of("openai.chat", request_json, b'{"content": "x"}') is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "messages", "input", "tool_calls"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.slow
@given(st.sampled_from(["openai.chat", "anthropic.messages", "openai.responses"]), JSON, JSON)
def test_no_shape_is_an_error(protocol: str, request: Any, reply: Any) -> None:
    chat = chat_of(protocol, packed(request), packed(reply))
    assert chat is None or chat.messages[-1]["role"] == "assistant"
