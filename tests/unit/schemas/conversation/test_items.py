"""Test the parser of replies.

It reads texts and tool calls of chat completions, completions, Messages and Responses.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.attribution import tags
from clawstream.schemas.conversation import (
    AUXILIARY_TAGS,
    Call,
    answer_in,
    calls_in,
    loaded,
    texts_in,
)


def test_every_tag_of_the_gateway_names_an_auxiliary_call() -> None:
    assert set(get_args(tags.Name)) == AUXILIARY_TAGS


@pytest.mark.parametrize(
    ("reply", "texts", "answer"),
    [
        ({"role": "assistant", "content": "42"}, ["42"], "42"),
        ({"text": "42", "finish_reason": "stop"}, ["42"], "42"),
        ({"content": None, "refusal": "no"}, ["no"], "no"),
        (
            {"content": [
                {"type": "thinking", "thinking": "41?"},
                {"type": "text", "text": "4"},
                {"type": "text", "text": "2"},
            ]},
            ["4", "2"], "42",
        ),
        (
            {"output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "41?"}]},
                {"type": "message", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "message", "content": [{"type": "output_text", "text": "42"}]},
            ]},
            ["I look.", "42"], "42",
        ),
        ({"content": ["4", 2, {"type": "image"}]}, ["4"], "4"),
        ({"content": ""}, [], None), ([], [], None), (None, [], None), ({"output": []}, [], None),
    ],
)  # fmt: skip
def test_texts(reply: Any, texts: list[str], answer: str | None) -> None:
    assert list(texts_in(reply)) == texts and answer_in(reply) == answer


@pytest.mark.parametrize(
    ("reply", "call"),
    [
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
            Call("c", "f", "{}", True),
        ),
        (
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
            Call("c", "f", {"a": 1}, True),
        ),
        (
            {"tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
            Call("c", "f", "x", False),
        ),
        ({"tool_calls": ["f"]}, Call(None, None, None, True)),
        (
            {"content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
            Call("c", "f", {}, True),
        ),
        ({"function_call": {"name": "f", "arguments": "{}"}}, Call(None, "f", "{}", True)),
        (
            {"output": [
                {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"}
            ]},
            Call("c", "f", "{}", True),
        ),
        (
            {"output": [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}]},
            Call("c", "f", "x", False),
        ),
        (
            {"output": [{"type": "local_shell_call", "id": "c", "action": {"command": ["ls"]}}]},
            Call("c", None, {"command": ["ls"]}, False),
        ),
        (
            {"output": [{"type": "apply_patch_call", "call_id": "c", "operation": {"diff": ""}}]},
            Call("c", None, {"diff": ""}, False),
        ),
    ],
)  # fmt: skip
def test_calls(reply: Any, call: Call) -> None:
    assert list(calls_in(reply)) == [call]


def test_half_a_character_is_json_and_not_a_number_is_none() -> None:
    assert loaded(b'{"content":"\\ud83d"}') == {"content": "\ud83d"}
    for bad in (b"{", b'{"content":NaN}', b"[" * 100_000, b"\xff"):
        with pytest.raises(ValueError, match=r"JSON|column"):
            loaded(bad)


_KEYS = [
    "content",
    "output",
    "type",
    "text",
    "refusal",
    "tool_calls",
    "function_call",
    "function",
    "arguments",
    "name",
    "id",
]
_VALUES = ["function_call", "tool_use", "text", "custom", "message"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(_VALUES),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4)
        ),
        max_leaves=15,
    )
)
def test_no_shape_is_too_strange(reply: Any) -> None:
    answer, calls = answer_in(reply), list(calls_in(reply))
    assert answer is None or answer.endswith(list(texts_in(reply))[-1])
    assert all(isinstance(call, Call) for call in calls)
