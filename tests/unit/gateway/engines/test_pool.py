"""The choice of an engine: registry, order of engines, circuits, kinds, keys. Pure functions."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawstream.gateway.auth.authenticator import credential_of
from clawstream.gateway.engines.circuit_breaker import (
    CLOSED,
    FAILURES,
    LONGEST_PAUSE_S,
    MISSED,
    PAUSE_S,
    Answered,
    Circuit,
    Failed,
    HalfOpenCancelled,
    HalfOpenStarted,
    admits,
    fold,
)
from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.http1 import address_of
from clawstream.gateway.engines.prober import kind_of
from clawstream.gateway.engines.registry import (
    EngineRegistry,
    EngineSpec,
    choose,
    eligible,
)
from clawstream.gateway.errors import BadRequest, GatewayError
from clawstream.gateway.protocols.request_fields import renamed
from clawstream.runtime.process.config import load, overrides_of
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.records import WorkerStatus
from clawstream.schemas.settings import UpstreamSettings

# ---------------------------------------------------------------- the registry


def status(name: str, state: Any = "ready", **more: Any) -> WorkerStatus:
    fields: dict[str, Any] = {
        "worker_id": name, "base_url": f"http://{name}/v1/", "models": ("policy",), "state": state,
        "heartbeat_at": 0, "heartbeat_interval_ms": 2000, "started_at": 0, "loads": 0,
    }  # fmt: skip
    return WorkerStatus(**fields | more)


def names(registry: EngineRegistry, now_s: float) -> list[str]:
    return [w.name for w in registry.ready(now_s)]


def test_workers_come_and_go() -> None:
    registry = EngineRegistry(["http://static:1/v1"])
    registry.update("a", status("a"), 0.0)
    registry.update("b", status("b", "loading"), 0.0)
    both = ["http://static:1/v1", "a"]
    assert names(registry, 0.0) == both
    assert [w.base_url for w in registry.ready(0.0)] == ["http://static:1", "http://a"]
    assert names(registry, 6.0) == both  # three heartbeats of 2 s
    assert names(registry, 6.1) == both[:1]
    assert registry.states(6.1) == {"a": "absent", "b": "absent"}
    registry.update("a", status("a"), 7.0)
    registry.update("b", status("b"), 7.0)
    assert len(registry.ready(7.0)) == 3
    registry.update("a", status("a", "draining"), 7.5)
    registry.update("b", None, 7.5)
    assert names(registry, 7.5) == both[:1] and registry.states(7.5) == {"a": "draining"}
    registry.clear()
    assert registry.states(7.5) == {}


def test_only_a_change_is_told_and_only_a_change_makes_a_new_list() -> None:
    registry, told = EngineRegistry(), []
    registry.subscribe(lambda: told.append(1))
    registry.update("a", status("a"), 0.0)
    first = registry.ready(0.0)
    registry.update("a", status("a", heartbeat_at=1), 2.0)
    assert len(told) == 1 and registry.ready(7.9) is first
    assert registry.ready(8.1) == ()
    registry.update("a", status("a", heartbeat_at=2), 9.0)
    assert len(told) == 2 and registry.ready(9.0) == first
    registry.update("a", status("a", "loading"), 9.0)
    registry.update("a", status("a", "loading", failed_loads=1), 9.0)
    assert registry.failed_loads() == {"a": 1}
    registry.update("a", None, 9.0)
    registry.update("a", None, 9.0)
    assert len(told) == 5


def test_what_the_settings_name() -> None:
    registry = EngineRegistry(
        load(
            None, ['gateway.upstreams=["http://a:1", {url: "http://b/v1", kind: vllm}]'], {}
        ).gateway.upstreams
    )
    a, b = registry.ready(0.0)
    assert (a.name, a.kind, a.kind_known, a.worker_id) == ("http://a:1", "text", False, None)
    assert (b.base_url, b.kind, b.kind_known) == ("http://b", "vllm", True)
    registry.configure(["http://b/v1"])
    assert names(registry, 0.0) == ["http://b/v1"]
    registry.configure(
        ["http://b/v1", {"url": "http://b/v1", "models": ["m"]}]  # type: ignore[list-item]
    )
    assert names(registry, 0.0) == ["http://b/v1", "http://b/v1#2"]


@pytest.mark.parametrize(
    ("url", "base", "root"),
    [
        ("http://h:8000", "http://h:8000", "/v1"),
        ("http://h:8000/v1/", "http://h:8000", "/v1"),
        ("https://h/api/v1", "https://h/api", "/v1"),
        ("https://h/api/paas/v4", "https://h/api/paas", "/v4"),
        ("https://h/v1beta/openai/", "https://h", "/v1beta/openai"),
        ("https://h/anthropic", "https://h/anthropic", "/v1"),
    ],
)
def test_a_base_url_may_have_another_version_than_v1(url: str, base: str, root: str) -> None:
    (worker,) = EngineRegistry([url]).ready(0.0)
    assert (worker.base_url, worker.api_root) == (base, root)


def test_keys_of_engines_come_from_settings_or_environment_and_show_nowhere() -> None:
    upstreams = load(
        None,
        ["gateway.upstreams=[{url: http://a, api_key_env: KEY_A}, {url: http://b, api_key: kb}]"],
        {},
    )
    registry = EngineRegistry(upstreams.gateway.upstreams, {"KEY_A": "ka"})
    assert [w.api_key for w in registry.ready(0.0)] == ["ka", "kb"]
    assert "ka" not in repr(registry.ready(0.0)) and "kb" not in repr(registry.ready(0.0)) + repr(
        upstreams
    )
    with pytest.raises(GatewayError, match="KEY_A, which is not set"):
        EngineRegistry(upstreams.gateway.upstreams, {})
    assert load(None, overrides_of(upstreams), {}) == upstreams


@pytest.mark.parametrize(
    "value",
    [
        "ftp://hunter2",
        "http://me:hunter2@host",
        "http://host?key=hunter2",
        "[{url: http://a, api_key: [hunter2]}]",
        "[{url: http://a, kind: vllm, api_key: {a: hunter2}}]",
        "[{url: http://a, api_key: hunter2, api_key_env: X}]",
        "[{key: hunter2}]",
    ],
)
def test_wrong_upstreams_are_named_and_not_repeated(value: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(None, [f"gateway.upstreams={value if value.startswith('[') else [value]}"], {})
    assert "gateway.upstreams.0" in str(error.value) and "hunter2" not in str(error.value)


def test_a_wrong_kind_is_repeated_because_it_is_no_secret() -> None:
    with pytest.raises(SettingsError, match=r"gateway\.upstreams\.0.*nokind"):
        load(None, ["gateway.upstreams=[{url: http://a, kind: nokind}]"], {})


def test_run_and_model_narrow_the_choice_as_far_as_they_can() -> None:
    a = EngineSpec("a", "", models=("policy",), run_id="r1")
    b = EngineSpec("b", "", models=("policy", "judge"), run_id="r2")
    c = EngineSpec("c", "", models=("big",), model_map={"small": "big"})
    assert eligible([a, b], "r1", "policy") == [a]
    assert eligible([a, b], "r3", "judge") == [b]
    assert eligible([a, b], "r3", None) == [a, b]
    assert eligible([a, b], "r1", "unknown") == [a]
    assert eligible([a, b, c], "r1", "small") == [c]


# ---------------------------------------------------------------- the order


@dataclass
class RankedStub:
    name: str
    in_flight: int = 0


def engines(n: int) -> list[RankedStub]:
    return [RankedStub(f"w{i}") for i in range(n)]


@given(st.integers(2, 6), st.text(max_size=20))
def test_a_trajectory_stays_with_its_engine_when_another_leaves(n: int, key: str) -> None:
    all_of_them = engines(n)
    chosen = choose(all_of_them, key)
    assert chosen in all_of_them and choose(all_of_them[::-1], key) is chosen
    for gone in all_of_them:
        rest = [e for e in all_of_them if e is not gone]
        moved = choose(rest, key)
        assert moved is chosen if gone is not chosen else moved in rest


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_the_first_serves_unless_it_is_crowded(loads: list[int]) -> None:
    first = choose(engines(len(loads)), "t")
    assert first is not None
    loaded = [RankedStub(f"w{i}", load) for i, load in enumerate(loads)]
    (preferred,) = (engine for engine in loaded if engine.name == first.name)
    chosen = choose(loaded, "t")
    assert chosen is not None
    crowded = preferred.in_flight > 2 * max(1, min(loads))
    assert chosen.in_flight == (min(loads) if crowded else preferred.in_flight)
    assert crowded or chosen is preferred


def test_nobody_serves_when_there_is_nobody() -> None:
    assert choose([], "t") is None


def test_trajectories_spread_over_engines() -> None:
    all_of_them = engines(4)
    counts = Counter(chosen.name for i in range(4000) if (chosen := choose(all_of_them, f"t{i}")))
    assert len(counts) == 4 and min(counts.values()) > 800


# ---------------------------------------------------------------- circuits

Happening = Answered | Failed | HalfOpenStarted | HalfOpenCancelled


def after(*events: Happening, since: Circuit = CLOSED) -> Circuit:
    for event in events:
        since = fold(since, event)
    return since


def test_a_connection_that_cannot_be_made_opens_at_once() -> None:
    circuit = after(Failed("call", 0.0, surely=True))
    assert circuit.open_until_s == PAUSE_S
    assert not admits(circuit, 0.0, probed=True)


def test_other_failures_open_when_they_come_in_a_row() -> None:
    fails: Sequence[Happening] = [Failed("call", 0.0)] * (FAILURES - 1)
    assert after(*fails).open_until_s is None
    assert after(*fails, Answered("call", 0.0), *fails).open_until_s is None
    assert after(*fails, Answered("probe", 0.0), Failed("call", 0.0)).open_until_s is not None
    missed: Sequence[Happening] = [Failed("probe", 0.0)] * (MISSED - 1)
    assert after(*missed, Answered("probe", 0.0), *missed).open_until_s is None
    assert after(*missed, Answered("call", 0.0), Failed("probe", 0.0)).open_until_s is not None


def test_a_probe_closes_it_after_the_pause_and_only_then() -> None:
    circuit = after(Failed("call", 10.0, surely=True))
    assert after(Answered("probe", 10.1), since=circuit) == circuit
    assert after(Answered("call", 99.0), since=circuit) == circuit  # was in flight before
    assert after(Answered("probe", 10.6), since=circuit) == Circuit(openings=1)
    again = after(Answered("probe", 10.6), Failed("call", 11.0, surely=True), since=circuit)
    assert again.open_until_s == 12.0  # the pause has doubled
    assert after(Answered("probe", 10.6), Answered("call", 11.0), since=circuit) == CLOSED


def test_where_nothing_is_probed_one_call_at_a_time_tries() -> None:
    circuit = after(Failed("call", 0.0, surely=True))
    assert not admits(circuit, 0.4, probed=False)
    assert admits(circuit, 0.5, probed=False) and not admits(circuit, 0.5, probed=True)
    half_open = after(HalfOpenStarted(), since=circuit)
    assert not admits(half_open, 9.0, probed=False)
    assert admits(after(HalfOpenCancelled(), since=half_open), 9.0, probed=False)
    assert after(Answered("half_open", 9.0), since=half_open) == CLOSED
    worse = after(Failed("half_open", 9.0), since=half_open)
    assert worse.open_until_s == 10.0 and not worse.half_open


happenings = st.one_of(
    st.builds(Answered, st.sampled_from(["call", "half_open", "probe"]), st.just(0.0)),
    st.builds(Failed, st.sampled_from(["call", "half_open", "probe"]), st.just(0.0), st.booleans()),
    st.just(HalfOpenCancelled()),
)


@given(st.lists(st.tuples(happenings, st.floats(0.0, 3.0))), st.booleans())
def test_whatever_happens_an_engine_that_is_well_gets_calls_again(
    story: list[tuple[Happening, float]], probed: bool
) -> None:
    circuit, now, trial = CLOSED, 0.0, False
    for event, passed in story:
        now += passed
        if isinstance(event, Answered | Failed):
            if (event.by == "half_open") > trial or (event.by == "probe") > probed:
                continue  # this event cannot occur now
            event = event._replace(at_s=now)
        before, circuit = circuit, fold(circuit, event)
        trial = circuit.half_open
        if before.open_until_s is not None and circuit.open_until_s is None:
            assert isinstance(event, Answered) and event.by != "call" and now >= before.open_until_s
        assert circuit.open_until_s is None or circuit.open_until_s <= now + LONGEST_PAUSE_S
        if not probed and admits(circuit, now, probed) and circuit.open_until_s is not None:
            circuit, trial = fold(circuit, HalfOpenStarted()), True
            assert not admits(circuit, now, probed)
    later = now + LONGEST_PAUSE_S
    well = Answered("probe", later) if probed else Answered("half_open", later)
    assert admits(fold(circuit, well), later, probed)


# ---------------------------------------------------------------- kinds, heads, keys


@pytest.mark.parametrize(
    ("status", "told", "body", "kind"),
    [
        (200, True, b'{"version":"0.32.0"}', "captured"),
        (200, False, b'{"version":"0.32.0"}', "vllm"),
        (200, False, b"<html>", "text"),
        (200, False, b"[1]", "text"),
        (404, False, b'{"version":"x"}', "text"),
        (401, False, b"", "text"),
        (503, True, b'{"version":"0.32.0"}', None),
        (429, False, b"", None),
    ],
)
def test_what_an_engine_is(status: int, told: bool, body: bytes, kind: str | None) -> None:
    assert kind_of(status, told, body) == kind


def head(
    path: str = "/v1/chat/completions", client: dict[str, str] | None = None, **worker: Any
) -> list[str]:
    """Return the lines of the head of a request."""

    async def made() -> bytes:
        fields: dict[str, Any] = {
            "name": "w",
            "base_url": "http://h:8000",
            "kind": "vllm",
            "kind_known": True,
        }
        engine = Engine(EngineSpec(**fields | worker), lambda: 0.0, 2.0, lambda engine: None)
        return engine.heads.build(
            "POST", path, {"content-type": "application/json"}, client or {}, 3
        )

    text = asyncio.run(made()).decode()
    assert text.endswith("\r\n\r\n")
    return text.split("\r\n")[:-2]


def test_a_request_as_the_engine_gets_it() -> None:
    plain = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: h:8000",
        "accept: */*",
        "accept-encoding: identity",
        "user-agent: clawstream",
        "content-type: application/json",
        "content-length: 3",
    ]
    assert head() == plain
    assert set(head(kind="captured")) - set(plain) == {"x-clawstream-capture: 1"}
    assert head("/v1/messages?beta=true", base_url="https://h/api", api_root="/v4")[:2] == [
        "POST /api/v4/messages?beta=true HTTP/1.1",
        "host: h",
    ]


@pytest.mark.parametrize("path", ["/v1/a b", "/v1/a?b c", "/v1/a\r\nx: y", "/v1/a?\r\n", "/v1/é"])
def test_a_path_cannot_become_more_than_a_path(path: str) -> None:
    with pytest.raises(BadRequest):
        head(path)


@pytest.mark.parametrize(
    ("path", "worker", "sent"),
    [
        ("/v1/messages", {"kind": "vllm"}, "authorization: Bearer k"),
        ("/v1/messages", {"kind": "text"}, "x-api-key: k"),
        (
            "/v1/messages",
            {"kind": "text", "api_key_header": "authorization"},
            "authorization: Bearer k",
        ),
        ("/v1/chat/completions", {"kind": "text"}, "authorization: Bearer k"),
        ("/v1/chat/completions", {"kind": "text", "api_key_header": "x-api-key"}, "x-api-key: k"),
    ],
)
def test_an_engines_own_key(path: str, worker: dict[str, Any], sent: str) -> None:
    lines = head(
        path, {"authorization": "Bearer client"}, api_key="k", forward_credentials=True, **worker
    )
    assert [line for line in lines if "key" in line or "auth" in line] == [sent]


def test_the_clients_keys_stay_here_unless_they_are_the_providers() -> None:
    for ours in ("sk-claw-ours", "claw-ours"):
        client = {"authorization": "Bearer sk-provider", "x-api-key": ours}
        assert head(client=client) == head()
        assert set(head(client=client, forward_credentials=True)) - set(head()) == {
            "authorization: Bearer sk-provider"
        }
        for spelled in (f"Bearer {ours}", f"bearer  \t{ours} ", ours):
            client = {"authorization": spelled, "x-api-key": "claws-of-a-provider"}
            assert credential_of({"authorization": f"Bearer {ours}"}) == ours
            sent = set(head(client=client, forward_credentials=True)) - set(head())
            assert sent == {"x-api-key: claws-of-a-provider"}
    with pytest.raises(BadRequest):
        head(client={"authorization": "a\r\nb: c"}, forward_credentials=True)


def test_another_name_for_the_model_leaves_the_rest_as_it_is() -> None:
    body = (
        '{"model": "small", "seed": 123456789012345678901234567890, "messages": ["é"], "x": 0.1}'
    ).encode()
    assert json.loads(renamed(body, "big")) == json.loads(body) | {"model": "big"}
    assert b"123456789012345678901234567890" in renamed(body, "big") and "é".encode() in renamed(
        body, "big"
    )
    assert renamed(b"[1]", "big") == b"[1]" and renamed(b"{", "big") == b"{"


def test_addresses() -> None:
    assert address_of("https://h/a/") == ("h", 443, True, "/a")
    assert address_of("http://[::1]:8").header == "[::1]:8"
    assert (address_of("http://h").header, address_of("http://h:443").header) == ("h", "h:443")
    assert address_of("http://müller.example/x").host == "xn--mller-kva.example"
    for wrong in ("h:80", "http://", "http://a@h", "http://h:x", "http://h:0"):
        with pytest.raises(ValueError, match=r"not http|Port|port"):
            address_of(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        "http://h/a b",
        "http://h/é",
        "http://h/a\x00",
        "http://a..b",
        f"http://{'a' * 64}:80",
        "http://a b",
        "http://[::g]",
    ],
)
def test_an_address_that_no_request_can_name_is_refused_where_it_is_given(wrong: str) -> None:
    with pytest.raises(ValueError):
        address_of(wrong)
    with pytest.raises((GatewayError, ValueError), match=r"gateway\.upstreams|UpstreamSettings"):
        EngineRegistry([wrong])


@pytest.mark.parametrize("key", ["a\nb: c", "a\r", "k\x00", "ключ", "a b"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(GatewayError, match="EXAMPLE_KEY") as error:
        EngineRegistry(
            [UpstreamSettings(url="http://h", api_key_env="EXAMPLE_KEY")], {"EXAMPLE_KEY": key}
        )
    assert repr(key) not in str(error.value)
    with pytest.raises(GatewayError, match="http://h") as error:
        EngineRegistry([UpstreamSettings(url="http://h", api_key=key)])


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\n", "a\x00"])
def test_no_header_value_can_become_a_header(value: str) -> None:
    async def made() -> None:
        engine = Engine(EngineSpec("w", "http://h"), lambda: 0.0, 2.0, lambda engine: None)
        with pytest.raises(BadRequest):
            engine.heads.build("POST", "/v1/x", {"x-request-id": value}, {}, None)

    asyncio.run(made())
