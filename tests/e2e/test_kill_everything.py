"""Kill parts of the running loop with SIGKILL, one after the other; then count all records.

The loop is the demo: real agents, gateway, Kafka, Faust, Delta Lake, trainer and vLLM, under the
supervisor of `clawstream up`. The model is barely warm-started, because this test checks counts,
not learning.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import Patience
from support.ports import free_port

from clawstream.runtime.process.child import die_with_parent

VICTIMS = ("gateway", "assemble", "reward", "admit", "lake", "trainer", "vllm", "broker")
LOOP_VICTIMS = ("trainer", "vllm", "broker")
"""Other short tests kill the jobs and gateways, and the broker below them, but not in the loop."""
START_TIMEOUT_S = 900.0
BACK_TIMEOUT_S = 400.0


class Loop:
    """The demo as a background process, for this number of weight versions."""

    def __init__(self, home: Path, versions: int) -> None:
        rng = random.Random(os.getpid())
        self.home = home
        # Batch boundaries differ in every run: exactly-once delivery must not depend on them.
        flush_rows, flush_s = rng.randrange(5, 60), rng.uniform(0.1, 1.0)
        self.log = (home.parent / "demo.log").open("wb")
        self.process = subprocess.Popen(
            die_with_parent(
                [
                    *(sys.executable, "-m", "clawstream.demo", f"data_dir={home}"),
                    *("demo.warm_start_steps=20", "demo.eval_tasks=8", f"demo.versions={versions}"),
                    *(
                        "demo.groups_per_batch=4",
                        "admit.policy.group_size=4",
                        "demo.concurrency=12",
                    ),
                    *(f"lake.flush_rows={flush_rows}", f"lake.flush_interval_s={flush_s:.2f}"),
                    *(
                        f"broker.port={free_port()}",
                        f"gateway.port={free_port()}",
                        f"rollout.port={free_port()}",
                    ),
                    "up.restart_delay_s=0.5",
                ]
            ),
            stdout=self.log,
            stderr=self.log,
        )

    @property
    def table(self) -> dict[str, Any]:
        """Return the supervisor's table of processes."""
        try:
            return dict(json.loads((self.home / "up.json").read_text())["processes"])
        except (OSError, ValueError):
            return {}

    def versions(self) -> int:
        """Return the newest published sync index, read from the weights directory."""
        return len(list((self.home / "weights" / "demo").glob("*"))) and self._newest()

    def _newest(self) -> int:
        names = [p.name for p in (self.home / "weights" / "demo").glob("[0-9]*.[0-9]*")]
        return max((int(n.partition(".")[0]) for n in names), default=0)

    def wait_for_version(self, sync_index: int, timeout_s: float) -> None:
        """Wait until the loop has published this version. The demo process must be alive."""
        patience = Patience(timeout_s)
        while self.versions() < sync_index:
            assert self.process.poll() is None, self.tail("the demo ended early")
            assert patience.left_s > 0, self.tail(
                f"version {sync_index} not reached within {timeout_s:g} s"
            )
            time.sleep(0.1)

    def pids(self, victim: str) -> list[int]:
        """Return the process ids of the victim, without the supervisor's wrapper around it."""
        if victim == "broker":
            return [
                int(p.read_text().split()[0])
                for p in (self.home / "broker").glob("node-*/broker.pid")
            ]
        if victim == "vllm":
            worker = psutil.Process(self.table["rollout"]["pid"])
            return [c.pid for c in worker.children() if "vllm" in " ".join(c.cmdline())]
        return [self.table[victim]["pid"]]

    def tail(self, why: str) -> str:
        """Return the end of all logs, for a failed assertion."""
        parts = [why]
        for path in (self.home.parent / "demo.log", *sorted((self.home / "logs").glob("*.log"))):
            parts.append(
                f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:])
            )
        return "\n".join(parts)[-20_000:]


@contextmanager
def looping(home: Path, versions: int) -> Iterator[Loop]:
    """Run the loop; it has ended after the block."""
    running = Loop(home, versions)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            try:
                running.process.wait(300)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        running.log.close()


def kill_each(home: Path, victims: Sequence[str], versions: int) -> None:
    """Kill these parts one after the other, wait for the end of the loop, and count all records."""
    with looping(home, versions) as loop:
        loop.wait_for_version(1, START_TIMEOUT_S)
        for victim in victims:
            before = loop.versions()
            pids = loop.pids(victim)
            assert pids, loop.tail(f"no process of {victim}")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            # The part restarts by itself, and the loop passes through every part again.
            loop.wait_for_version(before + 2, BACK_TIMEOUT_S)
        code = loop.process.wait(1200)
        assert code == 0, loop.tail(f"the demo ended with {code}")
    report = json.loads((home / "report.json").read_text())

    assert report["answered_but_missing"] == 0
    assert report["steps_on_kafka"] == report["steps_in_lake"] > 0
    assert report["steps_aborted"] == report["steps_aborted_in_lake"]
    assert report["duplicates_in_lake"] == 0
    assert report["batches_emitted"] == report["batches_trained"] == versions
    assert report["groups_trained_twice"] == 0
    assert report["final_lag"] == 0
    assert report["engine_starts"] == 1 + ("vllm" in victims)
    assert set(victims) - {"vllm"} <= report["restarts"].keys()


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    """The short version of the next test."""
    kill_each(tmp_path / "run", LOOP_VICTIMS, versions=12)


@pytest.mark.long
def test_nothing_is_lost_or_doubled_when_all_are_killed(tmp_path: Path) -> None:
    kill_each(tmp_path / "run", VICTIMS, versions=30)
