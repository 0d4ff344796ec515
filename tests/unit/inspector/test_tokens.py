"""Colours and facts of tokens, and what a step adds to its conversation."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clawstream.inspector.queries.conversation import turns_of
from clawstream.inspector.queries.tokens import MODES, WINDOW, smoothed, tokens_of
from clawstream.schemas.conversation import chat_of

STEP: dict[str, Any] = {
    "response_token_ids": [7, 8, 9],
    "response_logprobs": [-0.01, -6.0, None],
    "versions": [
        {"version": "r/1.0", "start": 0, "end": 2},
        {"version": "r/2.0", "start": 2, "end": 3},
    ],
    "version_first": "r/1.0",
    "version_last": "r/2.0",
    "redacted_response": [{"start": 2, "end": 3}],
}


TRAINED: dict[str, Any] = {
    "logprobs": [-0.25, math.nan, math.nan], "advantages": [0.5, math.nan, math.nan]
}  # fmt: skip


def css(mode: str, reason: str | None = None, trained: dict[str, Any] | None = None) -> list[str]:
    return [t.css for t in tokens_of(STEP, mode, reason, lambda *_: None, trained=trained)]


def test_each_mode_has_its_colours() -> None:
    assert css("logprob") == ["q0", "q8", "none"]
    assert css("mask") == ["m1", "m1", "m0"]
    assert css("mask", "aborted") == ["m0", "m0", "m0"]
    assert css("version") == ["v0", "v0", "v1"]
    assert css("entropy") == ["q6", "q6", "none"]
    assert css("difference") == ["none"] * 3


def test_the_trainer_s_mask_and_log_probabilities_count_where_they_are_recorded() -> None:
    assert css("mask", None, TRAINED) == ["m1", "m0", "m0"]
    assert css("difference", None, TRAINED) == ["dp3", "none", "none"]
    first, second, third = tokens_of(STEP, "mask", None, lambda *_: None, trained=TRAINED)
    ratio = f"ratio {math.exp(-0.24):.4g} · advantage 0.5"
    assert f"trainer -0.2500, difference 0.24 · {ratio}" in first.title
    assert first.title.endswith("r/1.0 · mask 1")
    assert second.title.endswith("mask 0: the trainer left it out")
    assert third.title.endswith("mask 0: redacted")
    idle = {"logprobs": None, "advantages": [0.0, 0.0, math.nan]}
    assert css("difference", None, idle) == ["none"] * 3
    assert css("mask", None, idle) == ["m1", "m1", "m0"]


@given(st.floats(-30, 0), st.floats(-30, 0) | st.just(-math.inf))
def test_the_colour_of_a_difference_tells_its_sign_and_size(p: float, q: float) -> None:
    step = STEP | {"response_logprobs": [p, -1.0, None]}
    trained = TRAINED | {"logprobs": [q, math.nan, math.nan]}
    found = tokens_of(step, "difference", None, lambda *_: None, trained=trained)[0].css
    size = abs(p - q)
    if size < 0.01:
        assert found == "d0"
    else:
        assert found[:2] == ("dp" if p > q else "dn")
        assert int(found[2]) == sum(size >= bound for bound in (0.01, 0.05, 0.2, 1.0))


def test_a_page_begins_where_it_is_asked_to() -> None:
    for mode in MODES:
        (last,) = tokens_of(STEP, mode, None, lambda _, ids: ["é"] * len(ids), first=2)
        assert (last.position, last.text) == (2, "é")
        assert "redacted" in last.title


@given(st.lists(st.none() | st.floats(-20, 0), max_size=40))
def test_the_estimate_of_entropy_lies_between_its_samples(logprobs: list[float | None]) -> None:
    found = smoothed(logprobs)
    assert [f is None for f in found] == [p is None for p in logprobs]
    for i, value in enumerate(found):
        near = logprobs[max(0, i - WINDOW // 2) : i + WINDOW // 2 + 1]
        samples = [-p for p in near if p is not None]
        assert value is None or min(samples) - 1e-9 <= value <= max(samples) + 1e-9


def body(*messages: dict[str, Any]) -> str:
    return json.dumps({"messages": messages})


def test_a_step_adds_what_its_parent_lacks() -> None:
    user = {"role": "user", "content": "2 + 3?"}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "5"}
    answer = {"role": "assistant", "content": "5"}
    steps = [
        {"index": 0, "parent": None, "protocol": "openai.chat", "request_json": body(user),
         "response_json": json.dumps(asked)},
        {"index": 1, "parent": 0, "protocol": "openai.chat",
         "request_json": body(user, asked, result), "response_json": json.dumps(answer)},
    ]  # fmt: skip
    (first, second), _ = turns_of(steps, chat_of)
    assert [p.role for p in first.added] == ["user"] and first.reply is not None
    assert second.repeated == 2
    (told,) = second.added
    assert told.answers == first.reply.calls[0] and told.answers.name == "add"


def test_a_step_that_is_no_chat_shows_its_bodies() -> None:
    step = {"index": 0, "parent": None, "protocol": "x", "request_json": "]", "response_json": ""}
    ((turn,), tools) = turns_of([step], chat_of)
    assert turn.raw == ("]", "") and turn.reply is None and tools == []
