"""Test that no child outlives its parent process.

It holds for every kind of parent exit, and whatever the child does about signals.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import until

from clawstream.runtime.process.child import ChildProcess, die_with_parent

ROOT = Path(__file__).parents[4]
DEAF = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(600)"
)
PARENT = """
import subprocess, sys, time
from clawstream.runtime.process.child import die_with_parent
subprocess.Popen(die_with_parent([sys.executable, "-c", sys.argv[1]]))
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_child_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, DEAF],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        child.wait(60)


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    command = die_with_parent([sys.executable, "-c", "print('started')"])
    # Simulates a parent that died before the child registered with the kernel.
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_child_is_the_command_itself() -> None:
    done = subprocess.run(
        die_with_parent(["sh", "-c", "cat; echo $0 $1; exit 7", "a b", "c"]),
        input="in ",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (7, "in a b c\n")


def test_a_command_that_is_not_there_is_a_line() -> None:
    done = subprocess.run(die_with_parent(["/no/such/program"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        127,
        "cannot run /no/such/program: No such file or directory\n",
    )


def test_a_child_that_has_ended_and_is_not_reaped_yet_is_killed_without_error() -> None:
    async def body() -> tuple[ChildProcess, ChildProcess]:
        short = ChildProcess(["true"])
        # The event loop does not run meanwhile: nobody has reaped it.
        until(lambda: psutil.Process(short.pid).status() == psutil.STATUS_ZOMBIE)
        assert short.returncode is None
        short.kill_group()
        await short.wait()
        short.kill_group()
        short.terminate()
        long = ChildProcess(["sleep", "600"])
        long.kill_group()
        await long.wait()
        return short, long

    short, long = asyncio.run(body())
    assert (short.returncode, long.returncode) == (0, -signal.SIGKILL)
    for child in (short, long):
        assert not psutil.pid_exists(child.pid)  # Reaped: not even a zombie is left.
