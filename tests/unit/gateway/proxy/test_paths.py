"""Which paths a client may take, what is said of the others, and how much a key may do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway
from support.raw_http import ASK, connected, request
from support.scripted.script import Script, ScriptedChoice
from support.wire import ASK as SAID
from yarl import URL

from clawstream.gateway.auth.api_keys import ApiKey, create_key, digest_of
from clawstream.gateway.auth.key_limits import KeyLimits, tokens_of_reply
from clawstream.gateway.clock import Clock
from clawstream.gateway.errors import KeyLimited
from clawstream.gateway.proxy.paths import (
    CallTarget,
    canonical,
    normalized,
    parse_target,
    proxy_prefix,
)
from clawstream.schemas.codec.single_object import Codec

CODEC = Codec()
RunScenario = Callable[..., None]
HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
TAILS = {"completions": ["/chat/completions", "/completions"], "models": ["/models"]}


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return `run_scenario`, which runs an async scenario against its own gateway."""
    return partial(run_gateway, tmp_path, CODEC)


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("/v1/chat/completions", CallTarget("/chat/completions")),
        ("/t/g/chat/completions", CallTarget("/chat/completions", "t", "g")),
        ("/t/g/v1/completions", CallTarget("/completions", "t", "g")),
        ("/v1/models/a/b", CallTarget("/models/", item="a/b")),
        ("/t/g/v1/models/m", CallTarget("/models/", "t", "g", "m")),
        ("/v1/responses/r", None),
        (
            "/t/gsm8k%2Ftrain-5/v1/chat/completions",
            CallTarget("/chat/completions", "t", "gsm8k/train-5"),
        ),
        ("/t/100%2525/completions", CallTarget("/completions", "t", "100%25")),
        ("/v1/models/a%2Fb", CallTarget("/models/", item="a/b")),
        ("/v1/models/a%2F..%2Fb", None),
        ("/t/v1/chat/completions", None),
        ("/openai/deployments/d/chat/completions", None),
        ("/v1/models/a/../b", None),
    ],
)
def test_places(path: str, target: CallTarget | None) -> None:
    assert parse_target(path, TAILS) == target


@pytest.mark.parametrize(
    ("path", "tidy"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/t/g/v1/v1/v1/chat//completions//", "/t/g/v1/chat/completions"),
        ("/v1/v10", "/v1/v10"),
        ("/", "/"),
    ],
)
def test_paths_are_taken_as_they_were_meant(path: str, tidy: str) -> None:
    assert normalized(path) == tidy


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/%63ompletions", "/v1/chat/completions"),
        ("/t/a%2fb%3A/x", "/t/a%2Fb:/x"),
        ("/t/%C3%A4%20%25/x", "/t/%C3%A4%20%25/x"),
        ("/t/%2e%2E/x", "/t/../x"),
    ],
)
def test_a_path_is_escaped_in_one_way(raw: str, path: str) -> None:
    assert canonical(raw) == path


def test_the_urls_of_a_session_lead_to_it_whatever_its_group(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for group in ("gsm8k/train-5", "100% of Ä?#", "a%2Fb", "/", "..."):
            opening = {"group_id": group, "trajectory_key": "t:1@x"}
            async with w.http.post(w.url + "/sessions", json=opening) as reply:
                url = URL((await reply.json())["path_base_url"], encoded=True)
            call = URL(f"{url}/chat/completions", encoded=True)
            end = URL(f"{url}/complete_trajectory", encoded=True)
            async with w.http.post(call, data=ASK) as reply:
                assert reply.status == 200, await reply.text()
            async with w.http.post(end) as reply:
                assert reply.status == 200, await reply.text()
            opened, step, ended = w.records()[-3:]
            for record in (opened, step, ended):
                assert (record.trajectory_key, record.group_id) == ("t:1@x", group)

    run_scenario(scenario, Script([HI]))


def test_a_proxys_prefix_is_no_trajectory() -> None:
    for path in ("/api/openai/v1/chat/completions", "/OpenAI/x/chat/completions", "/v1/x/models"):
        assert proxy_prefix(path, parse_target(path, TAILS)) is not None
    for path in ("/api-7/openai/v1/chat/completions", "/api/hello", "/complete_trajectory/api"):
        assert proxy_prefix(path, parse_target(path, TAILS)) is None
    assert proxy_prefix("/api/x/complete_trajectory", None) == "api"


def test_calls_of_clients_with_an_untidy_base_url(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path in (
            "/v1/chat/completions/",
            "//v1/chat/completions",
            "/v1/v1/chat/completions",
            "/health/",
        ):
            async with connected(w.url) as client:
                await client.send(request("GET" if "health" in path else "POST", path))
                assert b" 200 " in (await client.reply())[0], path
        for path in (
            "/api/openai/v1/chat/completions",
            "/openai/v1/chat/completions",
            "/foo/chat/completions",
            "/foo",
        ):
            async with w.http.post(w.url + path, json=SAID) as reply:
                error = (await reply.json())["error"]
                assert reply.status == 404 and "/TRAJECTORY/PROMPT/v1" in error["message"], path
                assert "gateway.base_path" in error["message"]
        assert len(w.steps()) == 3

    run_scenario(scenario, Script([HI]))


def test_a_base_path_stands_before_all_paths(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path in (
            "/api/openai/v1/chat/completions",
            "/api/openai/t/g/v1/chat/completions",
            "/v1/chat/completions",
        ):
            async with w.http.post(w.url + path, json=SAID) as reply:
                assert reply.status == 200, path
        async with w.http.post(w.url + "/api/openai/sessions", json={}) as reply:
            session = await reply.json()
        assert session["base_url"] == w.url + "/api/openai/v1"
        async with w.http.post(session["path_base_url"] + "/chat/completions", json=SAID) as reply:
            assert reply.status == 200
        async with w.http.post(w.url + "/api/openai/init_trajectory") as reply:
            begun = await reply.json()
        assert begun["base_url"].startswith(f"{w.url}/api/openai/{begun['trajectory_uid']}/")
        async with w.http.get(w.url + "/api/openai/docs") as reply:
            assert reply.status == 200 and "/embeddings" in (await reply.json())["paths"]
        async with w.http.get(w.url + "/api/openai/nowhere") as reply:
            assert "HOST:PORT/api/openai/v1" in (await reply.json())["error"]["message"]
        assert [step.trajectory_key for step in w.steps()][1::2] == ["t", session["trajectory_key"]]

    run_scenario(scenario, Script([HI]), base_path="/api/openai")


def test_docs_need_nothing_from_elsewhere(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.get(w.url + "/docs") as reply:
            page = await reply.text()
        assert reply.status == 200 and orjson.loads(page)["info"]["title"] == "Clawstream gateway"
        assert "/v1/models/{id}" in orjson.loads(page)["paths"]

    run_scenario(scenario, Script([HI]))


# ---------------------------------------------------------------- limits of keys


def key(**limits: Any) -> ApiKey:
    return ApiKey(
        name="k", sha256=digest_of("claw-x").hex(), scopes=("agent",), created_at=0, **limits
    )


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.s = 90_000.0
        self.clock = Clock(micros=lambda: int(self.s * 1e6), monotonic=lambda: self.s)


def refused(limits: KeyLimits, who: ApiKey) -> int:
    with pytest.raises(KeyLimited, match="the key 'k' is at its limit") as error:
        limits.begin(who)
    return error.value.retry_after_s


def test_calls_a_minute_come_back_with_time() -> None:
    time = Time()
    limits, who = KeyLimits(time.clock), key(calls_per_minute=6)
    for _ in range(6):
        limits.end(limits.begin(who), 0)
    assert refused(limits, who) == 10
    time.s += 9
    assert refused(limits, who) == 1
    time.s += 1
    assert limits.begin(who) is not None
    assert refused(limits, who) == 10


def test_calls_at_once_and_tokens_a_day() -> None:
    time = Time()
    limits, who = KeyLimits(time.clock), key(calls_at_once=1, tokens_per_day=100)
    for _ in range(2):
        use = limits.begin(who)
        assert refused(limits, who) == 1
        limits.end(use, 60)
    assert refused(limits, who) == 2 * 86400 - 90_000
    time.s = 2 * 86400
    assert limits.begin(who) is not None
    assert refused(limits, who) == 1


def test_calls_without_a_limit_always_begin() -> None:
    limits = KeyLimits(Time().clock)
    assert limits.begin(None) is None and limits.begin(key()) is None
    limits.end(None, 5)


@pytest.mark.parametrize(
    ("reply", "tokens"),
    [
        (b'{"usage":{"prompt_tokens":8,"total_tokens":8}}', 8),
        (b'{"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":2}}', 9),
        (b'{"usage":{"total_tokens":5}}', 5),
        (b'{"usage":{"completion_tokens":5}}', 5),
        (b'{"usage":{"total_tokens":-5}}', 0),
        (b'{"usage":null}', 0), (b'{"input_tokens":7}', 0), (b"[]", 0), (b"no JSON", 0),
    ],
)  # fmt: skip
def test_tokens_of_a_reply_that_is_not_recorded(reply: bytes, tokens: int) -> None:
    assert tokens_of_reply(reply) == tokens


def test_generate_counts_for_the_limits_of_a_key(run_scenario: RunScenario, tmp_path: Path) -> None:
    token = create_key(
        tmp_path / "api-keys.json", "k", ["agent"], tokens_per_day=6, calls_at_once=1
    )
    asked = {"prompt_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3}}

    async def scenario(w: GatewayFixture) -> None:
        sent = {"authorization": f"Bearer {token}"}
        async with w.http.post(w.url + "/generate", json=asked, headers=sent) as reply:
            assert reply.status == 200 and len((await reply.json())["token_ids"]) == 3
        for path in ("/generate", "/v1/chat/completions"):
            async with w.http.post(w.url + path, json=asked | SAID, headers=sent) as reply:
                assert reply.status == 429 and int(reply.headers["retry-after"]) > 0, path

    run_scenario(scenario, Script([HI]))


def test_a_key_at_its_limit_gets_429_over_every_protocol(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    token = create_key(tmp_path / "api-keys.json", "k", ["agent"], tokens_per_day=6)

    async def scenario(w: GatewayFixture) -> None:
        sent = {"authorization": f"Bearer {token}"}
        async with w.http.post(w.url + "/v1/chat/completions", data=ASK, headers=sent) as reply:
            assert reply.status == 200  # three tokens of the prompt, three of the reply
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/t/g/v1/responses"):
            async with w.http.post(w.url + path, data=ASK, headers=sent) as reply:
                error = (await reply.json())["error"]
                assert reply.status == 429 and int(reply.headers["retry-after"]) > 0
                assert (
                    error["type"] == ("rate_limit_error") and "tokens_per_day=6" in error["message"]
                )
        assert len(w.engine.requests) == 1
        async with w.http.post(w.url + "/v1/chat/completions", data=ASK) as reply:
            assert reply.status == 200

    run_scenario(scenario, Script([HI]))
