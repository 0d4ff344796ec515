"""Conversations of records that the gateway would not write."""

from __future__ import annotations

import json
from typing import Any

from clawstream.export.chat import chat_of
from inspector.queries.conversation import turns_of
from inspector.web.rendering import text_of


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
    assert '<span class="said">?</span>' in text_of("live.html", rows=rows, source="lake")
