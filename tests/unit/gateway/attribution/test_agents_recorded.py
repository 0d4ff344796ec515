"""Replay the recorded requests of real agents: test their agent, trajectory and tags.

The recordings, tests/agents/recorded, have shortened texts. tests/agents writes them when it runs
the agents themselves; docs/agents.md explains how to update them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from support.gateway import GatewayFixture, run_gateway
from support.toy_model import Heard, Reply, ToyModel

from clawstream.gateway.attribution.agents import session_of
from clawstream.gateway.attribution.tags import tags_of
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import is_anonymous_session

RECORDED = Path(__file__).parents[3] / "agents" / "recorded"
AGENTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "claude-code": ("claude-code", 1, {"sub_agent": 2, "compaction": 1}),
    "codex": ("codex", 1, {"sub_agent": 2}),
    "codex-compaction": ("codex", 1, {"compaction": 1}),
    "codex-built-in": ("codex", 1, {}),
    # Three user messages and a compaction. Each has its own trace; a session key makes them one
    # session.
    "openclaw": ("openclaw", 4, {"sub_agent": 2, "compaction": 4}),
    "openclaw-run": ("openclaw", 1, {"sub_agent": 2}),
    "openclaw-openai-completions": ("openclaw", 1, {}),
    "openclaw-openai-responses": ("openclaw", 1, {}),
    "openclaw-anthropic-messages": ("openclaw", 1, {}),
}
"""Agent, sessions, how many calls have which tag."""


def recorded(name: str) -> list[dict[str, Any]]:
    found = orjson.loads((RECORDED / f"{name}.json").read_bytes())
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def codec() -> Codec:
    return Codec()


def test_every_recording_is_known() -> None:
    assert {p.stem for p in RECORDED.glob("*.json")} == AGENTS.keys()


def test_the_lock_of_the_agents_has_a_hash_for_every_package_and_names_no_place_to_get_it_from(
) -> None:  # fmt: skip
    packages = orjson.loads((RECORDED.parent / "package-lock.json").read_bytes())["packages"]
    wanted = orjson.loads((RECORDED.parent / "package.json").read_bytes())["dependencies"]
    assert packages[""]["dependencies"] == wanted
    assert all("resolved" not in p for p in packages.values())
    assert [
        n for n, p in packages.items() if n and "integrity" not in p and not p.get("inBundle")
    ] == []


@pytest.mark.parametrize("name", AGENTS)
def test_each_call_is_known_by_its_agent_session_and_tags(name: str) -> None:
    agent, sessions, expected = AGENTS[name]
    found, counted = set(), dict.fromkeys(expected, 0)
    for call in recorded(name):
        if call["method"] == "POST":
            session = session_of(call["headers"], call["body"])
            assert session is not None and session.agent == agent
            found.add(session)
            for tag in tags_of(call["headers"], call["body"]):
                counted[tag.name] += 1
    assert len(found) == sessions
    assert counted == expected


def test_claude_code_is_known_without_its_header_by_what_its_body_says() -> None:
    for call in recorded("claude-code"):
        bare = {k: v for k, v in call["headers"].items() if not k.startswith("x-claude-code")}
        assert session_of(bare, call["body"]) == session_of(call["headers"], call["body"])


@pytest.mark.parametrize("name", AGENTS)
def test_its_requests_are_served_and_kept(name: str, tmp_path: Path, codec: Codec) -> None:
    """Send every request, as recorded, through a whole gateway."""
    _, sessions, expected = AGENTS[name]
    calls = recorded(name)

    def decide(_: Heard) -> Reply:
        return Reply("Yes.")

    async def scenario(trial: GatewayFixture) -> None:
        for call in calls:
            body = orjson.dumps(call["body"]) if "body" in call else None
            headers = call["headers"] | {
                "content-type": "application/json",
                "authorization": "Bearer any",
            }
            async with trial.http.request(
                call["method"], trial.url + call["path"], data=body, headers=headers
            ) as reply:
                told = await reply.read()
                assert reply.status == (200 if body else 426), told
        steps = trial.steps()
        assert len(steps) == sum("body" in c for c in calls)
        assert len({s.trajectory_key for s in steps}) == sessions
        assert not any(is_anonymous_session(s.trajectory_key) for s in steps)
        assert all(s.status == "ok" and s.response_token_ids for s in steps)
        assert sum(len(s.tags) for s in steps) == sum(expected.values())
        assert [orjson.loads(s.request_json) for s in steps] == [
            c["body"] for c in calls if "body" in c
        ]

    run_gateway(tmp_path, codec, scenario, ToyModel(decide))


@pytest.mark.parametrize("path", ["/", "/api/hello"])
def test_the_greeting_of_claude_code_is_answered(path: str, tmp_path: Path, codec: Codec) -> None:
    async def scenario(trial: GatewayFixture) -> None:
        async with trial.http.head(trial.url + path) as reply:
            assert reply.status == 200

    run_gateway(tmp_path, codec, scenario, ToyModel(lambda _: Reply("Yes.")))


def test_a_web_socket_is_refused_with_the_status_at_which_codex_goes_on_over_http(
    tmp_path: Path, codec: Codec
) -> None:
    async def scenario(trial: GatewayFixture) -> None:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await trial.http.ws_connect(trial.url + "/v1/responses")
        assert refused.value.status == 426
        async with trial.http.get(
            trial.url + "/v1/responses", headers={"connection": "close"}
        ) as reply:
            assert reply.status == 405

    run_gateway(tmp_path, codec, scenario, ToyModel(lambda _: Reply("Yes.")))
