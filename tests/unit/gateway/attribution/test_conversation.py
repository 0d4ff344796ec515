"""Test reading the turns of a request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.attribution.conversation import first_user_turn, last_user_text, system_text

TEXT = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    "payload",
    [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": [TEXT]}]},
        {
            "messages": [
                {"role": "user", "content": [TEXT | {"cache_control": {"type": "ephemeral"}}]}
            ],
            "system": "x",
        },
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "b"},
            ]
        },
        {"input": "hi", "instructions": "x"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {
            "input": [
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "function_call", "name": "f"},
            ]
        },
        {"prompt": "hi"},
    ],
)  # fmt: skip
def test_one_conversation_begins_with_the_same_words_in_every_call(payload: dict[str, Any]) -> None:
    assert first_user_turn(payload) == b"hi"


def test_what_else_a_conversation_may_begin_with() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}

    def turn(*blocks: Any) -> bytes:
        return first_user_turn({"messages": [{"role": "user", "content": list(blocks)}]})

    assert turn(TEXT, image) == turn(TEXT | {"cache_control": {}}, image) != turn(TEXT)
    assert first_user_turn({"prompt": [1, 2]}) == b"[1,2]" != first_user_turn({"prompt": [[1, 2]]})
    assert first_user_turn({"messages": [{"role": "assistant", "content": "a"}]}) != b""
    nothing: list[dict[str, Any]] = [{}, {"messages": []}, {"messages": None}, {"prompt": None}]
    for empty in nothing:
        assert first_user_turn(empty) == b""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "user", "messages"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "input", "prompt", "system", "instructions"]), JSON
    )
)
def test_nothing_that_a_body_says_breaks_the_reading_of_its_turns(payload: dict[str, Any]) -> None:
    payload = orjson.loads(orjson.dumps(payload))
    assert isinstance(first_user_turn(payload), bytes)
    assert isinstance(system_text(payload) + last_user_text(payload, 10), str)
