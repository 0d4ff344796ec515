"""Two rollout workers, one killed while a flow trains: training goes on, and the worker comes back.

The flow starts groups within the rollout budget, as users' flows do.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.feed import Feed
from support.ports import free_port
from support.processes import Processes
from support.up import ENVIRON, Up, command, own_installation, up

from clawstream.schemas.ids import parse_version
from clawstream.schemas.records import Refused, Step, WorkerStatus
from clawstream.schemas.settings import Settings

MEMBERS, GROUPS, MAX_STALENESS = 4, 2, 1
KILLED, OTHER = "worker-1", "worker-0"
FLOW = f"""
import itertools, zlib
from clawstream.agent_flow import flow

@flow(group_size={MEMBERS}, timeout_s=300, concurrency=12)
async def colours(task, rollout):
    reply = await rollout.chat("Name a colour.", max_tokens=24)
    return zlib.crc32(reply.text.encode()) % 97 / 96

@colours.tasks
def tasks():
    return ({{"id": number}} for number in itertools.count())
"""

pytestmark = pytest.mark.long


def settings_of(home: Path, model: Path) -> Settings:
    return Settings.model_validate({
        **own_installation(home),
        "run_id": "two",
        "admit": {"channels": ["train"], "policy": {
            "group_size": MEMBERS, "batch_groups": GROUPS, "max_staleness": MAX_STALENESS,
        }},
        "trainer": {"model_path": model, "lr": 1e-4},
        "rollout": {
            "workers": 2, "port": free_port(), "dtype": "float32", "max_model_len": 128,
            "kv_cache_mb": 64, "max_num_seqs": 8, "heartbeat_s": 0.5,
        },
        "up": {
            "processes": ["broker", "gateway", "assemble", "admit", "trainer", "rollout"],
            "restart_delay_s": 0.3,
        },
    })  # fmt: skip


def index_of(version_id: str | None) -> int:
    """Return the sync index of a version; -1 for boot weights."""
    version = parse_version(version_id or "")
    return version.sync_index if version is not None else -1


class Run:
    """What is on the topics of a run."""

    def __init__(self, running: Up) -> None:
        self.feed, self._up = Feed(running.settings), running
        self.killed_at = 0

    @property
    def newest(self) -> int:
        return max((version.sync_index for version in self.feed.versions()), default=-1)

    def statuses(self, worker: str) -> list[WorkerStatus]:
        """Return the statuses since the kill, oldest first."""
        found: list[WorkerStatus] = self.feed.events(self.feed.topics.workers, WorkerStatus)
        return [s for s in found if s.worker_id == worker and s.heartbeat_at > self.killed_at]

    def serves(self, worker: str) -> int | None:
        """Return the sync index that a worker serves; None while it is not ready."""
        last = self.statuses(worker)[-1:]
        return index_of(last[0].weight_version) if last and last[0].state == "ready" else None

    def until_version(self, index: int) -> None:
        self._up.until(lambda: self.newest >= index, f"version {index}", 600)

    def until_both_serve_the_newest(self) -> None:
        self._up.until(
            lambda: self.serves(KILLED) == self.serves(OTHER) == self.newest,
            "both workers serve the newest version",
            600,
        )

    def trained(self) -> list[tuple[int, Step]]:
        """Return each step of a batch, with the sync index of the version that it trained."""
        steps: dict[str, list[Step]] = {}
        for step in self.feed.events(self.feed.topics.steps, Step):
            steps.setdefault(step.trajectory_key, []).append(step)
        return [
            (batch.batch_seq, step)
            for batch in self.feed.batches()
            for group in batch.groups
            for member in group.members
            for step in steps[member.trajectory_key]
            if step.step_id not in member.untrainable_steps
        ]


def kill_and_wait(running: Up, run: Run) -> WorkerStatus:
    """Kill one worker in the middle; return its first ready status, two versions later."""
    run.until_version(3)
    row = running.table["rollout-1"]
    # Heartbeats that were sent before the kill are not later than this one.
    run.killed_at = run.statuses(KILLED)[-1].heartbeat_at
    os.kill(row["pid"], signal.SIGKILL)
    running.until(lambda: running.table["rollout-1"]["restarts"] == 1, "it is restarted")
    running.until(lambda: bool(run.statuses(OTHER)), "the other worker sends a heartbeat")
    run.killed_at = max(s.heartbeat_at for s in run.statuses(OTHER))
    running.until(lambda: run.serves(KILLED) is not None, "the killed worker is ready", 600)
    back = next(s for s in run.statuses(KILLED) if s.state == "ready")
    run.until_version(run.newest + 2)
    return back


def test_a_killed_worker_comes_back_at_the_newest_version_while_training_goes_on(
    tmp_path: Path, model_dir: Path
) -> None:
    flow = tmp_path / "colours.py"
    flow.write_text(FLOW)
    with up(settings_of(tmp_path, model_dir)) as running:
        running.until_says("up", '"event": "up"', 900)
        run = Run(running)
        run.until_both_serve_the_newest()
        with Processes(tmp_path / "logs") as processes:
            words = ("flow", "run", f"{flow}:colours", f"data_dir={running.home}")
            playing = processes.start("flow", command(*words), env=ENVIRON)
            back = kill_and_wait(running, run)
            processes.stop(playing)
        run.until_both_serve_the_newest()
        check(run, back)
        run.feed.close()
        running.stop()
        assert [running.table[f"rollout-{i}"]["exit_code"] for i in range(2)] == [0, 0]


def check(run: Run, back: WorkerStatus) -> None:
    versions = run.feed.versions()
    away = [v for v in versions if run.killed_at < v.created_at < back.heartbeat_at]
    before_start = [v.sync_index for v in versions if v.created_at < back.started_at]
    assert away, "training went on while the worker was away"
    assert index_of(back.weight_version) >= max(before_start)
    # Nothing that it samples is older than what was published before its engine started.
    again = [
        step
        for step in run.feed.events(run.feed.topics.steps, Step)
        if step.worker_id == KILLED and step.received_at > back.started_at
    ]
    sampled = [index_of(span.version) for step in again for span in step.versions]
    assert min(sampled) >= max(before_start)

    trained = run.trained()
    assert {step.worker_id for _, step in trained} == {KILLED, OTHER}
    assert {step.step_id for _, step in trained} & {step.step_id for step in again}
    ages = Counter(seq - index_of(span.version) for seq, step in trained for span in step.versions)
    assert max(ages) <= MAX_STALENESS
    assert all(v.metrics["staleness_max"] <= MAX_STALENESS for v in versions if v.sync_index > 0)
    topic = run.feed.topics.ready_batches(run.feed.run, "train")
    refused: Counter[Any] = Counter(r.reason for r in run.feed.events(topic, Refused))
    print(
        f"{len(versions)} versions, {len(away)} of them while the worker was away"
        f" ({(back.heartbeat_at - run.killed_at) / 1e6:.0f} s); spans by age {dict(ages)};"
        f" refused {dict(refused)}",
        file=sys.stderr,
    )
