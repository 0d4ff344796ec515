"""`clawstream up` for a user: its output, other commands beside it, a kill, and its end."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.ports import free_port
from support.processes import Processes
from support.up import ENVIRON, call, command

from clawstream.runtime.exit_codes import EXIT_IN_USE, EXIT_SETTINGS
from clawstream.runtime.process.supervisor import supervisor_of
from clawstream.runtime.process.table import read_table

DATA_PART = ["broker", "gateway", "assemble", "reward", "admit", "lake"]
STEP = {
    "trajectory_uid": "t1", "prompt_uid": "g1", "prompt_ids": [1, 2], "response_ids": [3],
    "response_logprobs": [-0.5], "reward": 1.0,
}  # fmt: skip


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path / "logs") as started:
        yield started


def events(processes: Processes, name: str) -> list[dict[str, Any]]:
    """Return the log events of a process."""
    return [json.loads(line) for line in processes.log(name).splitlines() if line.startswith("{")]


def family(pid: int) -> list[psutil.Process]:
    """Return all descendants of a process."""
    return psutil.Process(pid).children(recursive=True)


def test_it_is_up_when_all_is_ready_and_everything_else_follows_from_its_directory(
    tmp_path: Path, processes: Processes, eventually: Any
) -> None:
    home, gateway = tmp_path / "data", free_port()
    here = f"data_dir={home}"
    words = [
        here,
        "run_id=mine",
        f"broker.port={free_port()}",
        f"gateway.port={gateway}",
        "kafka.partitions=2",
    ]
    words += [
        "gateway.upstreams=[{url: 'http://127.0.0.1:9', api_key: a-secret-key}]",
        "jobs.worker_id=1",
    ]
    up = processes.start("up", command("up", *words), env=ENVIRON)
    eventually(lambda: up.poll() is not None or '"event": "up"' in processes.log("up"))
    said = events(processes, "up")
    assert up.poll() is None, said
    # every process was ready before its ready line
    names = [e["name"] for e in said if e["event"] == "ready"]
    assert sorted(names) == sorted(DATA_PART) and names[0] == "broker"
    assert said[-1]["event"] == "up" and said[-1]["processes"] == DATA_PART
    assert httpx.get(f"http://127.0.0.1:{gateway}/health").status_code == 200

    # the directory keeps the settings without secrets
    kept = home / "settings.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert all(
        "a-secret-key" not in p.read_text(errors="replace") for p in (kept, home / "up.json")
    )
    lag = call("lag", here)
    assert lag.returncode == 0 and "claw-admit.mine.train" in lag.stdout, lag.stderr
    told = call("status", here)
    assert told.returncode == 0, told.stdout + told.stderr
    assert f": up (clawstream up, pid {up.pid})" in told.stdout and "run mine" in told.stdout
    assert told.stdout.count(" ready ") == len(DATA_PART)

    # a second instance is refused with one line
    second = call("up", *words)
    assert second.returncode == EXIT_IN_USE and "another `clawstream up` works on" in second.stderr
    assert "Traceback" not in second.stderr
    other = call("lag", here, "kafka.partitions=3")
    assert (
        other.returncode == EXIT_SETTINGS
        and "was made with 2, and that cannot change" in other.stderr
    )

    # after kill -9 no process is left, and no acknowledged record is lost
    assert (
        httpx.post(f"http://127.0.0.1:{gateway}/submit_steps", json={"steps": [STEP]}).status_code
        == 200
    )
    children = family(up.pid)
    assert len(children) >= len(DATA_PART)
    up.kill()
    up.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert supervisor_of(home) is None and call("status", here).returncode == 1

    # it restarts from its directory alone when the secret is set again
    missing = call("up", here)
    assert missing.returncode == EXIT_SETTINGS and "gateway.upstreams.0.api_key" in missing.stderr
    again = processes.start("again", command("up", here, words[5]), env=ENVIRON)
    eventually(lambda: again.poll() is not None or '"event": "up"' in processes.log("again"))
    assert again.poll() is None, processes.log("again")
    rows = eventually(
        lambda: json.loads(
            call("sql", "select step_id from steps", here, "-f", "json").stdout or "[]"
        )
    )
    assert len(rows) == 1

    # down waits for the orderly end
    children = family(again.pid)
    down = call("down", here)
    assert (down.returncode, down.stdout) == (0, f"stopped {again.pid}\n"), down.stderr
    assert again.wait(60) == 0 and not any(c.is_running() for c in children)
    assert {row["state"] for row in read_table(home)["processes"].values()} == {"stopped"}
    last = json.loads(processes.log("again").splitlines()[-1])
    assert (last["event"], last["all_read"]) == ("stopped", True)
    assert call("down", here).stdout == f"nothing runs on {home}\n"


def test_all_that_can_be_known_is_said_before_anything_starts(tmp_path: Path) -> None:
    words = [
        "jobs.reward_functions={'*': ['no.such.module:function@1']}",
        "gateway.compute_reward=nothing@1",
    ]
    done = call(
        "up",
        f"data_dir={tmp_path}",
        f"broker.port={free_port()}",
        f"gateway.port={free_port()}",
        *words,
    )
    assert done.returncode == EXIT_SETTINGS, done.stderr
    assert "jobs.reward_functions" in done.stderr and "gateway.compute_reward" in done.stderr
    assert "Traceback" not in done.stderr
    assert not read_table(tmp_path)["processes"] and not (tmp_path / "settings.json").exists()
