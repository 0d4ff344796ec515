"""Token limits: long prompts are refused before sampling; replies get a default limit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from support.gateway import running
from support.log_producer import InMemoryLogProducer

from clawstream.gateway.app import create_app
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.protocols.adapter import ProtocolAdapter
from clawstream.gateway.protocols.openai_chat import OpenAIChat
from clawstream.gateway.protocols.openai_completions import OpenAICompletions
from clawstream.gateway.protocols.openai_responses import OpenAIResponses
from clawstream.gateway.protocols.request_fields import with_defaults
from clawstream.gateway.proxy.token_limits import MAX_COUNTED, may_exceed, prompts_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

CODEC = Codec()
LONG = "a b " * 500
"""1,000 tokens for the engine below."""
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": LONG}],
    "tools": [],
    "temperature": 0.5,
}


@dataclass
class Counter:
    """Engine that counts one token per word. asked: Path and body of every request."""

    counts: bool = True
    refusal: int = 400
    asked: list[tuple[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    gate: asyncio.Event | None = None
    left: int = 0

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen on loopback; gives the URL."""
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def _answer(self, http: web.Request) -> web.Response:
        said = orjson.loads(await http.read())
        self.asked.append((http.path, said))
        self.keys.append(http.headers.get("authorization"))
        if self.gate is not None:
            try:
                await self.gate.wait()
            finally:
                self.left += 1
        text = said["messages"][0]["content"] if "messages" in said else said.get("prompt")
        match http.path, self.counts:
            case "/tokenize", True:
                return web.json_response(
                    {"count": len(text.split()), "max_model_len": 9, "tokens": []}
                )
            case "/v1/messages/count_tokens", True:
                return web.json_response({"input_tokens": len(text.split())})
        return web.json_response(
            {"error": {"message": "the engine's own", "code": 400}}, status=self.refusal
        )


@asynccontextmanager
async def gateway_to(
    counter: Counter, directory: Path, upstream: dict[str, Any], **gateway: Any
) -> AsyncIterator[str]:
    """Yield the base URL of a trajectory. upstream: Further settings of the upstream."""
    async with counter.serve() as engine:
        upstreams = [{"url": engine, **upstream}]
        settings = Settings.model_validate(
            {"data_dir": directory, "gateway": {"upstreams": upstreams, **gateway}}
        )
        app = create_app(
            settings, InMemoryLogProducer(), EngineRegistry(settings.gateway.upstreams), CODEC
        )
        async with running(app) as url:
            yield f"{url}/t/g"


def call(
    counter: Counter,
    directory: Path,
    path: str,
    body: Any,
    upstream: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    **gateway: Any,
) -> tuple[int, str]:
    """Status and what is said in the reply that a call gets: an error's message, else all of it."""

    async def run() -> tuple[int, str]:
        async with (
            gateway_to(counter, directory, upstream or {}, **gateway) as url,
            aiohttp.ClientSession() as http,
            http.post(url + path, json=body, headers=headers) as r,
        ):
            said = await r.json()
            return r.status, said["error"]["message"] if "error" in said else str(said)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", CHAT, "/tokenize"),
        ("/v1/completions", {"model": "m", "prompt": LONG, "seed": 1}, "/tokenize"),
        (
            "/v1/messages",
            {"model": "m", "messages": CHAT["messages"], "max_tokens": 5},
            "/v1/messages/count_tokens",
        ),
    ],
)
def test_an_over_long_prompt_is_refused_with_its_length(
    tmp_path: Path, path: str, body: dict[str, Any], where: str
) -> None:
    counter = Counter()
    status, message = call(counter, tmp_path, path, body, max_prompt_tokens=999)
    assert status == 400 and "1000 tokens" in message and "999" in message
    ((asked, said),) = counter.asked
    assert asked == where
    assert said == {k: v for k, v in body.items() if k not in ("temperature", "seed", "max_tokens")}


def test_a_prompt_of_ids_is_counted_here(tmp_path: Path) -> None:
    counter = Counter()
    for prompt in ([1] * 1000, [[1], [1] * 1000]):
        status, message = call(
            counter, tmp_path, "/v1/completions", {"prompt": prompt}, max_prompt_tokens=999
        )
        assert status == 400 and "1000 tokens" in message
    assert counter.asked == []


@pytest.mark.parametrize(
    ("limit", "counts", "paths"),
    [
        (None, True, ["/v1/chat/completions"]),  # no limit, no request more
        (9000, True, ["/v1/chat/completions"]),  # too short to be too long
        (1000, True, ["/tokenize", "/v1/chat/completions"]),
        (
            999,
            False,
            ["/tokenize", "/v1/chat/completions"],
        ),  # the engine cannot count: its own bound is left
    ],
)
def test_a_prompt_that_may_pass_passes_whole(
    tmp_path: Path, limit: int | None, counts: bool, paths: list[str]
) -> None:
    counter = Counter(counts)
    assert call(counter, tmp_path, "/v1/chat/completions", CHAT, max_prompt_tokens=limit) == (
        400,
        "the engine's own",
    )
    assert [path for path, _ in counter.asked] == paths
    assert counter.asked[-1][1]["messages"] == CHAT["messages"]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_count_that_fails_is_no_count_of_nothing(tmp_path: Path, status: int) -> None:
    counter = Counter(counts=False, refusal=status)
    got, _ = call(
        counter, tmp_path, "/v1/chat/completions", CHAT, {"kind": "text"}, max_prompt_tokens=999
    )
    assert got == 502 and {path for path, _ in counter.asked} == {"/tokenize"}


PROVIDER = {"kind": "text", "forward_credentials": True, "model_map": {"m": "its-own"}}
KEY = {"authorization": "Bearer sk-provider"}


def test_counting_asks_as_the_call_would(tmp_path: Path) -> None:
    """With the client's key of the provider, and the provider's own name of the model."""
    counter = Counter()
    status, _ = call(
        counter, tmp_path, "/v1/chat/completions", CHAT, PROVIDER, KEY, max_prompt_tokens=999
    )
    assert (
        status == 400
        and counter.keys == [KEY["authorization"]]
        and counter.asked[0][1]["model"] == "its-own"
    )


@pytest.mark.slow
def test_count_tokens_is_asked_as_a_call_would_be(tmp_path: Path) -> None:
    counter, path = Counter(), "/v1/messages/count_tokens"
    body = {"model": "m", "messages": CHAT["messages"]}
    assert call(counter, tmp_path, path, body, PROVIDER, KEY) == (200, "{'input_tokens': 1000}")
    assert counter.keys == [KEY["authorization"]]
    assert counter.asked == [(path, body | {"model": "its-own"})]
    refused: list[Any] = [[], {"model": 1}]
    for wrong in refused:
        assert call(counter, tmp_path, path, wrong, PROVIDER, KEY)[0] == 400
    assert len(counter.asked) == 1


def test_only_so_many_prompts_are_counted_one_by_one(tmp_path: Path) -> None:
    counter, body = Counter(), {"prompt": [LONG] * (MAX_COUNTED + 1)}
    status, message = call(counter, tmp_path, "/v1/completions", body, max_prompt_tokens=1000)
    assert status == 400 and str(MAX_COUNTED) in message and counter.asked == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens"])
def test_a_client_that_leaves_is_counted_no_longer(tmp_path: Path, path: str) -> None:
    async def body() -> None:
        counter = Counter(gate=asyncio.Event())
        async with (
            gateway_to(counter, tmp_path, {"kind": "text"}, max_prompt_tokens=999) as url,
            aiohttp.ClientSession() as http,
        ):
            waiting = asyncio.create_task(http.post(url + path, json=CHAT))
            async with asyncio.timeout(60):
                while not counter.asked:  # noqa: ASYNC110 - it is the engine's
                    await asyncio.sleep(0.005)
                waiting.cancel()
                root = url.removesuffix("/t/g")
                while counter.left == 0:  # noqa: ASYNC110 - it is the engine's
                    await asyncio.sleep(0.005)
                while (  # noqa: ASYNC110 - it is another server's
                    "clawstream_gateway_in_flight 0.0"
                    not in await (await http.get(root + "/metrics")).text()
                ):
                    await asyncio.sleep(0.005)
            assert len(counter.asked) == 1

    asyncio.run(body())


def test_what_may_be_longer_than_its_bytes_is_counted() -> None:
    assert may_exceed(b'{"messages":[{"type":"image_url"}]}', 10**6)
    assert not may_exceed(b'{"messages":[]}', 10**6)
    assert may_exceed(b'{"messages":[]}', 100)  # a template may add as much


def test_prompts_of_completions() -> None:
    assert prompts_of("a") == ["a"] and prompts_of(None) == [] and prompts_of([1, 2]) == [[1, 2]]
    assert prompts_of(["a", [1], 2, None]) == ["a", [1]]


@pytest.mark.parametrize(
    ("adapter", "body", "name"),
    [
        (OpenAIChat(), b'{"messages":[]}', "max_tokens"),
        (OpenAIChat(), b'{"messages":[],"max_tokens":null}', "max_tokens"),
        (OpenAICompletions(), b'{"prompt":"a"}', "max_tokens"),
        (OpenAIResponses(), b'{"input":"a"}', "max_output_tokens"),
    ],
)
def test_a_reply_without_a_bound_gets_the_default(
    adapter: ProtocolAdapter, body: bytes, name: str
) -> None:
    request = adapter.parse_request(body)
    made = with_defaults(request, adapter.name, 77)
    assert orjson.loads(made.body) == made.payload == {**orjson.loads(body), name: 77}
    assert with_defaults(request, adapter.name, None) is request


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_clients_own_bound_stays(name: str) -> None:
    request = OpenAIChat().parse_request(b'{"messages":[],"%s":5}' % name.encode())
    assert with_defaults(request, "openai.chat", 77) is request
    assert with_defaults(request, "anthropic.messages", 77) is request


@pytest.mark.parametrize("adapter", [OpenAIChat(), OpenAICompletions()])
def test_the_model_default_is_the_engines_own(adapter: ProtocolAdapter) -> None:
    said = {"prompt": "a", "messages": [], "temperature": 0.5}
    request = adapter.parse_request(orjson.dumps({"model": "default", **said}))
    made = with_defaults(request, adapter.name, 5)
    assert (made.model, orjson.loads(made.body), made.payload) == (
        None,
        said | {"max_tokens": 5},
        said | {"max_tokens": 5},
    )
    assert with_defaults(request, "anthropic.messages", None) is request


def test_the_default_reaches_the_engine(tmp_path: Path) -> None:
    counter = Counter()
    call(counter, tmp_path, "/v1/chat/completions", CHAT, default_max_tokens=77)
    assert counter.asked == [("/v1/chat/completions", CHAT | {"max_tokens": 77})]
