"""Forwarded queries, headers, unrecorded requests and content encodings."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import cramjam
import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway, running
from support.log_producer import InMemoryLogProducer
from support.raw_http import ASK, CALL, connected, request
from support.scripted.script import Script, ScriptedChoice
from support.wire import Wire, wired

from clawstream.gateway.app import create_app
from clawstream.gateway.auth.api_keys import create_key
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.gateway.protocols.request_fields import repaired
from clawstream.gateway.proxy.forwarding import forwarded, returned, traceparent_of, with_query
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings

CODEC = Codec()
RunScenario = Callable[..., None]
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
CHAT = orjson.dumps({
    "id": "x", "model": "policy",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"},
    "finish_reason": "stop"}]
})  # fmt: skip
EMBEDDINGS = b'{"object":"list","data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}'
STREAM = (
    b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]}\n\n'
    b"data: [DONE]\n\n"
)
TOLD = {
    "x-request-id": "req_1",
    "request-id": "req_2",
    "x-ratelimit-remaining-requests": "41",
    "anthropic-ratelimit-tokens-remaining": "7",
    "retry-after-ms": "250",
    "x-should-retry": "true",
    "openai-processing-ms": "12",
}


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC)


class Provider:
    """An engine that answers everything with these bytes, and keeps what it was asked."""

    def __init__(
        self, status: int = 200, body: bytes = CHAT, kind: str = "application/json"
    ) -> None:
        self.asked: list[bytes] = []
        lines = [
            f"HTTP/1.1 {status} x",
            f"content-type: {kind}",
            f"content-length: {len(body)}",
            "x-secret: no",
        ]
        self._reply = (
            "\r\n".join([*lines, *(f"{n}: {v}" for n, v in TOLD.items()), "", ""]).encode() + body
        )

    async def answer(self, wire: Wire, asked: bytes) -> None:
        self.asked.append(asked)
        await wire.say(self._reply)

    @property
    def targets(self) -> list[str]:
        return [" ".join(a.decode("latin-1").split(" ")[:2]) for a in self.asked]


@asynccontextmanager
async def before(
    provider: Provider, directory: Path, **gateway: Any
) -> AsyncIterator[tuple[str, InMemoryLogProducer]]:
    """A gateway before the provider: its URL and its log."""
    async with wired(provider.answer) as url:
        said = {"upstreams": [{"url": url, "kind": "text"}], **gateway}
        settings = Settings.model_validate({"data_dir": directory, "gateway": said})
        producer = InMemoryLogProducer()
        async with running(
            create_app(settings, producer, EngineRegistry(settings.gateway.upstreams), CODEC)
        ) as here:
            yield here, producer


# ---------------------------------------------------------------- queries and headers


@pytest.mark.parametrize(
    ("status", "stream"),
    [(200, False), (200, True), (429, False), (400, True)],
    ids=["plain", "stream", "429", "400"],
)
def test_what_clients_act_upon_comes_back(tmp_path: Path, status: int, stream: bool) -> None:
    async def body() -> None:
        streams = stream and status == 200
        provider = Provider(
            status,
            STREAM if streams else CHAT,
            "text/event-stream" if streams else "application/json",
        )
        async with before(provider, tmp_path) as (url, _), aiohttp.ClientSession() as http:
            ask = orjson.loads(ASK) | {"stream": stream}
            sent = {
                "anthropic-beta": "b1",
                "openai-organization": "o1",
                "x-private": "p",
                "http-referer": "r",
            }
            async with http.post(
                url + CALL + "?beta=true&api-version=2024-10-21", json=ask, headers=sent
            ) as reply:
                await reply.read()
                assert reply.status == status
                assert {name: reply.headers.get(name) for name in TOLD} == TOLD
                assert (
                    "x-secret" not in reply.headers
                    and reply.headers["x-clawstream-trajectory"] == "t"
                )
        assert provider.targets == ["POST /v1/chat/completions?beta=true&api-version=2024-10-21"]
        head = provider.asked[0].lower()
        assert (
            b"anthropic-beta: b1" in head
            and b"openai-organization: o1" in head
            and b"http-referer: r" in head
        )
        assert b"x-private" not in head

    asyncio.run(body())


def test_a_key_of_ours_in_a_query_goes_to_no_engine() -> None:
    assert with_query("/v1/x", b"") == "/v1/x"
    assert with_query("/v1/x", b"beta=true&key=claw-abc&a=b") == "/v1/x?beta=true&a=b"
    assert (
        with_query("/v1/x", b"key=sk-claw-abc")
        == with_query("/v1/x", b"key=%73k-claw-abc")
        == "/v1/x"
    )
    assert returned({b"x-ratelimit-a": b"1", b"server": b"x", b"retry-after": b"2"}) == [
        (b"x-ratelimit-a", b"1"),
        (b"retry-after", b"2"),
    ]


# ---------------------------------------------------------------- what is not recorded


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/embeddings"), ("POST", "/v1/rerank")])
def test_tokens_of_what_passes_unrecorded_count_for_a_keys_day(
    tmp_path: Path, method: str, path: str
) -> None:
    statuses = replies_to_a_key_with_six_tokens_a_day(
        tmp_path, method, path, Provider(body=EMBEDDINGS)
    )
    assert statuses == [200, 200, 429]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_reply_without_choices_count_for_a_keys_day(
    tmp_path: Path, stream: bool
) -> None:
    said = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":0}}'
    kind = "text/event-stream" if stream else "application/json"
    provider = Provider(body=b"data: %b\n\n" % said if stream else said, kind=kind)
    statuses = replies_to_a_key_with_six_tokens_a_day(tmp_path, "POST", CALL, provider, stream)
    assert statuses == [200, 200, 429]


def test_tokens_of_an_error_count_for_no_day(tmp_path: Path) -> None:
    statuses = replies_to_a_key_with_six_tokens_a_day(
        tmp_path, "POST", "/v1/embeddings", Provider(400, EMBEDDINGS)
    )
    assert statuses == [400] * 3


def replies_to_a_key_with_six_tokens_a_day(
    directory: Path, method: str, path: str, provider: Provider, stream: bool = False
) -> list[int]:
    """The statuses of three requests, one after the other."""
    token = create_key(directory / "api-keys.json", "k", ["agent"], tokens_per_day=6)
    said = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}

    async def body() -> list[int]:
        statuses = []
        sent = {"authorization": f"Bearer {token}"}
        async with (
            before(provider, directory) as (url, _),
            aiohttp.ClientSession(headers=sent) as http,
        ):
            for _ in range(3):
                async with http.request(
                    method, url + path, json=said if method == "POST" else None
                ) as reply:
                    await reply.read()
                    statuses.append(reply.status)
        return statuses

    return asyncio.run(body())


def test_requests_that_pass_unrecorded(tmp_path: Path) -> None:
    asked = [
        ("POST", "/v1/embeddings"), ("POST", "/v1/moderations"), ("POST", "/v1/rerank"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/meta-llama/Llama-3?x=1"),
    ]  # fmt: skip

    async def body() -> None:
        provider = Provider(body=b'{"object":"list"}')
        async with before(provider, tmp_path) as (url, producer), aiohttp.ClientSession() as http:
            for prefix in ("", "/t/g"):
                for method, path in asked:
                    said = {"model": "policy", "input": "hi"} if method == "POST" else None
                    async with http.request(method, url + prefix + path, json=said) as reply:
                        assert (reply.status, await reply.json()) == (200, {"object": "list"}), path
                        assert reply.headers["x-request-id"] == "req_1"
            for path in (
                "/v1/models/../../metrics",
                "/v1/models/%2e%2e/x",
                "/v1/models/a%2f..%2fb",
                "/v1/models//x/..",
            ):
                async with connected(url) as client:
                    await client.send(request("GET", path, b""))
                    assert b" 404 " in await client.head()
            # A stored response may be of another run, which the key cannot reach.
            for method in ("GET", "DELETE", "PUT"):
                async with http.request(method, url + "/v1/responses/resp_1") as reply:
                    assert reply.status == 404
            assert not producer.messages
        assert provider.targets == [f"{method} {path}" for method, path in asked] * 2

    asyncio.run(body())


def test_a_trajectory_may_be_called_like_a_list_of_items(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path in ("/models/g/v1/chat/completions", "/responses/g/chat/completions"):
            async with w.http.post(w.url + path, data=ASK) as reply:
                assert reply.status == 200
        async with w.http.post(w.url + "/responses/g/complete_trajectory") as reply:
            assert reply.status == 200
        assert [step.trajectory_key for step in w.steps()] == ["models", "responses"]

    run_scenario(scenario, Script([HI]))


# ---------------------------------------------------------------- bodies


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (rb'"\ud83d"', rb'"\ufffd"'),
        (rb'"\uDE00 x"', rb'"\ufffd x"'),
        (rb'"\ud83d\ud83d\ude00"', rb'"\ufffd\ud83d\ude00"'),
        (rb'"\\ud83d"', rb'"\\ud83d"'),
        (rb'"\\\ud83d"', rb'"\\\ufffd"'),
        (rb'"\ud83d\n\u00e9"', rb'"\ufffd\n\u00e9"'),
    ],
)
def test_halves_of_characters_become_whole(said: bytes, whole: bytes) -> None:
    assert repaired(said) == whole
    orjson.loads(whole)


@pytest.mark.parametrize(
    "path", ["/t/g/v1/chat/completions", "/t/g/v1/messages", "/t/g/v1/messages/count_tokens"]
)
def test_half_an_emoji_is_taken(run_scenario: RunScenario, path: str) -> None:
    half = ASK.replace(b'"hi"', rb'"hi \ud83d"').replace(b"{", b'{"max_tokens":9,', 1)

    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + path, data=half) as reply:
            assert reply.status == 200, await reply.text()
        for step in w.steps():
            assert orjson.loads(step.request_json)["messages"][0]["content"] == "hi \ufffd"

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize("path", [CALL, "/v1/messages/count_tokens", "/v1/tokenize"])
def test_a_byte_order_mark_is_no_part_of_the_body(tmp_path: Path, path: str) -> None:
    async def body() -> None:
        provider = Provider()
        async with before(provider, tmp_path) as (url, _), aiohttp.ClientSession() as http:
            async with http.post(url + path, data=codecs.BOM_UTF8 + ASK) as reply:
                assert reply.status == 200
        assert provider.asked[0].endswith(b"\r\n\r\n" + ASK)

    asyncio.run(body())


@pytest.mark.parametrize(
    "path", ["/v1/responses/compact", "/v1/responses/input_tokens", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize("before_it", ["", "/t/g"])
def test_requests_that_sample_nothing_to_train_pass(
    tmp_path: Path, path: str, before_it: str
) -> None:
    async def body() -> None:
        provider = Provider(body=b'{"count":3}')
        async with before(provider, tmp_path) as (url, log), aiohttp.ClientSession() as http:
            async with http.post(url + before_it + path, data=ASK) as reply:
                assert (reply.status, await reply.read()) == (200, b'{"count":3}')
            assert log.messages == []
        assert provider.targets == [f"POST {path}"]

    asyncio.run(body())


@pytest.mark.parametrize("path", [CALL, "/v1/messages/count_tokens", "/sessions"])
def test_compressed_bodies(run_scenario: RunScenario, path: str) -> None:
    body = b'{"run_id":"r"}' if path == "/sessions" else ASK

    async def post(w: GatewayFixture, data: bytes, encoding: str) -> tuple[int, Any]:
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        async with connected(w.url) as client:
            lines = [f"{name}: {value}" for name, value in headers.items()]
            await client.send(request("POST", path, data, *lines))
            head, answer = await client.reply()
            return int(head.split()[1]), orjson.loads(answer).get("error", {})

    async def scenario(w: GatewayFixture) -> None:
        twice = gzip.compress(gzip.compress(body))
        status, error = await post(w, twice, "gzip\r\ncontent-encoding: gzip")
        assert status == 415 and "gzip" in str(error)
        for encoding, data in (
            ("gzip", gzip.compress(body)),
            ("deflate", zlib.compress(body)),
            ("identity", body),
            ("zstd", bytes(cramjam.zstd.compress(body))),
        ):
            assert (await post(w, data, encoding))[0] in (200, 201), encoding
        for encoding in ("br", "gzip, gzip"):
            status, error = await post(w, b"x", encoding)
            assert status == 415 and "gzip" in str(error), encoding
        for wrong in (body, gzip.compress(body)[:-4], gzip.compress(body) + b"x"):
            status, error = await post(w, wrong, "gzip")
            assert status == 400 and "gzip" in str(error)
        bomb = gzip.compress(b'{"pad":"' + b"x" * (8 << 20) + b'"}')
        status, error = await post(w, bomb, "gzip")
        assert status == 413 and len(bomb) < 1 << 16
        packed = bytes(cramjam.zstd.compress(body))
        for wrong in (b"", body, packed[:-4], packed + b"x"):
            status, error = await post(w, wrong, "zstd")
            assert status == 400 and "zstd" in str(error)
        bomb = bytes(cramjam.zstd.compress(b'{"pad":"' + b"x" * (8 << 20) + b'"}'))
        status, error = await post(w, bomb, "zstd")
        assert status == 413 and len(bomb) < 1 << 16
        assert await w.metric("clawstream_gateway_in_flight") == 0

    run_scenario(scenario, Script([HI]), max_body_bytes=1 << 20)


# ---------------------------------------------------------------- browsers


def test_pages_of_known_origins_may_call(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        asks = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        async with w.http.options(w.url + CALL, headers=asks) as reply:
            assert (
                reply.status == 200
                and reply.headers["access-control-allow-origin"] == "https://app.example"
            )
            assert "authorization" in reply.headers["access-control-allow-headers"]
        async with w.http.post(
            w.url + CALL, data=ASK, headers={"Origin": "https://app.example"}
        ) as reply:
            assert (
                reply.status == 401
                and reply.headers["access-control-allow-origin"] == "https://app.example"
            )
        async with w.http.options(
            w.url + CALL, headers=asks | {"Origin": "https://evil.example"}
        ) as reply:
            assert reply.status == 400 and "access-control-allow-origin" not in reply.headers

    run_scenario(scenario, Script([HI]), cors_origins=["https://app.example"], auth="required")


def test_no_page_may_call_where_none_is_named(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(
            w.url + CALL, data=ASK, headers={"Origin": "https://app.example"}
        ) as reply:
            assert reply.status == 403 and "access-control-allow-origin" not in reply.headers

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize(
    ("sent", "is_valid"),
    [
        (f"00-{'ab' * 16}-{'cd' * 8}-01", True),
        (f"00-{'ab' * 16}-{'cd' * 8}-00", True),
        (f"ff-{'ab' * 16}-{'cd' * 8}-01", False),
        (f"00-{'00' * 16}-{'cd' * 8}-01", False),
        (f"00-{'ab' * 16}-{'00' * 8}-01", False),
        (f"00-{'AB' * 16}-{'cd' * 8}-01", False),
        ("broken", False),
    ],
)
def test_only_a_valid_trace_context_is_recorded(sent: str, is_valid: bool) -> None:
    assert traceparent_of({"traceparent": sent}) == (sent if is_valid else None)


def test_a_trace_state_goes_on_only_beside_a_valid_trace_context() -> None:
    valid = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a=1"}
    assert forwarded(valid, has_body=False) == valid
    assert forwarded(valid | {"traceparent": "broken"}, has_body=False) == {}
    assert forwarded({"tracestate": "a=1", "x-title": "t"}, has_body=False) == {"x-title": "t"}


def test_of_a_later_version_the_part_is_recorded_that_version_00_has() -> None:
    known = f"01-{'ab' * 16}-{'cd' * 8}-01"
    assert traceparent_of({"traceparent": f"{known}-{'x' * 1000}"}) == known
