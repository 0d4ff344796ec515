"""Test a supervisor whose data directory is full.

It reports this once, continues to supervise, and writes again when there is space.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
FULL = """
import asyncio, json, os, signal, subprocess, sys
from pathlib import Path
from clawstream.runtime.process.table import read_table
from clawstream.runtime.process.supervisor import ProcessSpec, Supervisor
from clawstream.runtime.logs import configure

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
room = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(room)], check=True)
configure("up")

async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)

async def main():
    filler, home = room / "filler", room / "data"
    async with Supervisor(home, restart_delay_s=0.01) as supervisor:
        supervisor.start(ProcessSpec("a", SLEEP))
        await until(lambda: read_table(home).get("processes", {}).get("a", {}).get("pid"))
        before = (home / "up.json").read_bytes()
        with filler.open("wb", buffering=0) as file:  # to the last byte
            try:
                while True:
                    file.write(bytes(1024))
            except OSError as error:
                print(error.strerror)
        # its log has no room either: a file of nothing needs none
        supervisor.start(ProcessSpec("b", SLEEP))
        for restarts in (1, 2, 3):
            os.kill(supervisor.table["a"]["pid"], signal.SIGKILL)
            await until(lambda: supervisor.table["a"]["restarts"] == restarts\
 and supervisor.table["a"]["pid"])
        assert (home / "up.json").read_bytes() == before
        filler.unlink()
        await until(lambda: read_table(home)["processes"].get("b"))
        await until(lambda: read_table(home)["processes"]["a"] == supervisor.table["a"])
        os.kill(supervisor.table["b"]["pid"], signal.SIGKILL)
        await until(lambda: supervisor.table["b"]["restarts"] == 1 and supervisor.table["b"]["pid"])
    assert {row["state"] for row in read_table(home)["processes"].values()} == {"stopped"}

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_full_disk_is_said_once_and_waited_out(tmp_path: Path) -> None:
    """Use a separate file system of 256 KiB, in a separate mount namespace."""
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-c", FULL, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr
    said = [json.loads(line)["event"] for line in done.stderr.splitlines()]
    assert (said.count("disk_full"), said.count("disk_has_room")) == (1, 1)
