"""The texts of recorded requests and replies of each protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clawstream.search.texts import texts_of

CALL = {
    "id": "c1", "type": "function",
    "function": {"name": "find", "arguments": '{"place": {"city": "Köln\\nDom"}, "limit": 5}'},
}  # fmt: skip


def texts(request: Any, reply: Any) -> list[str]:
    return sorted(texts_of(json.dumps(request), json.dumps(reply)))


@pytest.mark.parametrize(
    ("request_body", "reply", "expected"),
    [
        (
            {
                "model": "policy", "temperature": 1.0, "stop": ["END"],
                "messages": [
                    {"role": "system", "content": "Be short."},
                    {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c1", "content": '[{"hit": "Dom", "n": 2}]'},
                ],
                "tools": [{"type": "function", "function": {
                    "name": "find", "description": "Finds places.",
                    "parameters": {"type": "object", "required": ["place"]},
                }}],
            },
            {"role": "assistant", "reasoning_content": "Think.", "content": "There."},
            {
                "Be short.", "Where?", "c1", "find", "place", "city", "Köln\nDom", "limit", "5",
                "hit", "Dom", "n", "2", "Finds places.", "Think.", "There.",
            },
        ),
        (
            {"system": "Rules", "messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "Done"}]}]},
            {"content": [{"type": "thinking", "thinking": "Hm"},
                         {"type": "tool_use", "id": "t2", "name": "run", "input": {"cmd": "ls"}}]},
            {"Rules", "t1", "Done", "Hm", "t2", "run", "cmd", "ls"},
        ),
        (
            {"instructions": "Rules", "input": "Hi"},
            {"output": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]},
                        {"type": "message", "content": [{"type": "output_text", "text": "Yo"}]}]},
            {"Rules", "Hi", "S", "Yo"},
        ),
        ({"prompt": ["a", "b"]}, {"text": "c"}, {"a", "b", "c"}),
    ],
    ids=["chat", "messages", "responses", "completions"],
)  # fmt: skip
def test_texts_are_what_was_said_without_the_syntax(
    request_body: Any, reply: Any, expected: set[str]
) -> None:
    assert set(texts(request_body, reply)) == expected


def test_images_in_base64_and_blobs_have_no_texts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2000}}
    blob = {"$blob": {"sha256": "ab", "size_bytes": 9, "url": "file:///ab"}}
    assert texts({"messages": [{"role": "user", "content": [image]}]}, blob) == []
    assert texts(blob, {"content": "字" * 2000}) == ["字" * 2000]


def test_a_body_that_is_no_json_is_one_text() -> None:
    assert list(texts_of("no {json", None)) == ["no {json"]
    assert list(texts_of(None, '{"content": "[1, broken"}')) == ["[1, broken"]


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting_is_no_error(depth: int) -> None:
    deep = "[" * depth + '"x"' + "]" * depth
    bodies = f'{{"messages": {deep}}}', json.dumps({"content": f"see {deep}"})
    assert [text.count("x") for text in texts_of(*bodies)] == [1, 1]
