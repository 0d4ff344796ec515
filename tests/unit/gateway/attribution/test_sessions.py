"""Test authentication, scopes and the trajectory of a request."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.attribution.conversation import first_user_turn, last_user_text, system_text
from gateway.attribution.resolver import Door
from gateway.attribution.sessions import KEPT, Session, SessionKeys, TrajectoryRef, secret_of
from gateway.auth.api_keys import Scope, create_key, revoke_key
from gateway.errors import BadRequest, Forbidden, WrongKey
from gateway.metrics import Metrics
from schemas.errors import SettingsError
from schemas.ids import is_bucket
from schemas.settings import Settings

Make = Callable[..., Door]
CHAT = {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}]}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return `make(**gateway settings)`, which creates a resolver; all share secret and keys."""

    def door(**gateway: Any) -> Door:
        return Door(Settings.model_validate({"data_dir": tmp_path, "gateway": gateway}), Metrics())

    return door


@pytest.fixture
def key(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Return `key(*scopes, run)`: it creates an API key and returns the headers that carry it."""
    names = iter("abcdefgh")

    def made(*scopes: Scope, run: str | None = None) -> dict[str, str]:
        return bearer(create_key(tmp_path / "api-keys.json", next(names), scopes, run))

    return made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- session keys


def test_session_key_says_what_was_minted_and_nothing_else() -> None:
    keys, origin = SessionKeys(b"secret"), TrajectoryRef("run-1", "t:1", "task über", "val")
    key = keys.mint(origin, "0123456789ab")
    assert key.startswith("sk-claw-") and keys.read(key) == Session(origin, "0123456789ab")
    assert keys.read(keys.mint(TrajectoryRef("r", "t", None, None))) == Session(
        TrajectoryRef("r", "t", None, None), None
    )
    for wrong in (
        key[:-1],
        key + "A",
        key.replace("sk-claw-", "sk-claw-A"),
        "sk-claw-",
        "sk-claw-..",
        key.split(".")[0],
    ):
        with pytest.raises(WrongKey):
            keys.read(wrong)
    with pytest.raises(WrongKey):
        SessionKeys(b"other").read(key)


def test_known_session_keys_are_bounded_and_a_wrong_one_is_not_remembered() -> None:
    keys, origin = SessionKeys(b"secret"), TrajectoryRef("r", "t", None, None)
    key = keys.mint(origin)
    for n in range(KEPT + 10):
        assert keys.find(key, n.to_bytes(32, "big")).origin == origin
    assert len(keys._known) == KEPT
    for _ in range(2):
        with pytest.raises(WrongKey):
            keys.find(key + "x", b"digest of the wrong key")


def test_secret_is_made_once_for_all_gateways_of_a_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "d")
    secret = secret_of(settings)
    assert secret == secret_of(settings) and len(secret) > 30
    assert stat.S_IMODE((tmp_path / "d/session-secret").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["session-secret"]
    given = "given by a person"
    assert (
        secret_of(Settings.model_validate({"gateway": {"session_secret": given}})) == given.encode()
    )


@pytest.mark.parametrize("secret", ["", " " * 40, "fifteen-of-them"])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, secret: str) -> None:
    with pytest.raises(
        SettingsError, match=r"setting gateway\.session_secret: .* at least 16"
    ) as error:
        secret_of(Settings.model_validate({"gateway": {"session_secret": secret}}))
    assert secret == "" or secret not in str(error.value)
    (tmp_path / "session-secret").write_text(secret + "\n")
    with pytest.raises(SettingsError, match=r"session-secret: .* at least 16.*[Dd]elete"):
        secret_of(Settings(data_dir=tmp_path))


# ---------------------------------------------------------------- trajectory


def test_where_a_request_belongs(make: Make) -> None:
    door = make()
    nobody = door.authenticate({}, "agent")
    session = bearer(door.mint(nobody, TrajectoryRef("r", "t", "g", "val")))

    def admit(
        headers: dict[str, str], key: str | None = None, group: str | None = None
    ) -> TrajectoryRef:
        return door.admit(headers, "agent", key, group)

    assert admit({}, "t1", "g1") == TrajectoryRef("default", "t1", "g1", None)
    assert admit(
        {"x-clawstream-run": "x", "x-clawstream-channel": "val"}, "t1", "g1"
    ) == TrajectoryRef("x", "t1", "g1", "val")
    assert admit({"x-clawstream-trajectory": "t1"}) == TrajectoryRef("default", "t1", None, None)
    named = {"x-clawstream-trajectory": "t1", "x-clawstream-group": "Ã¼ber 7"}
    assert admit(named) == TrajectoryRef("default", "t1", "über 7", None)
    assert admit(named, "t2", "g2") == TrajectoryRef("default", "t2", "g2", None)
    assert admit(session) == TrajectoryRef("r", "t", "g", "val")
    assert admit({"x-api-key": session["authorization"][7:]}) == TrajectoryRef("r", "t", "g", "val")
    assert admit(session | {"x-clawstream-channel": "train"}) == TrajectoryRef(
        "r", "t", "g", "train"
    )
    assert admit(session | {"x-clawstream-run": "other"}).run_id == "r"
    assert admit(session, "t2", "g2") == TrajectoryRef("r", "t2", "g2", "val")
    assert admit(session, "t") == TrajectoryRef("r", "t", "g", "val")
    assert admit(bearer("sk-other"), "t1", "g1") == TrajectoryRef("default", "t1", "g1", None)
    with pytest.raises(BadRequest, match="no trajectory"):
        admit({})
    with pytest.raises(BadRequest, match="trajectory key"):
        admit({}, "a,b", "g")


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
    found = one.admit(headers | bearer("x"), "agent", said=CHAT)
    assert not is_bucket(found.trajectory_key) and found.group_id is None
    assert found == other.admit(headers | bearer("x"), "agent", said={"messages": []})
    assert found != one.admit(headers | bearer("y"), "agent", said=CHAT)
    assert one.admit(headers, "agent", "t", "g", CHAT).trajectory_key == "t"


def test_sub_agents_share_the_trajectory_of_their_session(make: Make) -> None:
    door = make()

    def key(**headers: str) -> str:
        return door.admit(
            {k.replace("_", "-"): v for k, v in headers.items()}, "agent", said=CHAT
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


def test_what_is_no_session_falls_into_a_bucket(make: Make) -> None:
    one, other = make(gateway_id="a"), make(gateway_id="b")
    bucket = one.admit(bearer("x"), "agent", said=CHAT).trajectory_key
    assert is_bucket(bucket)
    trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "x-session-id": "s"}
    assert other.admit(bearer("x") | trace, "agent", said=CHAT).trajectory_key == bucket
    grown = {
        "messages": [
            *CHAT["messages"],
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "b"},
        ]
    }
    assert one.admit(bearer("x"), "agent", said=grown).trajectory_key == bucket
    assert one.admit(bearer("y"), "agent", said=CHAT).trajectory_key != bucket
    assert one.admit({}, "agent", said=CHAT).trajectory_key != bucket
    assert one.admit(bearer("x"), "agent", said={"prompt": "ho"}).trajectory_key != bucket


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
    door = make(auth="required")
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
            door.authenticate(headers, scope)
        else:
            with pytest.raises((WrongKey, Forbidden)) as raised:
                door.authenticate(headers, scope)
            assert raised.type is error and raised.value.param == "authorization"
            assert agent["authorization"][7:] not in raised.value.message


def test_an_open_door_asks_for_no_scope_but_refuses_a_wrong_key(
    make: Make, key: Callable[..., dict[str, str]]
) -> None:
    agent = key("agent", run="pinned")
    door = make()
    for headers in ({}, agent, bearer("anything")):
        assert door.authenticate(headers, "reward").may("admin")
    assert door.admit(agent, "agent", "t").run_id == "pinned"
    with pytest.raises(WrongKey):
        door.authenticate(bearer("claw-wrong"), "agent")


def test_the_run_of_a_key_is_the_run_of_all_it_writes(
    make: Make, key: Callable[..., dict[str, str]]
) -> None:
    pinned, free = key("agent", run="r-1"), key("agent")
    door = make(auth="required")
    assert door.admit(pinned | {"x-clawstream-run": "r-2"}, "agent", "t").run_id == "r-1"
    assert door.admit(free | {"x-clawstream-run": "r-2"}, "agent", "t").run_id == "r-2"
    caller = door.authenticate(pinned, "agent")
    assert door.run_of(caller, {}, "r-1") == "r-1"
    with pytest.raises(Forbidden, match="r-1") as raised:
        door.run_of(caller, {}, "r-2")
    assert raised.value.param == "run_id"
    assert door.run_of(door.authenticate(free, "agent"), {}, "r-2") == "r-2"


def test_a_session_key_is_for_its_own_trajectory_and_dies_with_its_api_key(
    make: Make, key: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    agent = key("agent", "reward")
    door = make(auth="required")
    opened = TrajectoryRef("r", "t", "g", None)
    session = bearer(door.mint(door.authenticate(agent, "agent"), opened))
    assert door.admit(session, "agent") == opened
    caller = door.authenticate(session, "agent")
    with pytest.raises(Forbidden, match="lacks the scope 'reward'"):
        door.authenticate(session, "reward")
    with pytest.raises(Forbidden):
        door.require_completion_reward(caller)
    make(auth="required", session_rewards=True).require_completion_reward(caller)
    with pytest.raises(Forbidden, match="trajectory 't' only"):
        door.origin(caller, {}, "other")
    with pytest.raises(Forbidden):
        door.origin(caller, {"x-clawstream-trajectory": "other"})
    unsigned_for = bearer(make().mint(make().authenticate({}, "agent"), opened))
    with pytest.raises(WrongKey, match="without an API key"):
        door.authenticate(unsigned_for, "agent")
    revoke_key(tmp_path / "api-keys.json", "a")
    door._keys.reload()
    with pytest.raises(WrongKey, match="revoked"):
        door.authenticate(session, "agent")


# ---------------------------------------------------------------- first user turn

TEXT = {"type": "text", "text": "hi"}


@pytest.mark.parametrize(
    "said",
    [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": [TEXT]}]},
        {
            "messages": [
                {"role": "user", "content": [TEXT | {"cache_control": {"type": "ephemeral"}}]}
            ],
            "system": "x",
        },
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "b"},
            ]
        },
        {"input": "hi", "instructions": "x"},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {
            "input": [
                {"type": "message", "role": "user", "content": "hi"},
                {"type": "function_call", "name": "f"},
            ]
        },
        {"prompt": "hi"},
    ],
)  # fmt: skip
def test_one_conversation_begins_with_the_same_words_in_every_call(said: dict[str, Any]) -> None:
    assert first_user_turn(said) == b"hi"


def test_what_else_a_conversation_may_begin_with() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}

    def turn(*blocks: Any) -> bytes:
        return first_user_turn({"messages": [{"role": "user", "content": list(blocks)}]})

    assert turn(TEXT, image) == turn(TEXT | {"cache_control": {}}, image) != turn(TEXT)
    assert first_user_turn({"prompt": [1, 2]}) == b"[1,2]" != first_user_turn({"prompt": [[1, 2]]})
    assert first_user_turn({"messages": [{"role": "assistant", "content": "a"}]}) != b""
    nothing: list[dict[str, Any]] = [{}, {"messages": []}, {"messages": None}, {"prompt": None}]
    for empty in nothing:
        assert first_user_turn(empty) == b""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "user", "messages"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=20,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "input", "prompt", "system", "instructions"]), JSON
    )
)
def test_nothing_that_a_body_says_breaks_the_reading_of_its_turns(said: dict[str, Any]) -> None:
    said = orjson.loads(orjson.dumps(said))
    assert isinstance(first_user_turn(said), bytes)
    assert isinstance(system_text(said) + last_user_text(said, 10), str)
