"""An engine that redirects gives no reply: 502 with the location, for every kind of request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.corpus import PATHS, replaying, reply
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.prober import kind_of
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import FailedCall
from clawstream.schemas.settings import Settings

CODEC = Codec()
WHERE = "https://api.example/v1/moved"
SAID = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}


def redirect(status: int) -> bytes:
    made = reply(b"<html>moved</html>", "text/html", f"location: {WHERE}")
    return made.replace(b" 200 OK", b" %d Moved" % status, 1)


def asked(home: Path, made: bytes, path: str, **body: Any) -> tuple[int, dict[str, Any], list[Any]]:
    """Status, body and records of one request to a gateway whose engine sends these bytes."""

    async def ask() -> tuple[int, dict[str, Any], list[Any]]:
        producer = InMemoryLogProducer()
        async with replaying({"m": made}) as engine:
            said = {"upstreams": [{"url": engine, "kind": "text"}], "worker_wait_s": 60}
            settings = Settings.model_validate({"data_dir": home, "gateway": said})
            app = create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
            async with running(app) as url, aiohttp.ClientSession() as http:
                async with http.post(f"{url}/t/g{path}", json={"model": "m"} | SAID | body) as got:
                    return (
                        got.status,
                        await got.json(),
                        [CODEC.decode(m.value) for m in producer.messages],
                    )

    return asyncio.run(ask())


@pytest.mark.parametrize("status", [301, 302, 304, 307, 308])
@pytest.mark.parametrize("stream", [True, False])
def test_a_redirect_is_no_reply(tmp_path: Path, status: int, stream: bool) -> None:
    got, body, records = asked(tmp_path, redirect(status), PATHS["chat"], stream=stream)
    assert got == 502 and body["error"]["code"] == "upstream_failed"
    assert WHERE in body["error"]["message"] and "gateway.upstreams" in body["error"]["message"]
    (failed,) = records
    assert isinstance(failed, FailedCall) and WHERE in failed.message


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens"])
def test_a_redirect_does_not_pass_through(tmp_path: Path, path: str) -> None:
    got, body, records = asked(tmp_path, redirect(308), path)
    assert (got, records) == (502, []) and WHERE in body["error"]["message"]


@pytest.mark.parametrize("status", [200, 201, 202])
def test_another_status_of_success_stays(tmp_path: Path, status: int) -> None:
    made = b'{"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"}]}'
    sent = reply(made, "application/json").replace(b" 200 OK", b" %d OK" % status, 1)
    got, _, (step,) = asked(tmp_path, sent, PATHS["chat"])
    assert (got, step.status) == (status, "ok")


def test_a_redirect_shows_no_kind() -> None:
    assert kind_of(301, False, b"<html>") is None and kind_of(307, True, b'{"version":"1"}') is None
