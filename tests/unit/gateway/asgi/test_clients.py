"""HTTP over real sockets: limits, timeouts, upgrades, half-closed connections, HTTP/1.0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway
from support.raw_http import ASK, ASK_STREAM, CALL, SOON_S, connected, request
from support.scripted.script import Script, ScriptedChoice

from clawstream.schemas.codec.single_object import Codec

pytestmark = pytest.mark.usefixtures("each_event_loop")

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
CODEC = Codec()
RunScenario = Callable[..., None]
JAVA = b"Connection: Upgrade, HTTP2-Settings\r\n"
H2C = b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\nUpgrade: h2c\r\n"


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC)


def text_of(body: bytes) -> str:
    content = orjson.loads(body)["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("line", [b"x-pad: " + b"y" * 65536, b"", b"x: y\r\n" * 10_000])
def test_a_head_without_an_end_is_refused_early(run_scenario: RunScenario, line: bytes) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(b"GET /health HTTP/1.1\r\n" if line else b"GET /")
            for _ in range(16):
                await client.send(line or b"z" * 65536)
            assert b" 431 " in await client.head()
        async with w.http.get(w.url + "/health") as reply:
            assert reply.status == 200

    run_scenario(scenario, Script([HI]))


def test_a_head_that_is_whole_but_too_large_is_a_431(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(request("POST", CALL, ASK, "x-pad: " + "y" * 70_000))
            head, body = await client.reply()
            assert b" 431 " in head and orjson.loads(body)["error"]["code"] == "headers_too_large"
            assert b"connection: close" in head.lower() and await client.rest() == b""
        assert w.engine.requests == []

    run_scenario(scenario, Script([HI]))


def test_trailers_without_an_end_are_refused(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        head = f"POST {CALL} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        async with connected(w.url) as client:
            await client.send(head + b"%x\r\n%s\r\n0\r\nx-pad: " % (len(ASK), ASK))
            for _ in range(8):
                await client.send(b"y" * 65536)
            assert b" 431 " in await client.head()

    run_scenario(scenario, Script([HI]))


def test_trailers_are_no_headers(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        end = b"%x\r\n%s\r\n0\r\nx-clawstream-trajectory: evil\r\n\r\n" % (len(ASK), ASK)
        async with connected(w.url) as client:
            await client.send(head + end)
            told, _ = await client.reply()
            assert b" 200 " in told and b"evil" not in told

    run_scenario(scenario, Script([HI]))


def test_many_requests_in_one_packet_are_served_in_order_and_bounded(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(
                request("GET", "/health", b"") + request() + request("GET", "/ready", b"")
            )
            assert orjson.loads((await client.reply())[1]) == {"status": "ok"}
            assert text_of((await client.reply())[1]) == "Hello"
            assert orjson.loads((await client.reply())[1])["kafka"] is True
        async with connected(w.url) as client:
            await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 4000)
            assert 0 < (await client.rest()).count(b"HTTP/1.1 200") <= 101

    run_scenario(scenario, Script([HI]))


def test_a_body_that_waits_behind_another_request_has_its_time_later(
    run_scenario: RunScenario,
) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        second = request()
        async with connected(w.url) as client:
            await client.send(request() + second[:-1])
            await asyncio.sleep(0.7)  # longer than a client may take
            for _ in range(20):
                gate.release()
            assert b" 200 " in (await client.reply())[0]
            await client.send(second[-1:])
            assert b" 200 " in (await client.reply())[0]

    run_scenario(scenario, Script([HI], gate=gate), client_timeout_s=0.5)


@pytest.mark.slow
def test_a_client_that_takes_no_reply_is_let_go_whatever_it_asked_for(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(SOON_S):
                    while True:
                        await client.send(request("GET", "/openapi.json", b"") * 20)
        async with w.http.get(w.url + "/health") as reply:
            assert reply.status == 200

    run_scenario(scenario, Script([HI]), client_timeout_s=0.3)


def test_what_is_no_request_is_a_400_in_the_usual_shape(run_scenario: RunScenario) -> None:
    wrong = [
        b"SSH-2.0-x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ]

    async def scenario(w: GatewayFixture) -> None:
        for said in wrong:
            async with connected(w.url) as client:
                await client.send(said)
                head, body = await client.reply()
                assert b" 400 " in head and orjson.loads(body)["error"]["code"] == "invalid_request"
                assert await client.rest() == b""

    run_scenario(scenario, Script([HI]))


GET = b"GET /health HTTP/%s\r\n%s\r\n"
HOST, TWO = b"host: x\r\n", b"host: x\r\nHost: x\r\n"
TE = b"host: x\r\ntransfer-encoding: %s\r\n"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (GET % (b"1.1", b""), b" 400 "),
        (GET % (b"1.1", TWO), b" 400 "),
        (GET % (b"1.0", TWO), b" 400 "),
        (GET % (b"1.0", b""), b" 200 "),
        (GET % (b"2.0", HOST), b" 505 "),
        (GET % (b"0.9", HOST), b" 505 "),
        (GET % (b"1.1", TE % b"gzip, chunked") + b"0\r\n\r\n", b" 501 "),
        (GET % (b"1.1", TE % b" Chunked ") + b"0\r\n\r\n", b" 200 "),
    ],
)
def test_version_host_and_transfer_encoding(
    run_scenario: RunScenario, said: bytes, expected: bytes
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(said)
            assert expected in (await client.reply())[0]

    run_scenario(scenario, Script([HI]))


def test_an_offer_to_upgrade_over_http_1_0_is_ignored_too(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(b"GET /health HTTP/1.0\r\n" + JAVA + H2C + b"\r\n")
            assert b"connection: close" in (await client.head()).lower()
            assert await client.rest() == b'{"status":"ok"}'

    run_scenario(scenario, Script([HI]))


def test_a_body_that_stops_being_http_is_a_400(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        head = f"POST {CALL} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        async with connected(w.url) as client:
            await client.send(head + b"5\r\nhello\r\n")
            await client.send(b"zz\r\n")
            told, body = await client.reply()
            assert b" 400 " in told and orjson.loads(body)["error"]["param"] == "body"
        assert w.engine.requests == []

    run_scenario(scenario, Script([HI]))


# ---------------------------------------------------------------- time-outs


@pytest.mark.parametrize("said", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(
    run_scenario: RunScenario, said: bytes
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(said)
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 408 ") if said else answer == b""

    run_scenario(scenario, Script([HI]), client_timeout_s=0.2)


def test_a_body_that_does_not_come_is_answered_on_every_route(run_scenario: RunScenario) -> None:
    answers = {
        CALL: b" 408 ",
        "/t/g/v1/messages": b" 408 ",
        "/v1/messages/count_tokens": b" 408 ",
        "/rewards": b" 408 ",
        "/sessions": b" 408 ",
        "/submit_steps": b" 408 ",
        "/nowhere": b" 404 ",
        "/health": b" 405 ",
    }

    async def ask(url: str, path: str) -> None:
        async with connected(url) as client:
            await client.send(
                f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                "content-length: 10\r\n\r\n{".encode()
            )
            head, body = await client.reply()
            assert answers[path] in head and b"error" in body
            assert await client.rest() == b""

    async def scenario(w: GatewayFixture) -> None:
        await asyncio.gather(*(ask(w.url, path) for path in answers))
        assert w.steps() == []

    run_scenario(scenario, Script([HI]), client_timeout_s=0.3)


# ---------------------------------------------------------------- clients of all kinds


@pytest.mark.parametrize("split", [False, True])
def test_javas_offer_of_http2_is_ignored(run_scenario: RunScenario, split: bool) -> None:
    """Request bytes of java.net.http.HttpClient in Java 17.0.15, with an HTTP/2 upgrade offer."""
    said = (
        b"POST /t/g/v1/chat/completions HTTP/1.1\r\n" + JAVA + b"Content-Length: %d\r\n"
        b"Host: 127.0.0.1:8100\r\n" + H2C + b"User-Agent: Java-http-client/17.0.15\r\n"
        b"Content-Type: application/json\r\n\r\n"
    ) % len(ASK)

    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            for _ in range(2):
                await client.send(*([said, ASK] if split else [said + ASK]))
                head, body = await client.reply()
                assert head.startswith(b"HTTP/1.1 200 ") and text_of(body) == "Hello"
            await client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n" + JAVA + H2C + b"\r\n")
            assert b" 200 " in (await client.reply())[0]
        assert len(w.steps()) == 2

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize(
    "line", [b"Proxy-Connection: Upgrade", b"Connection: ,upgrade\t", b"CONNECTION: a, UPGRADE"]
)
def test_an_offer_to_upgrade_is_ignored_however_it_is_written(
    run_scenario: RunScenario, line: bytes
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(
                b"GET /health HTTP/1.1\r\nhost: x\r\n" + line + b"\r\n" + H2C + b"\r\n"
            )
            assert b" 200 " in (await client.reply())[0]

    run_scenario(scenario, Script([HI]))


def test_a_websocket_is_still_refused_with_426(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(
                b"GET /v1/responses HTTP/1.1\r\nhost: x\r\n"
                b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n"
            )
            head, body = await client.reply()
            assert b" 426 " in head and orjson.loads(body)["error"]["code"] == "no_websocket"

    run_scenario(scenario, Script([HI]))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_sends_no_more_gets_its_reply(
    run_scenario: RunScenario, version: str
) -> None:
    gate = asyncio.Semaphore(0)

    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(request(version=version))
            client.writer.write_eof()
            await w.until(lambda: w.engine.requests)
            for _ in range(8):
                gate.release()
            head, body = await client.reply()
            if b" 102 " in head:
                head, body = await client.reply()
            assert b" 200 " in head and text_of(body) == "Hello" and await client.rest() == b""

    run_scenario(scenario, Script([HI], gate=gate))


def test_a_streaming_client_that_sends_no_more_gets_its_stream(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(request(body=ASK_STREAM))
            client.writer.write_eof()
            assert b"data: [DONE]" in await client.rest()
        (step,) = w.steps()
        assert step.status == "ok"

    run_scenario(scenario, Script([HI]))


def test_a_stream_over_http_1_0_ends_with_the_connection(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(request(body=ASK_STREAM, version="1.0"))
            head = await client.head()
            assert b"chunked" not in head.lower() and b"connection: close" in head.lower()
            body = await client.rest()
            assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")

    run_scenario(scenario, Script([HI]))


def test_head_tells_what_get_would(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path in (
            "/",
            "/api/hello",
            "/health",
            "/ready",
            "/metrics",
            "/v1/models",
            "/openapi.json",
        ):
            async with connected(w.url) as client:
                await client.send(request("HEAD", path, b"") + request("GET", "/health", b""))
                assert b" 200 " in await client.head(), path
                assert orjson.loads((await client.reply())[1]) == {"status": "ok"}, path

    run_scenario(scenario, Script([HI]))


def test_a_client_that_waits_to_be_asked_for_its_body(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        said = request(body=ASK).removesuffix(ASK)
        async with connected(w.url) as client:
            await client.send(said[:-2] + b"expect: 100-continue\r\n\r\n")
            assert b" 100 " in await client.head()
            await client.send(ASK)
            assert b" 200 " in await client.head()

    run_scenario(scenario, Script([HI]))


def test_a_client_that_leaves_while_the_engine_thinks_is_noticed(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with connected(w.url) as client:
            await client.send(request())
            await w.until(lambda: w.engine.requests)
            client.writer.close()
            await w.until(lambda: w.steps(), SOON_S)
        (step,) = w.steps()
        assert step.status == "aborted"

    run_scenario(scenario, Script([HI], gate=asyncio.Semaphore(0)))
