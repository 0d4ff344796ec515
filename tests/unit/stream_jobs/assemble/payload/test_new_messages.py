"""What a request adds to its conversation, as its step records it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.assemble import LIMITS, InMemoryPartition, chat_step, session

from clawstream.schemas.conversation import RecordedRequest, loaded
from clawstream.stream_jobs.assemble.payload.new_messages import new_messages
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

KEPT = 1000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda value: st.lists(value) | st.dictionaries(st.text(), value),
    max_leaves=10,
)


def user(said: str) -> dict[str, Any]:
    return {"role": "user", "content": said}


def assistant(said: str) -> dict[str, Any]:
    return {"role": "assistant", "content": said}


def added(items: list[Any], name: str = "messages", limit: int = KEPT) -> Any:
    found = new_messages(RecordedRequest(orjson.dumps({name: items})), limit)
    return None if found is None else loaded(found)


SYSTEM = {"role": "system", "content": "Be kind."}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
USE = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "4"}


@pytest.mark.parametrize(
    ("name", "items", "expected"),
    [
        ("messages", [SYSTEM, user("Hi")], [SYSTEM, user("Hi")]),
        ("messages", [user("Hi"), assistant("Yes?"), user("2+2")], [user("2+2")]),
        (
            "messages",
            [user("2+2"), {"role": "assistant", "content": [USE]}, user([RESULT])],  # type: ignore[arg-type]
            [user([RESULT])],  # type: ignore[arg-type]
        ),
        ("messages", [user("Hi"), assistant("Ye")], [user("Hi")]),
        ("input", [user("2+2"), {"type": "reasoning"}, CALL, OUTPUT], [OUTPUT]),
        ("input", [user("2+2"), {"type": "item_reference", "id": "i"}, OUTPUT], [OUTPUT]),
        ("input", [user("2+2"), {"type": "mcp_approval_request", "id": "i"}, OUTPUT], [OUTPUT]),
        ("input", [user("2+2"), {"type": "mcp_list_tools", "tools": []}], [user("2+2")]),
        ("input", "Hi", [user("Hi")]),
        ("messages", [], []),
        ("prompt", "Hi", None),
    ],
)
def test_messages_after_the_last_model_turn(name: str, items: Any, expected: Any) -> None:
    assert added(items, name) == expected


def test_without_a_limit_nothing_is_read() -> None:
    assert new_messages(RecordedRequest(b"no JSON"), KEPT) is None
    assert added([user("Hi")], limit=0) is None


def test_a_long_string_loses_its_middle() -> None:
    (message,) = added([user("a" * 5000 + "b" * 5000)])
    said = message["content"]
    assert said.startswith("aaa") and said.endswith("bbb") and "characters ...]" in said


@pytest.mark.slow
@given(st.lists(JSON, max_size=5), st.integers(1, 2000))
def test_the_limit_is_kept(items: list[Any], limit: int) -> None:
    found = new_messages(RecordedRequest(json.dumps({"messages": items}).encode()), limit)
    assert found is None or (len(found) <= limit and isinstance(loaded(found), list))


def test_what_json_may_be_never_fails() -> None:
    deep = b'{"messages":[' + b"[" * 900 + b"]" * 900 + b"]}"
    assert new_messages(RecordedRequest(deep), KEPT) in (None, deep[12:-1])
    half = b'{"messages":[{"role":"user","content":"\\ud800' + b"x" * 3000 + b'"}]}'
    lone = new_messages(RecordedRequest(half), KEPT)
    assert lone is not None and "\ud800" in loaded(lone)[0]["content"]


def test_a_step_of_a_closed_trajectory_has_them_after_a_crash_too() -> None:
    first = chat_step(0, [user("Hi")], {"content": "Yes?"}, key="k")
    second = chat_step(1, [user("Hi"), assistant("Yes?"), user("Bye")], {"content": "Bye"}, key="k")
    for limit, expected in ((KEPT, [[user("Hi")], [user("Bye")]]), (0, [None, None])):
        worker = InMemoryPartition(replace(LIMITS, new_messages_bytes=limit))
        worker.feed((STEPS, 1, first))
        worker.crash()
        worker.feed((STEPS, 2, second), (STEPS, 3, session("k", "completed")))
        steps = worker.trajectories["k"].steps
        found = [s.new_messages_json and loaded(s.new_messages_json) for s in steps]
        assert found == expected and steps[1].parent == 0
