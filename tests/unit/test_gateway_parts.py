"""The pure parts of the gateway: events, session keys, workers, the chat dialect, steps."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.disconnect import Client
from gateway.errors import BadRequest, ClientGone, WrongKey
from gateway.sessions import Origin, SessionKeys, origin_of, secret_of
from gateway.sse import Splitter, data_of
from gateway.workers import Worker, WorkerTable, choose, suited
from schemas.events import WorkerStatus
from schemas.settings import Settings

# ---------------------------------------------------------------- server-sent events


@given(st.lists(st.binary(min_size=1, max_size=12).filter(lambda b: b"\n" not in b and b"\r" not in b)), st.data())
def test_events_come_out_whole_however_they_come_in(lines: list[bytes], data: st.DataObject) -> None:
    ends = [data.draw(st.sampled_from([b"\n\n", b"\r\n\r\n"])) for _ in lines]
    stream = b"".join(b"data: " + line + end for line, end in zip(lines, ends, strict=True))
    splitter, out, at = Splitter(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 9))
        out += splitter.feed(stream[at : at + size])
        at += size
    assert out == [b"data: " + line + end for line, end in zip(lines, ends, strict=True)]
    assert [data_of(event) for event in out] == lines


def test_data_of_other_events() -> None:
    assert data_of(b": comment\n\n") is None
    assert data_of(b"event: ping\ndata: 1\ndata:2\n\n") == b"1\n2"


# ---------------------------------------------------------------- session keys


def test_session_key_says_what_was_minted_and_nothing_else() -> None:
    keys, origin = SessionKeys(b"secret"), Origin("run-1", "t:1", "task über", "val")
    key = keys.mint(origin)
    assert key.startswith("sk-claw-") and keys.read(key) == origin
    assert keys.read(keys.mint(Origin("r", "t", None, None))) == Origin("r", "t", None, None)
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


def test_secret_is_made_once_for_all_gateways_of_a_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "d")
    secret = secret_of(settings)
    assert secret == secret_of(settings) and len(secret) > 30
    assert stat.S_IMODE((tmp_path / "d/session-secret").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["session-secret"]
    assert secret_of(Settings.model_validate({"gateway": {"session_secret": "given"}})) == b"given"


def test_where_a_request_belongs() -> None:
    keys = SessionKeys(b"s")
    bearer = {"authorization": "Bearer " + keys.mint(Origin("r", "t", "g", "val"))}
    assert origin_of({}, keys, "d", "t1", "g1") == Origin("d", "t1", "g1", None)
    assert origin_of({"x-clawstream-run": "x", "x-clawstream-channel": "val"}, keys, "d", "t1", "g1") == Origin(
        "x", "t1", "g1", "val"
    )
    assert origin_of(bearer, keys, "d") == Origin("r", "t", "g", "val")
    assert origin_of(bearer | {"x-clawstream-channel": "train"}, keys, "d") == Origin("r", "t", "g", "train")
    assert origin_of(bearer, keys, "d", "t2", "g2") == Origin("r", "t2", "g2", "val")
    assert origin_of(bearer, keys, "d", "t") == Origin("r", "t", "g", "val")
    assert origin_of({"authorization": "Bearer sk-other"}, keys, "d", "t1", "g1") == Origin("d", "t1", "g1", None)
    with pytest.raises(WrongKey):
        origin_of({}, keys, "d")
    with pytest.raises(BadRequest, match="trajectory key"):
        origin_of({}, keys, "d", "a,b", "g")


# ---------------------------------------------------------------- workers


def status(name: str, state: Any = "ready", **more: Any) -> WorkerStatus:
    fields: dict[str, Any] = {
        "worker_id": name, "base_url": f"http://{name}/v1/", "models": ("policy",), "state": state, "heartbeat_at": 0,
        "heartbeat_interval_ms": 2000, "started_at": 0, "loads": 0,
    }  # fmt: skip
    return WorkerStatus(**fields | more)


def test_workers_come_and_go() -> None:
    table = WorkerTable(["http://static:1/v1"])
    table.hear("a", status("a"), 0.0)
    table.hear("b", status("b", "loading"), 0.0)
    names = [w.name for w in table.ready(0.0)]
    assert names == ["http://static:1/v1", "a"]
    assert [w.base_url for w in table.ready(0.0)] == ["http://static:1", "http://a"]
    assert [w.name for w in table.ready(6.0)] == names  # three heartbeats of 2 s
    assert [w.name for w in table.ready(6.1)] == ["http://static:1/v1"]
    table.hear("a", status("a"), 7.0)
    table.hear("b", status("b"), 7.0)
    assert len(table.ready(7.0)) == 3
    table.hear("a", status("a", "draining"), 7.5)
    table.hear("b", None, 7.5)
    assert [w.name for w in table.ready(7.5)] == ["http://static:1/v1"]


@given(st.integers(2, 6), st.text(max_size=20))
def test_a_trajectory_stays_with_its_worker_when_another_leaves(n: int, key: str) -> None:
    workers = [Worker(f"w{i}", f"http://w{i}") for i in range(n)]
    chosen = choose(workers, key, {})
    assert chosen is not None
    for gone in workers:
        if gone is not chosen:
            assert choose([w for w in workers if w is not gone], key, {}) == chosen


def test_a_crowded_worker_gives_way() -> None:
    workers = [Worker("a", ""), Worker("b", "")]
    affine = choose(workers, "k", {})
    assert affine is not None
    other = next(w for w in workers if w is not affine)
    assert choose(workers, "k", {affine.name: 2}) == affine
    assert choose(workers, "k", {affine.name: 3}) == other
    assert choose(workers, "k", {affine.name: 6, other.name: 3}) == affine
    assert choose(workers, "k", {affine.name: 7, other.name: 3}) == other
    assert choose([], "k", {}) is None


def test_trajectories_spread_over_workers() -> None:
    workers = [Worker(f"w{i}", "") for i in range(4)]
    counts: dict[str, int] = {}
    for i in range(2000):
        chosen = choose(workers, f"t{i}", {})
        assert chosen is not None
        counts[chosen.name] = counts.get(chosen.name, 0) + 1
    assert min(counts.values()) > 400


def test_run_and_model_narrow_the_choice_as_far_as_they_can() -> None:
    a = Worker("a", "", models=("policy",), run_id="r1")
    b = Worker("b", "", models=("policy", "judge"), run_id="r2")
    assert suited([a, b], "r1", "policy") == [a]
    assert suited([a, b], "r3", "judge") == [b]
    assert suited([a, b], "r3", None) == [a, b]
    assert suited([a, b], "r1", "unknown") == [a]


# ---------------------------------------------------------------- a client that leaves


def test_leaving_cancels_what_is_awaited_and_only_that() -> None:
    async def body() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        client = Client(receive)
        async with client:
            await asyncio.sleep(0)
        assert not client.gone
        with pytest.raises(ClientGone):
            async with client:
                left.set()
                await asyncio.sleep(60)
        await asyncio.sleep(0)  # nothing is left over that would cancel us
        with pytest.raises(ClientGone):
            await client.__aenter__()

    asyncio.run(body())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def body() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def work() -> None:
            client = Client(receive)
            try:
                async with client:
                    await asyncio.sleep(60)
            finally:
                client.done()

        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
