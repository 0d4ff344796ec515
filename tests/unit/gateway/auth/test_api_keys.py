"""API keys: their file, the command line, and gateways that read the file while it changes."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.auth.api_keys import KeyRing, create_key, digest_of, read_keys, revoke_key
from clawstream.gateway.auth.authenticator import Authenticator
from clawstream.gateway.errors import KeysUnreadable, KeyTaken, NoSuchKey, Unprocessable
from clawstream.gateway.metrics import Metrics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import Curation
from clawstream.schemas.settings import Settings

CODEC = Codec()
ASK: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
REWARD = {"trajectory_id": "t", "source": "env", "name": "x", "function_version": "1", "value": 1.0}
STEP = "t~01ARZ3NDEKTSV4RRFFQ69G5FAV.0"
ANONYMOUS = "anonymous-" + "0" * 32
AGENT = "agent-codex-" + "0" * 32
RunScenario = Callable[..., None]


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    return partial(run_gateway, tmp_path, CODEC)


def script() -> Script:
    return Script([ScriptedChoice([7, 8], ["Hel", "lo"], [-0.5, -0.25])])


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():  # noqa: ASYNC110 - the condition is external
            await asyncio.sleep(0.05)


# ---------------------------------------------------------------- the file


def test_only_hashes_are_kept_and_only_the_owner_may_read_them(tmp_path: Path) -> None:
    path = tmp_path / "deep/keys.json"
    key = create_key(path, "a", ["agent", "agent", "reward"], "run-1", 123)
    assert key.startswith("claw-") and len(key) == 48
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text() and key[5:] not in path.read_text()
    (kept,) = read_keys(path)
    assert (kept.name, kept.scopes, kept.run_id, kept.expires_at) == (
        "a",
        ("agent", "reward"),
        "run-1",
        123,
    )
    assert bytes.fromhex(kept.sha256) == digest_of(key) and kept.sha256.startswith(kept.key_id)
    assert sorted(p.name for p in path.parent.iterdir()) == ["keys.json", "keys.json.lock"]


def test_names_are_unique_and_a_key_is_revoked_by_name_or_id(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, "a", ["agent"])
    create_key(path, "b", ["agent"])
    with pytest.raises(KeyTaken):
        create_key(path, "a", ["reward"])
    assert revoke_key(path, "a").name == "a"
    assert revoke_key(path, read_keys(path)[0].key_id).name == "b"
    with pytest.raises(NoSuchKey):
        revoke_key(path, "a")
    assert read_keys(path) == ()


@pytest.mark.parametrize(
    ("name", "scopes", "run", "field"),
    [
        ("a b", ["agent"], None, "name"),
        ("a", [], None, "scopes"),
        ("a", ["root"], None, "scopes"),
        ("a", ["agent"], "R", "run_id"),
    ],
)
def test_a_key_that_cannot_be_is_refused_by_field(
    tmp_path: Path, name: str, scopes: list[Any], run: str | None, field: str
) -> None:
    with pytest.raises(Unprocessable) as raised:
        create_key(tmp_path / "keys.json", name, scopes, run)
    assert raised.value.param == field and not (tmp_path / "keys.json").exists()


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(lambda n: create_key(path, f"k{n}", ["agent"]), range(40)))
    ring = KeyRing(path)
    assert len(ring) == 40 and all(ring.by_digest(digest_of(k)) for k in keys)


def test_a_ring_takes_in_changes_and_forgets_what_expired(tmp_path: Path) -> None:
    path, now = tmp_path / "keys.json", 100.0
    ring = KeyRing(path, lambda: now)
    assert len(ring) == 0 and not ring.reload()
    a, b = (create_key(path, n, ["agent"], expires_at=e) for n, e in (("a", None), ("b", 101)))
    assert ring.by_digest(digest_of(a)) is None
    assert ring.reload() and not ring.reload()
    (of_a, of_b) = (ring.by_digest(digest_of(k)) for k in (a, b))
    assert of_a is not None and of_b is not None and ring.by_id(of_b.key_id) == of_b
    now = 101.0
    assert (
        ring.by_digest(digest_of(b)) is None
        and ring.by_id(of_b.key_id) is None
        and ring.by_digest(digest_of(a))
    )
    path.unlink()
    assert ring.reload() and len(ring) == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"keys":[{"name":"a"}]}', '{"version":2}', '{"keys":[],"x":1}']
)
def test_a_broken_file_changes_nothing_for_a_running_gateway_and_stops_a_new_one(
    tmp_path: Path, text: str
) -> None:
    settings = Settings(data_dir=tmp_path)
    path = settings.api_keys_file
    key = create_key(path, "a", ["agent"])
    ring = KeyRing(path)
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(KeysUnreadable, match=r"api-keys\.json"):
            ring.reload()
    assert ring.by_digest(digest_of(key)) is not None
    with pytest.raises(KeysUnreadable):
        Authenticator(settings, Metrics())


def test_an_error_of_the_file_shows_nothing_that_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "a", "sha256": "claw-in-plain-by-mistake"}]}))
    with pytest.raises(KeysUnreadable) as raised:
        read_keys(path)
    assert "by-mistake" not in str(raised.value)


# ---------------------------------------------------------------- the command line


def clawstream(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clawstream", *words, f"data_dir={directory}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_command_line_tells_a_key_once(tmp_path: Path) -> None:
    made = clawstream(
        tmp_path,
        "keys",
        "create",
        "--name",
        "ci",
        "--scope",
        "agent",
        "--scope",
        "reward",
        "--run",
        "r-1",
    )
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    settings = Settings.model_validate({"data_dir": tmp_path, "gateway": {"auth": "required"}})
    caller = Authenticator(settings, Metrics()).authenticate({"x-api-key": key}, "reward")
    assert caller.run_id == "r-1"
    listed = clawstream(tmp_path, "keys", "list").stdout
    assert "ci" in listed and "agent,reward" in listed and "r-1" in listed and key not in listed
    assert clawstream(tmp_path, "keys", "revoke", "ci").stdout.startswith("revoked ci")
    again = clawstream(tmp_path, "keys", "revoke", "ci")
    assert again.returncode == 1 and again.stderr.startswith("clawstream: no key is named 'ci'")
    wrong = clawstream(tmp_path, "keys", "create", "--name", "x", "--scope", "root")
    assert wrong.returncode == 1 and "agent, reward, curate, admin" in wrong.stderr


@pytest.mark.slow
def test_limits_are_given_and_listed_on_the_command_line(tmp_path: Path) -> None:
    create = partial(clawstream, tmp_path, "keys", "create", "--scope", "agent", "--name")
    made = create("k", "--calls-per-minute", "600", "--tokens-per-day", "5000")
    assert made.returncode == 0, made.stderr
    (key,) = read_keys(tmp_path / "api-keys.json")
    assert (key.calls_per_minute, key.calls_at_once, key.tokens_per_day) == (600, None, 5000)
    assert key.limited
    listed = clawstream(tmp_path, "keys", "list").stdout.splitlines()
    assert listed[1].split()[-3:] == ["600", "-", "5000"]
    wrong = create("other", "--calls-at-once", "0")
    assert wrong.returncode == 1 and "calls_at_once" in wrong.stderr


# ---------------------------------------------------------------- a gateway


def test_a_gateway_that_needs_keys_refuses_in_the_shape_of_the_protocol(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    agent = create_key(tmp_path / "api-keys.json", "agent", ["agent"])

    async def scenario(w: GatewayFixture) -> None:
        for path, method in (
            ("/t/g/v1/chat/completions", "POST"),
            ("/v1/chat/completions", "POST"),
            ("/v1/models", "GET"),
            ("/rewards", "POST"),
            ("/sessions", "POST"),
            ("/curations", "POST"),
            ("/complete_trajectory/t", "POST"),
            ("/t/g/register_trajectory", "POST"),
        ):
            for headers in (
                {},
                {"authorization": "Bearer claw-wrong"},
                {"x-api-key": "sk-claw-x.y"},
            ):
                async with w.http.request(method, w.url + path, json=ASK, headers=headers) as r:
                    error = (await r.json())["error"]
                    assert (r.status, error["type"]) == (401, "authentication_error"), path
        for path, body in (
            ("/rewards", REWARD),
            ("/curations", {"trajectory_id": "t", "trainable": False}),
            ("/complete_trajectory/t", {"reward": 1e3}),
        ):
            async with w.http.post(w.url + path, json=body, headers={"x-api-key": agent}) as r:
                error = (await r.json())["error"]
                assert (r.status, error["type"], error["code"]) == (
                    403,
                    "permission_error",
                    "insufficient_scope",
                ), path
        assert w.producer.messages == [] and w.engine.requests == []
        for name in ("authorization", "x-api-key", "api-key"):
            value = f"Bearer {agent}" if name == "authorization" else agent
            async with w.http.post(
                w.url + "/t/g/v1/chat/completions", json=ASK, headers={name: value}
            ) as r:
                assert r.status == 200, await r.text()
        assert agent not in str(w.engine.headers)
        for path in ("/health", "/metrics"):
            assert (await w.http.get(w.url + path)).status == 200
        assert await w.metric('clawstream_gateway_keys_refused_total{reason="scope"}') == 3
        assert await w.metric('clawstream_gateway_keys_refused_total{reason="unknown"}') == 24

    run_scenario(scenario, script(), auth="required")


def test_a_key_made_or_revoked_counts_without_a_restart(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    path = tmp_path / "api-keys.json"

    async def scenario(w: GatewayFixture) -> None:
        key = create_key(path, "agent", ["agent"])

        async def status_is(status: int) -> bool:
            async with w.http.post(
                w.url + "/t/g/v1/chat/completions", json=ASK, headers={"x-api-key": key}
            ) as r:
                return r.status == status

        await eventually(lambda: status_is(200))
        async with w.http.post(w.url + "/sessions", headers={"x-api-key": key}) as r:
            session = {"authorization": f"Bearer {(await r.json())['session_key']}"}
        async with w.http.post(w.url + "/sessions/complete", headers=session) as r:
            assert r.status == 200
        revoke_key(path, "agent")
        await eventually(lambda: status_is(401))
        async with w.http.post(w.url + "/sessions/complete", headers=session) as r:
            assert r.status == 401

    run_scenario(scenario, script(), auth="required")


def test_who_opened_a_session_may_reward_it_and_its_agent_may_not(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    headers = {
        "x-api-key": create_key(tmp_path / "api-keys.json", "env", ["agent", "reward"], "r-1")
    }

    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/sessions", json={"run_id": "r-2"}, headers=headers) as r:
            assert r.status == 403 and (await r.json())["error"]["param"] == "run_id"
        async with w.http.post(
            w.url + "/sessions", json={"trajectory_key": "t", "group_id": "g"}, headers=headers
        ) as r:
            session = {"authorization": f"Bearer {(await r.json())['session_key']}"}
        async with w.http.post(w.url + "/v1/chat/completions", json=ASK, headers=session) as r:
            assert r.status == 200
        for path, body in (
            ("/sessions/complete", {"reward": 1e6}),
            ("/rewards", REWARD),
            ("/complete_trajectory/other", {}),
            ("/sessions", {"trajectory_key": "other"}),
        ):
            async with w.http.post(w.url + path, json=body, headers=session) as r:
                assert r.status == 403, path
        async with w.http.post(
            w.url + "/complete_trajectory/t", json={"reward": 0.5}, headers=headers
        ) as r:
            assert r.status == 200
        opened, step, reward, completed = w.records()
        assert {r.run_id for r in (opened, step, reward, completed)} == {"r-1"}
        assert (reward.value, completed.kind, step.group_id) == (0.5, "completed", "g")

    run_scenario(scenario, script(), auth="required")


def test_an_environment_with_nothing_but_its_session_may_be_allowed_to_reward(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    headers = {"x-api-key": create_key(tmp_path / "api-keys.json", "env", ["agent"])}

    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/sessions", headers=headers) as r:
            session = {"authorization": f"Bearer {(await r.json())['session_key']}"}
        async with w.http.post(w.url + "/rewards", json=REWARD, headers=session) as r:
            assert r.status == 403
        for value, status in ((11, 422), (1, 200)):
            async with w.http.post(
                w.url + "/sessions/complete", json={"reward": value}, headers=session
            ) as r:
                assert r.status == status
                assert status == 200 or (await r.json())["error"]["param"] == "reward"
        assert [type(r).__name__ for r in w.records()] == ["SessionEvent", "Reward", "SessionEvent"]

    run_scenario(scenario, script(), auth="required", session_rewards=True, reward_max=10)


# ---------------------------------------------------------------- curations and anonymous sessions


def test_curations_say_who_and_a_repeated_mark_counts_again(
    run_scenario: RunScenario, tmp_path: Path
) -> None:
    headers = {"x-api-key": create_key(tmp_path / "api-keys.json", "ann", ["curate"])}

    async def scenario(w: GatewayFixture) -> None:
        bodies = (
            {"trajectory_id": "t", "quality": 0.5, "tags": ["good", "short"], "note": "fine"},
            {"step_id": STEP, "trainable": False, "by": "bob"},
            {"trajectory_id": "t", "tags": []},
            {"trajectory_id": "t", "tags": []},
        )
        for body in bodies:
            async with w.http.post(w.url + "/curations", json=body, headers=headers) as r:
                assert r.status == 201, await r.text()
        first, second, third, again = w.records()
        assert all(isinstance(r, Curation) and r.trajectory_key == "t" for r in w.records())
        assert (first.quality, first.trainable, first.tags, first.note, first.by) == (
            0.5,
            None,
            ("good", "short"),
            "fine",
            "ann",
        )
        assert (second.step_id, second.trainable, second.tags, second.by) == (
            STEP,
            False,
            None,
            "bob",
        )
        assert third.tags == () and third.event_id != again.event_id
        assert all(m.topic == "claw.rewards" for m in w.producer.messages)

    run_scenario(scenario, script())


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("/curations", {"trajectory_id": "t"}, 422, "quality"),
    ("/curations", {"trajectory_id": "t", "trainable": True}, 422, "by"),
    ("/curations", {"trajectory_id": "t", "quality": 1.5, "by": "me"}, 422, "quality"),
    ("/curations", {"trajectory_id": "t", "trainable": 1, "by": "me"}, 422, "trainable"),
    ("/curations", {"trajectory_id": "t", "tags": ["x"] * 51, "by": "me"}, 422, "tags"),
    (
        "/curations",
        {"trajectory_id": "t", "takes_back": "e", "quality": 1.0, "by": "me"},
        422,
        "takes_back",
    ),
    ("/curations", {"trainable": True, "by": "me"}, 422, "trajectory_id"),
    (
        "/curations",
        {"trajectory_id": ANONYMOUS, "trainable": True, "by": "me"},
        422,
        "trajectory_id",
    ),
    ("/rewards", REWARD | {"value": 11}, 422, "value"),
    ("/rewards", REWARD | {"value": -11}, 422, "value"),
    ("/rewards", REWARD | {"trajectory_id": ANONYMOUS}, 422, "trajectory_id"),
    ("/rewards", REWARD | {"trajectory_id": f"{ANONYMOUS}~x"}, 422, "trajectory_id"),
    ("/rewards", REWARD | {"trajectory_id": "t~01ARZ3NDEKTSV4RRFFQ69G5FAV"}, 422, "trajectory_id"),
    ("/rewards", REWARD | {"trajectory_id": AGENT}, 422, "trajectory_id"),
    ("/curations", {"trajectory_id": AGENT, "trainable": True, "by": "me"}, 422, "trajectory_id"),
    (f"/complete_trajectory/{AGENT}", {}, 422, "step_id"),
    ("/sessions", {"trajectory_key": AGENT}, 422, "trajectory_key"),
    ("/complete_trajectory/t", {"reward": 11}, 422, "reward"),
    (f"/complete_trajectory/{ANONYMOUS}", {}, 422, "step_id"),
    (f"/{ANONYMOUS}/g/v1/complete_trajectory", {"reward": 1}, 422, "step_id"),
    ("/complete_trajectory/u", {"step_id": STEP}, 422, "step_id"),
    ("/sessions/complete", {"step_id": "x"}, 422, "step_id"),
    ("/sessions", {"trajectory_key": ANONYMOUS}, 422, "trajectory_key"),
    (f"/{ANONYMOUS}/g/register_trajectory", {}, 422, "trajectory_key"),
]


def test_what_cannot_be_said_of_a_key_of_the_gateway_or_by_nobody_names_the_field(
    run_scenario: RunScenario,
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        for path, body, status, param in WRONG:
            async with w.http.post(w.url + path, json=body) as r:
                error = (await r.json())["error"]
                assert (r.status, error["param"]) == (status, param), (path, body, error)
        assert w.producer.messages == []

    run_scenario(scenario, script(), reward_min=-10, reward_max=10)


@pytest.mark.parametrize("headers", [{}, {"x-claude-code-session-id": "s"}])
def test_a_step_says_which_trajectory_of_a_key_of_the_gateway_is_meant(
    run_scenario: RunScenario, headers: dict[str, str]
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        async with w.http.post(w.url + "/v1/chat/completions", json=ASK, headers=headers) as r:
            assert r.status == 200
            key, step = r.headers["x-clawstream-trajectory"], r.headers["x-clawstream-step"]
        assert key.startswith("agent-claude-code-" if headers else "anonymous-")
        of_trajectory = REWARD | {"trajectory_id": step.partition(".")[0], "step_id": step}
        for path, body, status in (
            ("/rewards", REWARD | {"trajectory_id": key, "step_id": step}, 201),
            ("/rewards", of_trajectory, 201),
            ("/sessions/complete", {"step_id": step, "reward": 0.5}, 200),
            (f"/complete_trajectory/{key}", {"step_id": step, "reward": 0.5}, 200),
        ):
            async with w.http.post(w.url + path, json=body) as r:
                assert r.status == status, (path, await r.text())
        recorded, reward, _, of_end, end, _, again = w.records()
        alone = REWARD | {"trajectory_id": of_trajectory["trajectory_id"]}
        async with w.http.post(w.url + "/rewards", json=alone) as r:
            assert r.status == 201, await r.text()
        assert (w.records()[-1].trajectory_id, w.records()[-1].step_id) == (
            step.partition(".")[0],
            None,
        )
        assert {r.trajectory_key for r in w.records()} == {key}
        assert (recorded.step_id, reward.step_id, of_end.step_id, end.step_id) == (
            step,
            step,
            step,
            step,
        )
        assert end.event_id == again.event_id and all(
            m.key == key.encode() for m in w.producer.messages
        )

    run_scenario(scenario, script())


def test_a_file_that_others_can_write_is_warned_about(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    create_key(path, "a", ["agent"])
    with capture_logs() as logs:
        ring = KeyRing(path)
        assert not logs
        for mode, warned in ((0o620, True), (0o606, True), (0o640, False)):
            path.chmod(mode)
            assert ring.reload() and len(ring) == 1
            assert [line["event"] for line in logs] == ["api_keys_writable_by_others"] * warned
            logs.clear()


@pytest.mark.parametrize(("key", "status"), [("sk-claw-chat", 200), ("sk-claw-chat.x", 401)])
def test_a_text_that_begins_like_a_session_key_is_a_text(
    run_scenario: RunScenario, key: str, status: int
) -> None:
    async def scenario(w: GatewayFixture) -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with w.http.post(w.url + "/v1/chat/completions", json=ASK, headers=headers) as r:
            assert r.status == status
        assert key not in str(w.engine.headers)
        assert len(w.steps()) == (status == 200)

    run_scenario(scenario, script(), auth="open")
