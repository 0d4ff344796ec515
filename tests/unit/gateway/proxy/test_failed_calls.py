"""Records of failed model calls, which never delay or fail a reply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.auth.api_keys import create_key
from clawstream.gateway.proxy.failed_calls import MESSAGE_CHARS, engine_failure
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import FailedCall

HI = ScriptedChoice([7, 8, 9], ["Hel", "lo", ""], [-0.5, -0.25, -0.125])
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/t1/g1/v1/chat/completions"
CODEC = Codec()
RunScenario = Callable[..., None]


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    return partial(run_gateway, tmp_path, CODEC)


async def post(w: GatewayFixture, path: str = CHAT, body: Any = ASK, **headers: str) -> int:
    async with w.http.post(w.url + path, json=body, headers=headers) as reply:
        await reply.read()
        return reply.status


async def told(w: GatewayFixture, count: int = 1) -> list[FailedCall]:
    """So many records of failed calls, and nothing else, on the topic of steps."""
    await w.until(lambda: len(w.failed_calls()) == count)
    assert len(w.producer.messages) == count and {m.topic for m in w.producer.messages} == {
        "claw.steps"
    }
    return w.failed_calls()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 429, 500])
def test_an_engines_error_is_told(run_scenario: RunScenario, status: int, stream: bool) -> None:
    async def scenario(w: GatewayFixture) -> None:
        headers = {
            "user-agent": "agent/1",
            "x-clawstream-channel": "val",
            "idempotency-key": "once",
            "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01",
        }
        assert await post(w, body=ASK | {"stream": stream}, **headers) == status
        (failed,) = await told(w)
        assert (failed.run_id, failed.trajectory_key, failed.group_id, failed.channel) == (
            "default",
            "t1",
            "g1",
            "val",
        )
        assert (failed.protocol, failed.model, failed.streamed) == ("openai.chat", "policy", stream)
        assert (failed.source, failed.status, failed.engine) == ("engine", status, w.engine_url)
        assert failed.message == "scripted" and failed.error_type is not None
        assert (failed.user_agent, failed.idempotency_key) == ("agent/1", "once")
        assert failed.traceparent == headers["traceparent"]
        assert failed.duration_ms > 0 and failed.received_at > 0
        assert w.producer.messages[0].key == b"t1" and failed.event_id.startswith("t1~")
        assert await w.metric('clawstream_gateway_failed_calls_total{fate="recorded"}') == 1

    run_scenario(scenario, Script([HI], status=status))


def test_the_gateways_own_refusals_are_told_once_the_key_was_checked(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, body={"model": "policy", "messages": "none"}) == 400
        assert await post(w, "/v1/chat/completions", {"messages": 1}) == 400
        assert (
            await post(w, "/v1/chat/completions", {"messages": 1}, **{"x-clawstream-run": "No Run"})
            == 400
        )
        named, unnamed = await told(w, 2)
        assert (named.source, named.status, named.error_type) == (
            "gateway",
            400,
            "invalid_request_error",
        )
        assert (
            named.message == "messages: must be a list of message objects" and named.engine is None
        )
        assert (named.trajectory_key, named.model, named.streamed) == ("t1", None, False)
        assert (unnamed.trajectory_key, unnamed.run_id) == (None, "default")
        assert w.producer.messages[1].key == unnamed.event_id.encode()
        assert await w.metric('clawstream_gateway_failed_calls_total{fate="lost"}') == 1, (
            "no run could be of that name"
        )

    run_scenario(scenario, Script([HI]))


GENERATE: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "sampling_params": {"max_tokens": 3, "model": "policy"},
}


def test_an_engines_error_to_generate_is_told(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, "/generate", GENERATE, **{"user-agent": "agent/1"}) == 429
        (failed,) = await told(w)
        assert (failed.protocol, failed.model, failed.streamed) == (
            "claw-r1.generate",
            "policy",
            False,
        )
        assert (failed.source, failed.status, failed.engine) == ("engine", 429, w.engine_url)
        assert (failed.run_id, failed.trajectory_key, failed.user_agent) == (
            "default",
            None,
            "agent/1",
        )
        assert failed.message == "scripted" and failed.duration_ms > 0

    run_scenario(scenario, Script([HI], status=429))


def test_the_gateways_own_refusals_of_generate_are_told(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, "/generate", {"prompt_ids": []}) == 422
        assert await post(w, "/generate", {"prompt_ids": [1] * 100_000}) == 413
        assert await post(w, "/generate", GENERATE) == 200
        assert await post(w, "/generate", GENERATE, authorization="Bearer claw-unknown") == 401
        empty, large = await told(w, 2)
        assert (empty.source, empty.status, empty.model, empty.engine) == (
            "gateway",
            422,
            None,
            None,
        )
        assert empty.message.startswith("prompt_ids: ")
        assert (large.status, large.error_type) == (413, "invalid_request_error")

    run_scenario(scenario, Script([HI]), max_body_bytes=100_000)


def test_generate_with_a_key_at_its_limit_is_told(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    token = create_key(tmp_path / "api-keys.json", "k", ["agent"], tokens_per_day=5)

    async def scenario(w: GatewayFixture) -> None:
        sent = {"authorization": f"Bearer {token}"}
        assert [await post(w, "/generate", GENERATE, **sent) for _ in range(2)] == [200, 429]
        (failed,) = await told(w)
        assert (failed.source, failed.status, failed.error_type) == (
            "gateway",
            429,
            "rate_limit_error",
        )

    run_scenario(scenario, Script([HI]))


def test_a_call_with_a_wrong_key_leaves_nothing(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, authorization="Bearer claw-unknown") == 401
        assert await post(w, body=ASK | {"messages": None}) == 401
        assert (
            w.producer.messages == []
            and await w.metric("clawstream_gateway_failed_calls_total") == 0
        )

    run_scenario(scenario, Script([HI]), auth="required")


def test_no_engine_is_a_503_that_is_told(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w) == 503
        (failed,) = await told(w)
        assert (failed.source, failed.status, failed.engine) == ("gateway", 503, None)
        assert failed.error_type == "server_error"

    run_scenario(scenario, Script([HI]), upstreams=["http://127.0.0.1:9"], worker_wait_s=0.1)


def test_a_stream_that_fails_before_its_first_token_is_told(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, body=ASK | {"stream": True}) == 200
        (failed,) = await told(w)
        assert (failed.source, failed.status, failed.streamed) == ("engine", 500, True)

    run_scenario(scenario, Script([HI], fail_after=0))


def test_a_stream_that_fails_behind_a_token_is_a_step_and_no_failed_call(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, body=ASK | {"stream": True}) == 200
        assert [s.status for s in w.steps()] == ["error"] and w.failed_calls() == []

    run_scenario(scenario, Script([HI], fail_after=2))


@pytest.mark.parametrize("away", ["reachable", "acknowledges"])
def test_without_kafka_the_error_is_answered_all_the_same_and_counted(
    run_scenario: RunScenario, away: str
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        setattr(w.producer, away, False)
        assert await post(w) == 500
        while not await w.metric(
            'clawstream_gateway_failed_calls_total{fate="lost"}'
        ):  # told behind the reply
            pass
        assert w.producer.messages == [] and w.spooled() == []

    run_scenario(scenario, Script([HI], status=500))


def test_a_log_that_takes_its_time_holds_no_error_up(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        w.producer.gate.clear()
        assert [await post(w) for _ in range(3)] == [500] * 3
        assert w.producer.messages == []
        w.producer.gate.set()
        assert len(await told(w, 3)) == 3

    run_scenario(scenario, Script([HI], status=500))


def test_secrets_are_taken_out_of_what_an_error_quotes(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        secret = "sk-ant-api03-" + "a" * 40
        assert await post(w, body=ASK | {"n": secret}) == 400
        assert (
            await post(
                w, body=ASK, **{"user-agent": f"agent {secret}", "x-clawstream-channel": "none"}
            )
            == 400
        )
        failed = await told(w, 2)
        assert secret.encode() not in b"".join(m.value for m in w.producer.messages)
        assert failed[1].user_agent is not None and failed[1].user_agent.startswith("agent ")

    run_scenario(scenario, Script([HI]), redaction={"enabled": True})


@pytest.mark.parametrize(
    ("body", "error_type", "message"),
    [
        (
            b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}',
            "BadRequestError",
            "too long",
        ),
        (
            b'{"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}',
            "overloaded_error",
            "busy",
        ),
        (b'{"error": "model not found"}', None, "model not found"),
        (b'{"detail": "Not Found"}', None, "Not Found"),
        (b'{"message": "no", "type": 7}', None, "no"),
        (b'{"error": {"code": 1}}', None, '{"error": {"code": 1}}'),
        (b"<html>502</html>", None, "<html>502</html>"),
        (b"[]", None, "[]"),
        (b"\xff", None, "\ufffd"),
        (b"", None, ""),
    ],
)
def test_what_an_engines_error_says(body: bytes, error_type: str | None, message: str) -> None:
    failure = engine_failure(500, body)
    assert (failure.source, failure.status, failure.error_type, failure.message) == (
        "engine",
        500,
        error_type,
        message,
    )


def test_a_long_message_is_cut(run_scenario: RunScenario) -> None:
    async def scenario(w: GatewayFixture) -> None:
        assert await post(w, "/v1/chat/completions", ASK | {"model": "m" * 10_000, "n": "x"}) == 400
        (failed,) = await told(w)
        assert len(failed.message) <= MESSAGE_CHARS and (
            failed.model is None or len(failed.model) == 200
        )

    run_scenario(scenario, Script([HI]))
