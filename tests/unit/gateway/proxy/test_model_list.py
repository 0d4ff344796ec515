"""One list of the models of all engines, and the entry of one model."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.wire import Wire, wired

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry, EngineSpec
from clawstream.gateway.proxy.model_list import merged
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

CODEC = Codec()


def model(name: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "owned_by": "x"} | more


def listed(*names: str) -> dict[str, Any]:
    return {"object": "list", "data": [model(name) for name in names]}


def spec(name: str, **more: Any) -> EngineSpec:
    return EngineSpec(name, f"http://{name}", **more)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([(spec("a"), listed("x", "y")), (spec("b"), listed("y", "z"))], ["x", "y", "z"]),
        ([(spec("a"), None), (spec("b"), listed("z"))], ["z"]),
        ([(spec("a", models=("x",)), listed("x", "y"))], ["x"]),
        ([(spec("a", models=("w",)), listed("x"))], ["w"]),
        ([(spec("a", model_map={"gpt": "x"}), listed("x"))], ["x", "gpt"]),
        ([(spec("a", models=("x",), model_map={"gpt": "v"}), listed("x"))], ["x", "gpt"]),
        ([(spec("a"), {"data": [7, {"id": 1}, model("x")]})], ["x"]),
    ],
)
def test_lists_are_joined(lists: list[Any], expected: list[str]) -> None:
    found = merged(lists)
    assert found is not None and [entry["id"] for entry in found["data"]] == expected
    assert all(entry["object"] == "model" for entry in found["data"])


def test_no_list_is_none() -> None:
    assert merged([(spec("a"), None)]) is None


def test_a_client_sees_the_models_of_all_engines(tmp_path: Path) -> None:
    lists = [listed("a1", "a2"), listed("b1")]

    async def body() -> None:
        asked: list[str] = []

        async def scenario(urls: list[str]) -> None:
            said = {
                "upstreams": [
                    {"url": urls[0], "kind": "text"},
                    {"url": urls[1], "kind": "text", "model_map": {"gpt-5": "b1"}},
                ]
            }
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": said})
            engines = EngineRegistry(settings.gateway.upstreams)
            app = create_app(settings, InMemoryLogProducer(), engines, CODEC)
            async with running(app) as url:
                async with AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
                    for _ in range(3):
                        found = [each.id async for each in client.models.list()]
                        assert found == ["a1", "a2", "b1", "gpt-5"]
                    assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
                    assert (await client.models.retrieve("b1")).id == "b1"
                async with aiohttp.ClientSession() as http:
                    async with http.get(url + "/v1/models/none") as got:
                        assert got.status == 404
                    async with http.get(url + "/v1/models/" + "m" * 300) as got:
                        assert got.status == 400

        def answering(which: int) -> Any:
            async def answer(wire: Wire, data: bytes) -> None:
                target = data.split(b" ", 2)[1].decode()
                asked.append(target)
                known = target == "/v1/models"
                made = json.dumps(lists[which] if known else {"error": {"message": "?"}}).encode()
                status = "200 OK" if known else "404 Not Found"
                await wire.say(
                    f"HTTP/1.1 {status}\r\ncontent-length: {len(made)}\r\n"
                    "content-type: application/json\r\n\r\n".encode()
                    + made
                )

            return answer

        async with AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(wired(answering(i))) for i in (0, 1)]
            await scenario(urls)

    asyncio.run(body())
