"""vLLM's batch of conversations: a step for each choice, with the request of its conversation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.wire import Wire, wired

from clawstream.gateway.app import create_app
from clawstream.gateway.capture.engine_tokens import CapturedTokens
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.errors import BadRequest
from clawstream.gateway.protocols.openai_chat import OpenAIChatBatch
from clawstream.schemas import engine_frames
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_ids, pack_logprobs

BATCH = OpenAIChatBatch()
PATH = "/v1/chat/completions/batch"


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


ASK: dict[str, Any] = {
    "model": "m",
    "temperature": 0.5,
    "messages": [said("one"), said("two", "three")],
}


def choice(index: int, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": index, "message": message, "finish_reason": "stop"}


@pytest.mark.parametrize("path", [PATH, "/t/g" + PATH])
def test_each_conversation_is_a_step(tmp_path: Path, path: str) -> None:
    made = orjson.dumps({
        "id": "c", "object": "chat.completion", "model": "m",
        "choices": [choice(0, "a"), choice(1, "b")],
        "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
    })  # fmt: skip
    asked: list[bytes] = []

    async def answer(wire: Wire, data: bytes) -> None:
        asked.append(data)
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(made)}\r\n\r\n"
        await wire.say(head.encode() + made)

    async def body() -> None:
        producer, codec = InMemoryLogProducer(), Codec()
        async with wired(answer) as engine:
            upstreams = {"upstreams": [{"url": engine, "kind": "text"}]}
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": upstreams})
            app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), codec)
            async with running(app) as url, aiohttp.ClientSession() as http:
                async with http.post(url + path, json=ASK) as reply:
                    assert (reply.status, await reply.read()) == (200, made)
                    named = reply.headers["x-clawstream-step"].split(",")
        steps: list[Step] = [codec.decode(m.value) for m in producer.messages]
        assert named == [step.step_id for step in steps]
        assert asked[0].split(b" ")[1] == PATH.encode()
        assert [orjson.loads(step.response_json)["content"] for step in steps] == ["a", "b"]
        assert [orjson.loads(step.request_json) for step in steps] == [
            ASK | {"messages": conversation} for conversation in ASK["messages"]
        ]
        assert {step.protocol for step in steps} == {"openai.chat"}
        assert len({step.call_id for step in steps}) == 1
        usage = [step.usage for step in steps]
        assert usage[0] is not None and usage[0].prompt_tokens == 9 and usage[1] is None

    asyncio.run(body())


def test_each_conversation_has_its_own_tokens() -> None:
    request = BATCH.parse_request(orjson.dumps(ASK))
    captured = CapturedTokens()
    for at in range(2):
        told = (0, pack_ids([10 + at]), pack_logprobs([-0.5]), "stop", None)
        captured.add([engine_frames.Frame(at, pack_ids([at]), (told,))])
    assert [captured.tokens(at, request).ids for at in range(2)] == [pack_ids([10]), pack_ids([11])]
    assert [captured.tokens(at, request).prompt_ids for at in range(2)] == [
        pack_ids([0]),
        pack_ids([1]),
    ]


DEEP = orjson.loads("[" * 300 + "]" * 300)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"messages": said("one")}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[1]]}, "messages"),
        ({"messages": None}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 0}, "n"),
        ({"messages": [said("x")] * 1025}, "messages"),
        ({"x": DEEP}, "body"),
    ],
)
def test_what_is_no_batch_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        BATCH.parse_request(json.dumps(ASK | changed).encode())
    assert refused.value.param == field


@pytest.mark.parametrize("n", [1, 2])
def test_choices_follow_the_conversations(n: int) -> None:
    request = BATCH.parse_request(orjson.dumps(ASK | {"n": n}))
    assert (request.n, request.prompts) == (2 * n, 2)
    bodies: Sequence[bytes | None] = [request.body_of(at) for at in range(request.n)]
    asked = [orjson.loads(body or b"")["messages"] for body in bodies]
    assert asked == [each for each in ASK["messages"] for _ in range(n)]
