"""Recorded requests: their history in every protocol, and requests of any shape."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.app import ADAPTERS
from clawstream.schemas.conversation import (
    RecordedRequest,
    calls_of,
    image_url_of,
    is_said,
    reasoning_of,
    result_of,
    texts_in_content,
    texts_of,
)
from clawstream.schemas.conversation.protocols import PROTOCOLS

USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("fields", "history"),
    [
        ({"messages": [USER]}, [USER]),
        ({"input": [USER]}, [USER]),
        ({"input": "hello"}, [USER]),
        ({"messages": None, "input": "hello"}, [USER]),
        ({"prompt": "hello"}, None),
        ({"messages": 3}, None),
        ([USER], None),
    ],
)
def test_history(fields: Any, history: list[Any] | None) -> None:
    request = RecordedRequest(orjson.dumps(fields))
    assert request.history == history
    assert request.fields == (fields if isinstance(fields, dict) else None)
    assert request.fields is request.fields


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"a":NaN}', b"[" * 100_000])
def test_what_is_no_json_has_no_fields(body: bytes) -> None:
    request = RecordedRequest(body)
    assert request.fields is None and request.history is None


def test_every_adapter_of_the_gateway_has_a_protocol_that_reads_its_records() -> None:
    assert {adapter.name for adapter in ADAPTERS} == set(PROTOCOLS)


@pytest.mark.parametrize(
    ("item", "thoughts"),
    [
        ({"content": "hi", "reasoning_content": "hm"}, ["hm"]),
        ({"content": "hi", "reasoning": "hm"}, ["hm"]),
        (
            {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "redacted_thinking"}]},
            ["hm", "(encrypted)"],
        ),
        ({"type": "reasoning", "summary": [{"text": "hm"}], "encrypted_content": "x"}, ["hm"]),
        ({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}, ["hm"]),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, ["(encrypted)"]),
        ({"content": "hi"}, []),
    ],
)
def test_reasoning(item: Any, thoughts: list[str]) -> None:
    assert reasoning_of(item) == thoughts


@pytest.mark.parametrize(
    ("block", "url"),
    [
        ({"type": "image_url", "image_url": {"url": "data:x"}}, "data:x"),
        ({"type": "input_image", "image_url": "data:x"}, "data:x"),
        (
            {"type": "image", "source": {"media_type": "image/png", "data": "AA=="}},
            "data:image/png;base64,AA==",
        ),
        ({"type": "document", "source": {"media_type": "application/pdf", "data": "AA=="}}, None),
        ({"type": "image_url", "image_url": {"url": 3}}, None),
        ("data:x", None),
    ],
)
def test_images(block: Any, url: str | None) -> None:
    assert image_url_of(block) == url


KEYS = [
    "role",
    "type",
    "content",
    "text",
    "tool_calls",
    "function",
    "source",
    "image_url",
    "summary",
]
WORDS = ["assistant", "function_call", "reasoning", "tool_use", "tool_result", "thinking", "image"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), VALUES)
def test_no_shape_is_an_error(item: dict[str, Any], value: Any) -> None:
    assert all(isinstance(text, str) for text in (*texts_of(item), *reasoning_of(item)))
    assert all(isinstance(text, str) for text in texts_in_content(value))
    assert is_said(item) or not calls_of(item) or item["role"] is not None
    for block in (item, value):
        assert isinstance(image_url_of(block), str | None)
        assert result_of(block) is None or isinstance(block, dict)
