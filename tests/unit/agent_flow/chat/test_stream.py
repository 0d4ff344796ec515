"""Streamed replies as messages: chunks in, a message out."""

from __future__ import annotations

from typing import Any

from clawstream.agent_flow.chat.stream import StreamedMessage


def joined(*deltas: dict[str, Any]) -> dict[str, Any]:
    whole = StreamedMessage()
    for delta in deltas:
        whole.add({"index": 0, "delta": delta, "finish_reason": None})
    return whole.message


def test_texts_are_appended_and_empty_fields_left_out() -> None:
    assert joined(
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "2 and "},
        {"reasoning_content": "2"},
        {"content": "It is "},
        {"content": "4"},
        {},
    ) == {"role": "assistant", "content": "It is 4", "reasoning_content": "2 and 2"}


def test_calls_are_joined_by_index_in_their_order() -> None:
    def part(index: int, arguments: str, **first: Any) -> dict[str, Any]:
        name = first.pop("name", None)
        function = {"arguments": arguments, **({"name": name} if name else {})}
        return {"tool_calls": [{"index": index, **first, "function": function}]}

    assert joined(
        {"role": "assistant", "content": ""},
        part(1, "{", id="b", type="function", name="add"),
        part(0, '{"a"', id="a", type="function", name="look"),
        part(1, "}"),
        part(0, ": 1}", id="a", type="function"),
    ) == {
        "role": "assistant",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{}"}},
        ],
    }


def test_lists_are_extended_and_the_finish_reason_stays() -> None:
    whole = StreamedMessage()
    whole.add({"delta": {"reasoning_details": [{"text": "a"}]}, "finish_reason": "length"})
    whole.add({"delta": {"reasoning_details": [{"text": "b"}]}, "finish_reason": None})
    assert whole.message["reasoning_details"] == [{"text": "a"}, {"text": "b"}]
    assert whole.finish_reason == "length"
