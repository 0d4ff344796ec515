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

from schemas.codec.single_object import Codec
from schemas.records import SessionEvent

FLOW = """
import time
from agent_flow import flow

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
"""
SCRIPT = Script([ScriptedChoice([7], ["hi"], [-0.5])])


async def start(tmp_path: Path, url: str, name: str, *words: str) -> asyncio.subprocess.Process:
    file = tmp_path / "flows.py"
    file.write_text(FLOW)
    command = ("-m", "agent_flow", "run", f"{file}:{name}", f"gateway={url}", "--eval", *words)
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
            await start(tmp_path, fixture.url, "greet", "n=2", f"shard={index}/2")
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
        process = await start(tmp_path, fixture.url, "sleeps")
        await fixture.until(lambda: kinds(fixture)["opened"] == 2)
        began = time.monotonic()
        process.send_signal(number)
        await process.communicate()
        assert time.monotonic() - began < 10
        assert process.returncode == 130
        assert kinds(fixture) == {"opened": 2, "abandoned": 2}

    run_gateway(tmp_path / "gateway", Codec(), scenario, SCRIPT)
