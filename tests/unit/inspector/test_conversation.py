"""Conversations of records that the gateway would not write."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from clawstream.inspector.queries.conversation import TEXT_CHARACTERS, TURN_CHARACTERS, turns_of
from clawstream.inspector.web.rendering import text_of
from clawstream.schemas.conversation import chat_of


def step(index: int, messages: str, reply: str = '{"content": "ok"}', **more: Any) -> Any:
    return {
        "index": index, "parent": index - 1 if index else None, "protocol": "openai.chat",
        "request_json": f'{{"messages": {messages}}}', "response_json": reply, **more,
    }  # fmt: skip


def test_json_that_is_nested_too_deeply_is_shown_as_text() -> None:
    deep = "[" * 1000 + "]" * 1000
    nested = f'[{{"role": "user", "content": {deep}}}]'
    turns, _ = turns_of([step(0, nested), step(1, '[{"role": "user", "content": "a"}]')], chat_of)
    assert turns[0].raw is not None
    assert turns[1].reply is not None and turns[1].reply.text == "ok"


PNG = "data:image/png;base64,iVBORw0KGgo="


def test_images_in_a_request_are_shown_and_those_of_other_hosts_are_text() -> None:
    blocks: list[Any] = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "input_image", "image_url": PNG},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                     "data": PNG.partition(",")[2]}},
        {"type": "image_url", "image_url": {"url": "https://evil.example/x.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}},
    ]  # fmt: skip
    asked = [{"role": "user", "content": blocks}]
    other = [{"role": "user", "content": blocks[:2]}, {"role": "user", "content": "and?"}]
    turns, _ = turns_of([step(0, json.dumps(asked)), step(1, json.dumps(other))], chat_of)
    (part,) = turns[0].added
    assert part.images == (PNG, PNG, PNG)
    assert part.text.startswith("look\n{") and "evil.example" in part.text and "svg" in part.text
    assert turns[1].repeated == 0, "fewer images are another message"


def test_a_lone_surrogate_becomes_a_question_mark() -> None:
    reply = json.dumps({"content": "\ud83d"})
    turns, _ = turns_of([step(0, '[{"role": "user", "content": "a"}]', reply)], chat_of)
    assert turns[0].reply is not None and turns[0].reply.text
    rows = [
        {"run_id": "r", "trajectory_id": "t", "outcome": "failed", "said": "\ud83d", "steps": 1}
        | {"reward": None, "at": None}
    ]
    assert '<bdi class="said">?</bdi>' in text_of("live.html", rows=rows, source="lake")


READ = partial(chat_of, is_whole=True)
THOUGHT = "There are three."
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("openai.chat", {"content": "3", "reasoning_content": THOUGHT}),
        ("openai.chat", {"content": "3", "reasoning": THOUGHT, "reasoning_content": None}),
        ("anthropic.messages",
         {"content": [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": "3"}]}),
        ("openai.responses", {"output": [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": THOUGHT}]},
            {"type": "message", "content": [{"type": "output_text", "text": "3"}]}]}),
        ("openai.responses", {"output": [
            {"type": "reasoning", "summary": [],
             "content": [{"type": "reasoning_text", "text": THOUGHT}]},
            {"type": "message", "content": [{"type": "output_text", "text": "3"}]}]}),
    ],
)  # fmt: skip
def test_reasoning_is_shown_and_a_request_that_omits_it_continues(
    protocol: str, reply: dict[str, Any]
) -> None:
    asked = {"role": "user", "content": "How many r?"}
    said = {"role": "assistant", "content": "3"}
    field = "input" if protocol == "openai.responses" else "messages"
    steps = [
        step(0, "", json.dumps(reply), protocol=protocol) | {"request_json": json.dumps(request)}
        for request in ({field: [asked]}, {field: [asked, said, asked]})
    ]
    steps[1]["index"] = 1
    (first, second), _ = turns_of(steps, READ)
    assert first.reply is not None and (first.reply.text, first.reply.reasoning) == ("3", THOUGHT)
    assert (second.repeated, second.like, second.continues) == (2, 0, True)


@pytest.mark.parametrize(
    ("protocol", "item"),
    [
        ("anthropic.messages", {"content": [{"type": "redacted_thinking", "data": "x"}]}),
        ("openai.responses", {"output": [{"type": "reasoning", "encrypted_content": "x"}]}),
    ],
)
def test_encrypted_reasoning_is_named(protocol: str, item: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}]}
    given = step(0, "", json.dumps(item), protocol=protocol) | {"request_json": json.dumps(asked)}
    ((turn,), _) = turns_of([given], READ)
    assert turn.reply is not None and turn.reply.reasoning == "(encrypted)"


def test_an_image_in_the_result_of_a_tool_of_messages_is_an_image() -> None:
    image = {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "content": [{"type": "image", "source": image}],
    }
    asked = {"messages": [{"role": "user", "content": [result]}]}
    given = step(0, "", '{"content": "ok"}', protocol="anthropic.messages")
    ((turn,), _) = turns_of([given | {"request_json": json.dumps(asked)}], READ)
    assert turn.added[0].images == (PNG,) and "base64" not in turn.added[0].text


def test_steps_without_a_parent_show_only_what_no_earlier_step_has() -> None:
    """Without token ids every step is a root: pages must not grow with the square of the turns."""
    messages: list[dict[str, str]] = [{"role": "user", "content": "x" * 10_000}]
    steps = []
    for index in range(41):
        steps.append(step(index, json.dumps(messages), json.dumps({"content": f"r{index}"}))
                     | {"parent": None})  # fmt: skip
        messages += [{"role": "assistant", "content": f"r{index}"},
                     {"role": "user", "content": f"u{index}" * 100}]  # fmt: skip
    turns, _ = turns_of(steps, READ)
    assert [len(turn.added) for turn in turns] == [1] * 41
    assert [(turn.like, turn.continues) for turn in turns[1:]] == [(i, True) for i in range(40)]
    assert sum(turn.size for turn in turns) < 2 * sum(len(m["content"]) for m in messages)


def test_a_fork_says_what_it_shares_and_a_new_conversation_shares_nothing() -> None:
    asked = {"role": "user", "content": "a"}
    other = {"role": "user", "content": "b"}
    steps = [
        step(0, json.dumps([asked])),
        step(1, json.dumps([asked])),
        step(2, json.dumps([other])),
    ]
    turns, _ = turns_of(steps, READ)
    assert [(t.repeated, t.like, t.continues) for t in turns] == [
        (0, None, False), (1, 0, False), (0, None, False),
    ]  # fmt: skip


def test_a_long_text_is_cut_and_a_long_request_shows_its_last_messages() -> None:
    long = {"role": "user", "content": "x" * 5_000_000}
    ((turn,), _) = turns_of([step(0, json.dumps([long]))], READ)
    (part,) = turn.added
    assert (len(part.text), part.left) == (TEXT_CHARACTERS, 5_000_000 - TEXT_CHARACTERS)
    many = [long | {"name": str(i), "content": str(i) * 90_000} for i in range(30)]
    ((turn,), _) = turns_of([step(0, json.dumps(many))], READ)
    assert turn.size <= TURN_CHARACTERS + TEXT_CHARACTERS
    assert turn.left_out + len(turn.added) == 30 and turn.added[-1].number == 29
