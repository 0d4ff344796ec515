"""Which headers pass, how several of one name do, and the settings that add names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.gateway import running
from support.log_producer import InMemoryLogProducer
from support.raw_http import connected, request
from support.wire import Wire, wired

from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.messages import combined, header_map
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import GatewaySettings, Settings

CODEC = Codec()
STREAM = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
ASK = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'


def test_headers_of_one_name_are_one_list() -> None:
    fields = [
        (b"a", b"1"),
        (b"b", b"x"),
        (b"a", b"2"),
        (b"a", b"1"),
        (b"host", b"h"),
        (b"host", b"i"),
    ]
    assert combined(fields) == {b"a": b"1, 2", b"b": b"x", b"host": b"i"}
    assert header_map({"headers": fields}) == {"a": "1, 2", "b": "x", "host": "i"}
    assert combined([(b"x-api-key", b"1"), (b"x-api-key", b"2")]) == {b"x-api-key": b"2"}


def test_headers_pass_both_ways(tmp_path: Path) -> None:
    sent = [
        "anthropic-beta: context-management-2025-06-27",
        "anthropic-beta: fine-grained-tool-streaming-2025-05-14",
        "x-codex-turn-state: TS0", "originator: codex_cli_rs", "version: 0.171.0",
        "x-mine: 1", "x-other: 1", "x-vllm-priority: 9",
    ]  # fmt: skip
    told = [
        "content-type: text/event-stream", f"content-length: {len(STREAM)}",
        "x-codex-turn-state: TS1", "x-ratelimit-a: 1", "x-ratelimit-a: 2", "x-theirs: 1",
        "x-secret: 1", "x-accel-buffering: yes",
    ]  # fmt: skip
    asked: list[bytes] = []

    async def answer(wire: Wire, data: bytes) -> None:
        asked.append(data)
        await wire.say("\r\n".join(["HTTP/1.1 200 OK", *told, "", ""]).encode() + STREAM)

    async def body() -> None:
        async with wired(answer) as engine:
            said = {
                "upstreams": [{"url": engine, "kind": "text"}],
                "forward_headers": ["X-Mine"],
                "return_headers": ["x-theirs"],
            }
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": said})
            engines = EngineRegistry(settings.gateway.upstreams)
            app = create_app(settings, InMemoryLogProducer(), engines, CODEC)
            async with running(app) as url, connected(url) as client:
                await client.send(request("POST", "/v1/chat/completions", ASK, *sent))
                head, _ = await client.reply()
        asked_lines = asked[0].partition(b"\r\n\r\n")[0].decode().split("\r\n")
        lines = head.decode().lower().split("\r\n")
        betas = "context-management-2025-06-27, fine-grained-tool-streaming-2025-05-14"
        assert f"anthropic-beta: {betas}" in asked_lines
        assert {"x-codex-turn-state: TS0", "originator: codex_cli_rs", "version: 0.171.0"} <= {
            *asked_lines
        }
        assert "x-mine: 1" in asked_lines
        assert not [line for line in asked_lines if line.startswith(("x-other", "x-vllm"))]
        assert {"x-codex-turn-state: ts1", "x-ratelimit-a: 1, 2", "x-theirs: 1"} <= {*lines}
        assert "x-accel-buffering: no" in lines and "x-accel-buffering: yes" not in lines
        assert not [line for line in lines if line.startswith("x-secret")]

    asyncio.run(body())


@pytest.mark.parametrize(
    "name", ["authorization", "Content-Length", "x y", "", "x-clawstream-step", "connection", "a:b"]
)
@pytest.mark.parametrize("setting", ["forward_headers", "return_headers"])
def test_headers_of_the_gateway_itself_are_in_no_list(setting: str, name: str) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings.model_validate({setting: [name]})
