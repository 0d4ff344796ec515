"""Official clients directly and through the gateway: content types, beta types, choices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from support.corpus import CORPUS, Case, replaying, reply
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings

CODEC = Codec()
Ask = Callable[[str], Awaitable[Any]]


def asked(home: Path, made: dict[str, bytes], ask: Ask) -> tuple[Any, Any, list[Step]]:
    """Ask directly and through the gateway; return both answers and the steps."""

    async def body() -> tuple[Any, Any, list[Step]]:
        producer = InMemoryLogProducer()
        async with replaying(made) as engine:
            said = {"upstreams": [{"url": engine, "kind": "text"}], "worker_wait_s": 60}
            settings = Settings.model_validate({"data_dir": home, "gateway": said})
            app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
            async with running(app) as url:
                straight, through = await ask(engine), await ask(url + "/t/g")
        return straight, through, [CODEC.decode(m.value) for m in producer.messages]

    return asyncio.run(body())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream"])
@pytest.mark.parametrize("name", ["groq/text.sse", "openai/two_choices.sse"])
def test_a_stream_under_another_content_type(tmp_path: Path, kind: str, name: str) -> None:
    made = {"m": reply(Case(name, "chat", None).data, kind)}
    said: list[Any] = [{"role": "user", "content": "hi"}]

    async def ask(url: str) -> list[dict[str, str]]:
        texts: dict[int, str] = {}
        async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=said, stream=True, n=2
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        return [{"content": text} for _, text in sorted(texts.items())]

    straight, through, steps = asked(tmp_path, made, ask)
    assert straight == through
    recorded = [orjson.loads(step.response_json) for step in steps if step.status == "ok"]
    assert [{"content": message["content"]} for message in recorded] == straight


@pytest.mark.slow
def test_a_summary_of_a_compaction(tmp_path: Path) -> None:
    made = {"m": reply((CORPUS / "reports/compaction.sse").read_bytes(), "text/event-stream")}
    said: list[Any] = [{"role": "user", "content": "hi"}]

    async def ask(url: str) -> Any:
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            async with client.beta.messages.stream(
                model="m", messages=said, max_tokens=5
            ) as events:
                return (await events.get_final_message()).to_dict()["content"]

    straight, through, (step,) = asked(tmp_path, made, ask)
    assert straight == through
    assert orjson.loads(step.response_json)["content"] == straight
