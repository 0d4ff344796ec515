"""Test authentication, scopes and the trajectory of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clawstream.gateway.attribution.resolver import TrajectoryRef, TrajectoryResolver
from clawstream.gateway.auth.api_keys import Scope, create_key, revoke_key
from clawstream.gateway.auth.authenticator import Authenticator
from clawstream.gateway.errors import BadRequest, Forbidden, WrongKey
from clawstream.gateway.metrics import Metrics
from clawstream.schemas.ids import is_anonymous_session
from clawstream.schemas.settings import Settings


class Gateway:
    """The authenticator and the resolver of one gateway."""

    def __init__(self, settings: Settings) -> None:
        self.authenticator = Authenticator(settings, Metrics())
        self.authenticate = self.authenticator.authenticate
        self.trajectories = TrajectoryResolver(settings.run_id)

    def resolve(
        self,
        headers: Mapping[str, str],
        key: str | None = None,
        group: str | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> TrajectoryRef:
        caller = self.authenticate(headers, "agent")
        return self.trajectories.resolve(caller, headers, key, group, payload)


Make = Callable[..., Gateway]
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}]}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return `make(**gateway settings)`, which makes a gateway; all share secret and keys."""

    def gateway(**gateway: Any) -> Gateway:
        return Gateway(Settings.model_validate({"data_dir": tmp_path, "gateway": gateway}))

    return gateway


@pytest.fixture
def key(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return `key(*scopes, run)`: it creates an API key and returns the headers that carry it."""
    names = iter("abcdefgh")

    def made(*scopes: Scope, run: str | None = None) -> dict[str, str]:
        return bearer(create_key(tmp_path / "api-keys.json", next(names), scopes, run))

    return made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- trajectory


def test_where_a_request_belongs(make: Make) -> None:
    gateway = make()
    nobody = gateway.authenticate({}, "agent")
    session = bearer(gateway.authenticator.session_key(nobody, "r", "t", "g", "val"))

    resolve = gateway.resolve

    assert resolve({}, "t1", "g1") == TrajectoryRef("default", "t1", "g1", None)
    assert resolve(
        {"x-clawstream-run": "x", "x-clawstream-channel": "val"}, "t1", "g1"
    ) == TrajectoryRef("x", "t1", "g1", "val")
    assert resolve({"x-clawstream-trajectory": "t1"}) == TrajectoryRef("default", "t1", None, None)
    named = {"x-clawstream-trajectory": "t1", "x-clawstream-group": "Ã¼ber 7"}
    assert resolve(named) == TrajectoryRef("default", "t1", "über 7", None)
    assert resolve(named, "t2", "g2") == TrajectoryRef("default", "t2", "g2", None)
    assert resolve(session) == TrajectoryRef("r", "t", "g", "val")
    assert resolve({"x-api-key": session["authorization"][7:]}) == TrajectoryRef(
        "r", "t", "g", "val"
    )
    assert resolve(session | {"x-clawstream-channel": "train"}) == TrajectoryRef(
        "r", "t", "g", "train"
    )
    assert resolve(session | {"x-clawstream-run": "other"}).run_id == "r"
    assert resolve(session, "t2", "g2") == TrajectoryRef("r", "t2", "g2", "val")
    assert resolve(session, "t") == TrajectoryRef("r", "t", "g", "val")
    assert resolve(bearer("sk-other"), "t1", "g1") == TrajectoryRef("default", "t1", "g1", None)
    with pytest.raises(BadRequest, match="no trajectory"):
        resolve({})
    with pytest.raises(BadRequest, match="trajectory key"):
        resolve({}, "a,b", "g")


@pytest.mark.parametrize(
    "headers",
    [
        {"x-claude-code-session-id": "s"},
        {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a7"},
        {"session-id": "s", "thread-id": "s", "user-agent": "codex_exec/0.169.0"},
        {
            "session-id": "s",
            "thread-id": "other",
            "x-codex-turn-metadata": "{}",
            "x-codex-parent-thread-id": "s",
        },
        {"x-session-id": "s", "x-session-affinity": "s"},
        {"x-session-id": "child", "x-session-affinity": "child", "x-parent-session-id": "s"},
        {"user-agent": "openclaw/2026.9.6", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"},
    ],
)
def test_a_known_agents_session_is_a_trajectory_of_its_caller(
    make: Make, headers: dict[str, str]
) -> None:
    one, other = make(gateway_id="a"), make(gateway_id="b")
    found = one.resolve(headers | bearer("x"), payload=CHAT)
    assert not is_anonymous_session(found.trajectory_key) and found.group_id is None
    assert found == other.resolve(headers | bearer("x"), payload={"messages": []})
    assert found != one.resolve(headers | bearer("y"), payload=CHAT)
    assert one.resolve(headers, "t", "g", CHAT).trajectory_key == "t"


def test_sub_agents_share_the_trajectory_of_their_session(make: Make) -> None:
    gateway = make()

    def key(**headers: str) -> str:
        return gateway.resolve(
            {k.replace("_", "-"): v for k, v in headers.items()}, payload=CHAT
        ).trajectory_key

    assert key(x_claude_code_session_id="s") == key(
        x_claude_code_session_id="s", x_claude_code_agent_id="a"
    )
    assert key(x_codex_turn_metadata="{}", session_id="s") == key(
        x_codex_turn_metadata="{}",
        session_id="s",
        thread_id="other",
        x_openai_subagent="collab_spawn",
    )
    parent = key(x_session_id="p", x_session_affinity="p")
    assert parent == key(x_session_id="c", x_session_affinity="c", x_parent_session_id="p")
    assert parent != key(x_session_id="c", x_session_affinity="c")


def test_what_is_no_session_falls_into_an_anonymous_session(make: Make) -> None:
    one, other = make(gateway_id="a"), make(gateway_id="b")
    session = one.resolve(bearer("x"), payload=CHAT).trajectory_key
    assert is_anonymous_session(session)
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-session-id": "s"}
    assert other.resolve(bearer("x") | trace, payload=CHAT).trajectory_key == session
    grown = {
        "messages": [
            *CHAT["messages"],
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]
    }
    assert one.resolve(bearer("x"), payload=grown).trajectory_key == session
    assert one.resolve(bearer("y"), payload=CHAT).trajectory_key != session
    assert one.resolve({}, payload=CHAT).trajectory_key != session
    assert one.resolve(bearer("x"), payload={"prompt": "ho"}).trajectory_key != session


# ---------------------------------------------------------------- authentication and scopes


def test_a_host_that_others_reach_is_never_open_by_oversight() -> None:
    def required(**gateway: str) -> bool:
        return Settings.model_validate({"gateway": gateway}).gateway.auth_required

    assert not any(required(host=host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert all(
        required(host=host)
        for host in ("0.0.0.0", "::", "10.0.0.7", "gateway.internal", "127.0.0.1.example")
    )
    assert required(auth="required") and not required(auth="open", host="0.0.0.0")


def test_scopes_hold_where_keys_are_required(
    make: Make, key: Callable[..., dict[str, str]]
) -> None:
    agent, reward, admin = key("agent"), key("reward", "curate"), key("admin")
    gateway = make(auth="required")
    cases: list[tuple[dict[str, str], Scope, type[Exception] | None]] = [
        (agent, "agent", None), (agent, "reward", Forbidden), (agent, "curate", Forbidden),
        (agent, "admin", Forbidden),
        (reward, "reward", None), (reward, "curate", None), (reward, "agent", Forbidden),
        (admin, "agent", None), (admin, "reward", None), (admin, "curate", None),
        (admin, "admin", None),
        ({}, "agent", WrongKey), (bearer("sk-proj-1"), "agent", WrongKey),
        (bearer("claw-wrong"), "agent", WrongKey),
        ({"authorization": agent["authorization"].replace("Bearer", "Basic")}, "agent", WrongKey),
        ({"x-api-key": agent["authorization"][7:]}, "agent", None),
        (
            {"x-api-key": agent["authorization"][7:], "authorization": "Bearer sk-ant-other"},
            "agent", None,
        ),
        ({"api-key": agent["authorization"][7:]}, "agent", None),
        ({"authorization": agent["authorization"].replace("Bearer", "bEARER ")}, "agent", None),
    ]  # fmt: skip
    for headers, scope, error in cases:
        if error is None:
            gateway.authenticate(headers, scope)
        else:
            with pytest.raises((WrongKey, Forbidden)) as raised:
                gateway.authenticate(headers, scope)
            assert raised.type is error and raised.value.param == "authorization"
            assert agent["authorization"][7:] not in raised.value.message


def test_an_open_gateway_asks_for_no_scope_but_refuses_a_wrong_key(
    make: Make, key: Callable[..., dict[str, str]]
) -> None:
    agent = key("agent", run="pinned")
    gateway = make()
    for headers in ({}, agent, bearer("anything")):
        assert gateway.authenticate(headers, "reward").may("admin")
    assert gateway.resolve(agent, "t").run_id == "pinned"
    with pytest.raises(WrongKey):
        gateway.authenticate(bearer("claw-wrong"), "agent")


def test_the_run_of_a_key_is_the_run_of_all_it_writes(
    make: Make, key: Callable[..., dict[str, str]]
) -> None:
    pinned, free = key("agent", run="r-1"), key("agent")
    gateway = make(auth="required")
    assert gateway.resolve(pinned | {"x-clawstream-run": "r-2"}, "t").run_id == "r-1"
    assert gateway.resolve(free | {"x-clawstream-run": "r-2"}, "t").run_id == "r-2"
    caller = gateway.authenticate(pinned, "agent")
    assert gateway.trajectories.run_of(caller, {}, "r-1") == "r-1"
    with pytest.raises(Forbidden, match="r-1") as raised:
        gateway.trajectories.run_of(caller, {}, "r-2")
    assert raised.value.param == "run_id"
    assert gateway.trajectories.run_of(gateway.authenticate(free, "agent"), {}, "r-2") == "r-2"


def test_a_session_key_is_for_its_own_trajectory_and_dies_with_its_api_key(
    make: Make, key: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    agent = key("agent", "reward")
    gateway = make(auth="required")
    opened = TrajectoryRef("r", "t", "g", None)
    opener = gateway.authenticate(agent, "agent")
    session = bearer(gateway.authenticator.session_key(opener, "r", "t", "g"))
    assert gateway.resolve(session) == opened
    caller = gateway.authenticate(session, "agent")
    with pytest.raises(Forbidden, match="lacks the scope 'reward'"):
        gateway.authenticate(session, "reward")
    with pytest.raises(Forbidden):
        gateway.authenticator.require_completion_reward(caller)
    make(auth="required", session_rewards=True).authenticator.require_completion_reward(caller)
    with pytest.raises(Forbidden, match="trajectory 't' only"):
        gateway.trajectories.resolve(caller, {}, "other")
    with pytest.raises(Forbidden):
        gateway.trajectories.resolve(caller, {"x-clawstream-trajectory": "other"})
    nobody = make().authenticate({}, "agent")
    unsigned_for = bearer(make().authenticator.session_key(nobody, "r", "t", "g"))
    with pytest.raises(WrongKey, match="without an API key"):
        gateway.authenticate(unsigned_for, "agent")
    revoke_key(tmp_path / "api-keys.json", "a")
    gateway.authenticator._keys.reload()
    with pytest.raises(WrongKey, match="revoked"):
        gateway.authenticate(session, "agent")
