"""Test the rollout budget of a run as the gateway serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.admit import SOURCE, cand, entries, policy, refused
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.gateway.auth.api_keys import Scope, create_key
from clawstream.gateway.engines.registry import EngineRegistry
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import (
    Channel,
    PolicyApplied,
    ReadyBatch,
    Refused,
    WeightVersion,
    WorkerStatus,
)
from clawstream.stream_jobs.admit.decisions.budget import LISTED, BudgetFold
from clawstream.stream_jobs.admit.decisions.journal import Invalid, JournalRecord
from clawstream.stream_jobs.admit.fold import AdmissionFold

CODEC = Codec()
SCRIPT = Script([ScriptedChoice([7], ["x"], [-0.5])])
RunScenario = Callable[..., None]


def version(sync_index: int, run: str = "r", attempt: int = 0) -> WeightVersion:
    return WeightVersion(
        version_id=f"{run}/{sync_index}.{attempt}", run_id=run, sync_index=sync_index,
        attempt=attempt, format="full", files=(), channel="train", metrics={}, created_at=0,
    )  # fmt: skip


def applied(**changes: Any) -> PolicyApplied:
    return PolicyApplied(
        run_id="r",
        channel="train",
        policy=policy(**changes),
        input_topic_id="topic-1",
        from_offset=0,
    )


def journal_of(*events: Any) -> list[JournalRecord]:
    """Return the journal that the real admission writes for a log of candidates."""
    state = AdmissionFold("r", "train", SOURCE)
    return [d for e in entries(*events) for d in state.fold(e) if not isinstance(d, Invalid)]


def reading(*records: JournalRecord | WeightVersion, channel: Channel = "train") -> BudgetReading:
    """Return what the gateway reads after these records of the journal and the weights log."""
    fold, newest, offset = BudgetFold("r", channel, "memory"), None, 0
    for record in records:
        if isinstance(record, WeightVersion):
            newest = record.sync_index if record.run_id == "r" else newest
        else:
            fold.apply(offset, record)
            offset += 1
    return BudgetReading(fold.budget(), newest, 0.0)


# ---------------------------------------------------------------- refusals after an offset


def test_refusals_after_an_offset_and_those_that_are_not_listed() -> None:
    now = reading(*(refused(f"g{i}", 1) for i in range(LISTED + 10)))
    missing = [gap for _, gap in map(now.refusals_after, (None, 8, 9, LISTED))]
    assert missing == [True, True, False, False]
    assert [r.offset for r in now.refusals_after(LISTED + 7)[0]] == [LISTED + 8, LISTED + 9]


@given(st.lists(st.one_of(st.integers(0, 3), st.none()), max_size=40))
def test_a_poller_that_goes_on_from_the_last_offset_sees_each_refusal_once(
    events: list[int | None],
) -> None:
    """Mix polls and records: None is a poll, a number is a refusal that requests that many."""
    records, after, seen, asked = list[JournalRecord](), None, list[str](), 0
    for n in (*events, None):
        if n is not None:
            records.append(refused(f"g{len(records)}", n))
            continue
        now = reading(*records)
        new, missing = now.refusals_after(after)
        assert not missing
        seen += [r.group_id for r in new]
        asked += sum(r.n for r in new)
        after = new[-1].offset if new else after
        assert asked == now.budget.replacements_total
    numbers = [n for n in events if n is not None]
    assert seen == [f"g{i}" for i, n in enumerate(numbers) if n] and asked == sum(numbers)


# ---------------------------------------------------------------- validation rounds


def test_a_validation_round_is_due_for_each_nth_version_that_every_engine_has_loaded() -> None:
    def due(channel: Channel, every: int | None, at: int | None, loaded: int | None) -> int | None:
        versions = [] if at is None else [version(at)]
        return reading(applied(), *versions, channel=channel).validation_due(every, loaded)

    assert [due("val", 3, at, None) for at in (None, 0, 2, 3, 5, 6)] == [None, 0, 0, 3, 3, 6]
    assert due("val", 3, 6, 5) == 3, "an engine still samples with version 5"
    assert due("val", None, 6, None) is None and due("train", 3, 6, None) is None


# ---------------------------------------------------------------- staleness capacity


@given(
    sync_every=st.integers(1, 3), batch_groups=st.integers(1, 3), limit=st.integers(0, 2),
    at=st.integers(0, 3), batches=st.integers(0, 6), behind=st.integers(0, 2),
)  # fmt: skip
def test_so_many_groups_and_not_one_more_pass_the_real_gate(
    sync_every: int, batch_groups: int, limit: int, at: int, batches: int, behind: int
) -> None:
    """Check the free capacity against the real admission, with groups of one trajectory.

    As many groups as are free, all of the slowest engine's version, are admitted. The groups of the
    next batch are refused.
    """
    rules = policy(
        group_size=1, min_members=1, algorithm="reinforce", sync_every=sync_every,
        batch_groups=batch_groups, max_staleness=limit,
    )  # fmt: skip
    loaded = max(0, at - behind)
    before = [cand(f"b{i}", f"b{i}", oldest_sync_index=99) for i in range(batches * batch_groups)]
    journal = journal_of(rules, *before)
    now = reading(*journal, version(at))
    free = now.free_capacity(loaded)
    assert now.budget.next_batch_seq == batches and free is not None
    more = [cand(f"n{i}", f"n{i}", oldest_sync_index=loaded) for i in range(free + batch_groups)]
    told = journal_of(rules, *before, *more)[len(journal) :]
    assert sum(len(d.groups) for d in told if isinstance(d, ReadyBatch)) == free
    assert [d.reason for d in told if isinstance(d, Refused)] == ["stale"] * batch_groups


def test_capacity_when_there_is_no_bound_and_when_nothing_is_known() -> None:
    bound, first = applied(max_staleness=1, batch_groups=4), version(0)
    assert reading(bound, first).free_capacity() == 8
    assert reading(bound, first, channel="val").free_capacity() is None
    assert reading(applied(), first).free_capacity() is None
    assert reading(bound).free_capacity() == 0, (
        "nothing that is begun now is of a version of this run"
    )
    assert reading(bound, version(3, "other")).free_capacity() == 0
    assert reading(first).free_capacity() == 0
    assert reading(bound, first, refused("h", 2, "run_ended")).free_capacity() == 0
    went_back = reading(bound, first, version(1), version(2), version(1, attempt=1))
    assert went_back.newest_sync_index == 1, "the surviving chain's, not the highest there was"
    assert went_back.free_capacity(loaded=2) == 12, (
        "an engine that is ahead of the chain does not lift the bound"
    )


@pytest.mark.parametrize(
    ("newest", "max_staleness", "last", "capacity", "ended"),
    [
        (3, 2, None, 12, False),
        (3, 2, 9, 12, False),
        (3, 2, 5, 10, False),  # batches from the sixth on are not trained
        (5, 2, 5, 0, True),
        (6, None, 5, 0, True),
        (1, None, 5, 10, False),
    ],
)
def test_no_group_is_asked_for_after_the_last_version(
    newest: int, max_staleness: int | None, last: int | None, capacity: int, ended: bool
) -> None:
    changes = {"max_staleness": max_staleness, "sync_every": 1, "batch_groups": 2}
    read = reading(applied(**changes), version(newest))
    read = replace(read, last_version=last)
    assert (read.free_capacity(), read.ended) == (capacity, ended)
    val = replace(reading(applied(**changes), version(newest), channel="val"), last_version=last)
    assert val.free_capacity() is None and not val.ended


def test_lowest_version_that_a_ready_engine_samples_with() -> None:
    def says(name: str, label: str | None, state: Any = "ready") -> tuple[str, WorkerStatus]:
        return name, WorkerStatus(
            worker_id=name, base_url="http://x:1", models=(), state=state, weight_version=label,
            heartbeat_at=0, heartbeat_interval_ms=1000, started_at=0, loads=0,
        )  # fmt: skip

    registry = EngineRegistry()
    assert registry.oldest_loaded("r", 0.0) is None
    for status in (
        says("a", "r/5.0"),
        says("b", "r/4.1"),
        says("c", "r/1.0", "loading"),
        says("d", "other/0.0"),
    ):
        registry.update(*status, 0.0)
    registry.update(*says("e", "default"), 0.0)
    registry.update(*says("f", None), 0.0)
    assert registry.oldest_loaded("r", 0.0) == 4
    registry.update(*says("b", "r/5.0"), 2.0)
    assert registry.oldest_loaded("r", 2.0) == 5
    assert registry.oldest_loaded("r", 9.0) is None, "all have missed three heartbeats"


# ---------------------------------------------------------------- the route


@pytest.fixture
def run_scenario(tmp_path: Path) -> RunScenario:
    """Return a function that runs an async scenario against a new gateway.

    Call it as `run_scenario(scenario, script, **gateway settings)`.
    """
    return partial(run_gateway, tmp_path, CODEC)


async def ask(w: GatewayFixture, path: str, key: str | None = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with w.http.get(w.url + path, headers=headers) as reply:
        return reply.status, await reply.json()


@pytest.mark.slow
def test_demand_over_http(run_scenario: RunScenario) -> None:
    async def body(w: GatewayFixture) -> None:
        w.budgets.readings["r", "train"] = reading(
            applied(max_staleness=2, batch_groups=3, sync_every=2), version(1), refused("g1", 8),
            refused("m", 0, "outcome"), refused("g2", 4, "stale", detail="too old"),
        )  # fmt: skip
        status, told = await ask(w, "/runs/r/demand")
        assert status == 200
        listed = [
            {
                "offset": 1,
                "group_id": "g1",
                "round": 0,
                "n": 8,
                "reason": "zero_variance",
                "detail": None,
                "total": 8,
            },
            {
                "offset": 3,
                "group_id": "g2",
                "round": 0,
                "n": 4,
                "reason": "stale",
                "detail": "too old",
                "total": 12,
            },
        ]
        assert told == {
            "run_id": "r", "channel": "train", "journal_id": "memory", "read_to": 4, "age_s": 0.0,
            "ended": False,
            "replacements_total": 12, "replacements_by_reason": {"zero_variance": 8, "stale": 4},
            "refusals": listed,
            "refusals_missing": False, "groups_admitted": 0, "groups_refused": 2,
            "next_batch_seq": 0,
            "newest_sync_index": 1, "loaded_sync_index": None, "admission_policy_version": 1,
            "max_staleness": 2, "sync_every": 2, "batch_groups": 3, "free_staleness_capacity": 24,
            "validation_due": None,
        }  # fmt: skip
        assert (await ask(w, "/runs/r/demand?after=1"))[1]["refusals"] == listed[1:]
        assert (await ask(w, "/runs/r/demand?after=3"))[1]["refusals"] == []
        w.budgets.readings["r", "val"] = reading(applied(), channel="val")
        told = (await ask(w, "/runs/r/demand?channel=val"))[1]
        assert (told["channel"], told["batch_groups"], told["free_staleness_capacity"]) == (
            "val",
            2,
            None,
        )
        page = (await ask(w, "/openapi.json"))[1]
        assert (
            "free_staleness_capacity" in page["components"]["schemas"]["BudgetReply"]["properties"]
        )
        assert {p["name"] for p in page["paths"]["/runs/{run}/demand"]["get"]["parameters"]} == {
            "run",
            "channel",
            "after",
        }
        assert w.records() == [], "nothing is recorded"

    run_scenario(body, SCRIPT)


def test_demand_that_cannot_be_told(run_scenario: RunScenario) -> None:
    async def body(w: GatewayFixture) -> None:
        status, told = await ask(w, "/runs/nobody/demand")
        assert (status, told["error"]["code"], told["error"]["param"]) == (404, "not_found", "run")
        assert (
            "'nobody'" in told["error"]["message"]
            and "clawstream admit" in told["error"]["message"]
        )
        for path, param in (
            ("/runs/No%20Run/demand", "run"),
            ("/runs/r/demand?channel=x", "query.channel"),
        ):
            status, told = await ask(w, path)
            assert (status, told["error"]["param"]) == (422, param)
        assert (await ask(w, "/runs/r/demand?after=-1"))[0] == 422
        w.budgets.reachable = False
        async with w.http.get(w.url + "/runs/r/demand") as reply:
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert (await reply.json())["error"]["code"] == "budget_unknown"
        async with w.http.post(w.url + "/runs/r/demand") as reply:
            assert reply.status == 405

    run_scenario(body, SCRIPT)


def test_who_may_ask(run_scenario: RunScenario, tmp_path: Path) -> None:
    def key(name: str, *scopes: Scope, run: str | None = None) -> str:
        return create_key(tmp_path / "api-keys.json", name, scopes, run)

    anyone, pinned, rewarder = key("a", "agent"), key("b", "agent", run="r"), key("c", "reward")

    async def body(w: GatewayFixture) -> None:
        for run in ("r", "other"):
            w.budgets.readings[run, "train"] = reading()
        assert (await ask(w, "/runs/r/demand"))[0] == 401
        assert (await ask(w, "/runs/r/demand", rewarder))[0] == 403
        assert [(await ask(w, f"/runs/{run}/demand", anyone))[0] for run in ("r", "other")] == [
            200,
            200,
        ]
        assert [
            (await ask(w, f"/runs/{run}/demand", pinned))[0] for run in ("r", "other", "none")
        ] == [200, 403, 403]
        async with w.http.post(
            w.url + "/sessions", headers={"authorization": f"Bearer {pinned}"}
        ) as reply:
            session = (await reply.json())["session_key"]
        assert (await ask(w, "/runs/r/demand", session))[0] == 403, "it is for its one trajectory"

    run_scenario(body, SCRIPT, auth="required")
