"""Flows in processes of their own: several that share the tasks, and one that is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from support.gateway import GatewayFixture, run_gateway
from support.scripted.script import Script, ScriptedChoice

from clawstream.gateway.api.rollout_budget.budget import BudgetReading
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import RolloutBudget, SessionEvent

FLOW = """
import asyncio, time
from clawstream.agent_flow import flow

@flow(group_size=2)
async def greet(task, rollout):
    return 1.0

@greet.tasks
def tasks():
    return ({"id": number} for number in range(7))

@flow(group_size=1, concurrency=2)
def sleeps(task, rollout):
    time.sleep(600)

@sleeps.tasks
def naps():
    return ({"id": number} for number in range(7))

@flow(group_size=2, concurrency=2)
async def slow(task, rollout):
    await asyncio.sleep(0.1)
    if task["id"] % 3 == 0:
        await rollout.agent("critic")
    return 1.0

@slow.tasks
def numbers():
    return ({"id": number} for number in range(12))
"""
UNBOUNDED = RolloutBudget(
    run_id="default", channel="train", journal_id="j", read_to=0, policy_version=1,
    max_staleness=None, sync_every=1, batch_groups=1, next_batch_seq=0, groups_admitted=0,
    groups_refused=0, replacements={}, replacements_total=0, refusals=(), dropped=None,
    ended=False,
)  # fmt: skip
SCRIPT = Script([ScriptedChoice([7], ["hi"], [-0.5])])


async def start(tmp_path: Path, url: str, name: str, *words: str) -> asyncio.subprocess.Process:
    file = tmp_path / "flows.py"
    file.write_text(FLOW)
    command = ("-m", "clawstream.agent_flow", "run", f"{file}:{name}", f"gateway={url}", *words)
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )


@pytest.mark.slow
def test_processes_play_each_task_once_in_whole_groups(tmp_path: Path) -> None:
    async def scenario(fixture: GatewayFixture) -> None:
        processes = [
            await start(tmp_path, fixture.url, "greet", "--eval", "n=2", f"shard={index}/2")
            for index in range(2)
        ]
        groups = 0
        for process in processes:
            out, _ = await process.communicate()
            assert process.returncode == 0
            groups += json.loads(out.splitlines()[-1])["groups"]
        assert groups == 7
        opened = [r for r in fixture.records() if isinstance(r, SessionEvent)]
        members, tasks = defaultdict[str, set[str]](set), Counter[int]()
        for event in opened:
            if event.kind == "opened":
                members[event.group_id or ""].add(event.trajectory_key)
                tasks[json.loads(event.metadata_json or b"")["id"]] += 1
                assert event.group_size == 2
        assert tasks == dict.fromkeys(range(7), 2)
        assert [len(keys) for keys in members.values()] == [2] * 7

    run_gateway(tmp_path / "gateway", Codec(), scenario, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_flow_that_is_not_async_and_sleeps(
    tmp_path: Path, number: signal.Signals
) -> None:
    def kinds(fixture: GatewayFixture) -> Counter[str]:
        return Counter(r.kind for r in fixture.records() if isinstance(r, SessionEvent))

    async def scenario(fixture: GatewayFixture) -> None:
        process = await start(tmp_path, fixture.url, "sleeps", "--eval")
        await fixture.until(lambda: kinds(fixture)["opened"] == 2)
        began = time.monotonic()
        process.send_signal(number)
        await process.communicate()
        assert time.monotonic() - began < 10
        assert process.returncode == 130
        assert kinds(fixture) == {"opened": 2, "abandoned": 2}

    run_gateway(tmp_path / "gateway", Codec(), scenario, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_flow_that_was_stopped_goes_on_where_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Each task has one whole group in each epoch; groups that were cut are ended."""
    words = ("epochs=2", "shuffle=7", f"state={tmp_path / 'state'}")

    def opened(fixture: GatewayFixture) -> list[SessionEvent]:
        return [r for r in fixture.records() if isinstance(r, SessionEvent) and r.kind == "opened"]

    async def scenario(fixture: GatewayFixture) -> None:
        fixture.budgets.readings["default", "train"] = BudgetReading(UNBOUNDED, 0, 0.0)
        for stop_at in (8, 26):
            process = await start(tmp_path, fixture.url, "slow", *words)
            await fixture.until(lambda at=stop_at: len(opened(fixture)) >= at)  # type: ignore[misc]
            process.send_signal(number)
            await process.communicate()
        summaries = []
        for _ in range(2):
            process = await start(tmp_path, fixture.url, "slow", *words)
            out, _ = await process.communicate()
            assert process.returncode == 0
            summaries.append(json.loads(out.splitlines()[-1]))
        last, none = summaries
        assert last["groups"] + last["groups_before"] == none["groups_before"] == 24
        assert none["groups"] == 0

        ends, members = dict[str, str](), defaultdict[str, list[SessionEvent]](list)
        for event in fixture.records():
            if isinstance(event, SessionEvent) and event.kind != "opened":
                ends.setdefault(event.trajectory_key, event.kind)
        for event in opened(fixture):
            members[event.group_id or ""].append(event)
            assert ends.get(event.trajectory_key) in ("completed", "abandoned")
        own = {group: events for group, events in members.items() if "critic" not in group}
        whole = Counter[int](
            json.loads(events[0].metadata_json or b"")["id"]
            for events in own.values()
            if [ends[event.trajectory_key] for event in events] == ["completed"] * 2
        )
        assert whole == dict.fromkeys(range(12), 2)
        assert len({event.trajectory_key for event in opened(fixture)}) == len(opened(fixture))

    run_gateway(tmp_path / "gateway", Codec(), scenario, SCRIPT)


@pytest.mark.slow
def test_two_processes_do_not_play_one_shard(tmp_path: Path) -> None:
    async def scenario(fixture: GatewayFixture) -> None:
        fixture.budgets.readings["default", "train"] = BudgetReading(UNBOUNDED, 0, 0.0)
        words = (f"state={tmp_path / 'state'}",)
        first = await start(tmp_path, fixture.url, "sleeps", *words)
        await fixture.until(lambda: len(fixture.records()) >= 2)
        second = await start(tmp_path, fixture.url, "sleeps", *words)
        await second.communicate()
        assert second.returncode == 2
        first.kill()
        await first.communicate()

    run_gateway(tmp_path / "gateway", Codec(), scenario, SCRIPT)
