"""A gateway that stops: calls that the server cancels record what they have sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from support.log_producer import InMemoryLogProducer
from support.raw_http import CALL, connected, request
from support.scripted.engine import ScriptedEngine
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.app import create_app
from clawstream.gateway.asgi.http_server import server_config
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.main import listen
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Step
from clawstream.schemas.settings import Settings

LARGE = orjson.dumps(
    {"model": "policy", "stream": True, "messages": [{"role": "user", "content": "hi " * 100_000}]}
)
"""A record of this size is redacted in a thread."""
RULE = """
import time
from pathlib import Path

def waits(text):
    Path({begun!r}).touch()
    while not Path({goes_on!r}).exists():
        time.sleep(0.01)
    return []
"""


def test_a_call_that_a_shutdown_cancels_is_recorded(tmp_path: Path) -> None:
    codec, producer, gate = Codec(), InMemoryLogProducer(), asyncio.Semaphore(2)

    recorded = list[Any]()
    rule, begun, goes_on = tmp_path / "rule.py", tmp_path / "begun", tmp_path / "goes_on"
    rule.write_text(RULE.format(begun=str(begun), goes_on=str(goes_on)))

    async def scenario() -> None:
        hello = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
        engine = ScriptedEngine(lambda _: Script([hello], gate=gate))
        async with engine.serve() as engine_url:
            redaction = {"enabled": True, "rules": [f"{rule}:waits"]}
            gateway = {"upstreams": [engine_url], "redaction": redaction}
            settings = Settings.model_validate({"data_dir": tmp_path, "gateway": gateway})
            registry = EngineRegistry(settings.gateway.upstreams)
            config = server_config(create_app(settings, producer, registry, codec), 0)
            config.load()
            server, listening = uvicorn.Server(config), listen("127.0.0.1", 0)
            server.lifespan = config.lifespan_class(config)
            await server.startup([listening])
            async with connected(f"http://127.0.0.1:{listening.getsockname()[1]}") as client:
                await client.send(request("POST", CALL, LARGE))
                await client.head()
                await client.reader.readuntil(b"Hel")
                stopping = asyncio.create_task(server.shutdown([listening]))
                while not begun.exists():  # noqa: ASYNC110 - in a thread
                    await asyncio.sleep(0.01)
                await asyncio.wait([stopping], timeout=0.2)
                goes_on.touch()
                await stopping
                recorded.extend(codec.decode(m.value) for m in producer.messages)

    asyncio.run(scenario())
    (step,) = recorded
    assert isinstance(step, Step) and step.status == "aborted"
