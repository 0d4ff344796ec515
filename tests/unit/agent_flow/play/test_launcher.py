"""What a command starts ends with it, and with the flow, however that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from clawstream.agent_flow.errors import RolloutFailed
from clawstream.agent_flow.play.command import command_flow

NESTED = """
import os, subprocess, sys, time
for extra in ({}, {"start_new_session": True}):
    subprocess.Popen(["sleep", "1000"], **extra)
with open(os.environ["PIDS"], "w") as file:
    file.write(" ".join(os.popen("pgrep -s 0; pgrep -P %d" % os.getpid()).read().split()))
if sys.argv[1] == "wait":
    time.sleep(1000)
"""
FLOW = """
import asyncio, sys
from types import SimpleNamespace
from clawstream.agent_flow.play.command import command_flow
flow = command_flow([sys.executable, "-c", sys.argv[1], "wait"], "exit", None)
asyncio.run(flow({}, SimpleNamespace(environment={})))
"""


class NoGateway:
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed


def started(file: Path) -> list[int]:
    """Wait for the ids of the processes that the command has started."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if file.exists() and (words := file.read_text().split()):
            return [int(word) for word in words]
        time.sleep(0.01)
    raise AssertionError("the command has not started")


def ended(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not [pid for pid in pids if _lives(pid)]:
            return True
        time.sleep(0.01)
    return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def run(command: list[str]) -> Any:
    return await command_flow(command, "exit", None)({}, NoGateway())  # type: ignore[arg-type]


def test_kill_9_of_the_flow_leaves_nothing_behind(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    flow = subprocess.Popen(
        [sys.executable, "-c", FLOW, NESTED], env={**os.environ, "PIDS": str(pids)}
    )
    running = started(pids)
    flow.send_signal(signal.SIGKILL)
    flow.wait()
    assert len(set(running)) >= 3 and ended(running)


def test_end_of_the_command_ends_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    assert asyncio.run(run([sys.executable, "-c", NESTED, "go"])) == 1.0
    assert ended(started(tmp_path / "pids"))


def test_cancellation_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))

    async def scenario() -> None:
        playing = asyncio.create_task(run([sys.executable, "-c", NESTED, "wait"]))
        running = await asyncio.to_thread(started, tmp_path / "pids")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert await asyncio.to_thread(ended, running)

    asyncio.run(scenario())


def test_exit_codes_signals_and_absent_commands() -> None:
    assert asyncio.run(run(["sh", "-c", "exit 3"])) == 0.0
    with pytest.raises(RolloutFailed, match="exit code -15"):
        asyncio.run(run(["sh", "-c", "kill -TERM $$"]))
    with pytest.raises(RolloutFailed, match=r"no-such-agent: .*No such file"):
        asyncio.run(run(["no-such-agent"]))
