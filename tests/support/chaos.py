"""An installation on several simulated machines whose processes are killed.

Each machine has real processes under a real supervisor.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.chaos_feed import GROUP_SIZE, Ack, Feeder
from support.chaos_logs import Outputs
from support.patience import Patience
from support.ports import free_port
from support.up import ENVIRON, ROOT, Up, command, up

from clawstream.ops.lag import data_lag
from clawstream.runtime.kafka import Cluster, Reader
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.runtime.topics.records import create_topics
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import AssemblyMarker
from clawstream.schemas.settings import Settings

RUN = "chaos"
BATCH_GROUPS = 4
SETTLE_S = 600.0
DEADLINE_S = 15.0
"""Timeouts of the installation.

They are shorter than the longest outage, so that outages close some trajectories by timeout.
"""
VICTIMS = ("assemble", "assemble-1", "reward", "admit", "lake", "broker")


def installation(
    home: Path, processes: tuple[str, ...], rng: random.Random, **more: Any
) -> Settings:
    """Return the settings of the first machine. more: sections that override the defaults."""
    sections: dict[str, Any] = {
        "run_id": RUN,
        "data_dir": home / "first",
        "kafka": {"partitions": 4},
        "broker": {"port": free_port()},
        "jobs": {
            "worker_id": "0",
            "reward_functions": {"*": ["exact_match@1"]},
            "tick_interval_s": 0.3,
            "trajectory_timeout_s": DEADLINE_S,
            "anonymous_inactivity_s": DEADLINE_S / 2,
            "orphan_after_s": DEADLINE_S,
        },
        "admit": {
            "channels": ["train"],
            "policy": {
                "group_size": GROUP_SIZE,
                "batch_groups": BATCH_GROUPS,
                "required_rewards": ["env/score", "rule"],
                "reward_deadline_s": DEADLINE_S,
                "group_deadline_s": DEADLINE_S,
            },
        },
        # Commit boundaries differ in every run, because exactly-once must not depend on them.
        "lake": {"flush_rows": rng.randrange(20, 400), "flush_interval_s": rng.uniform(0.2, 1.5)},
        "up": {"processes": processes, "restart_delay_s": 0.3, "drain_timeout_s": 120.0},
    }
    for name, section in more.items():
        sections[name] = (
            {**sections.get(name, {}), **section} if isinstance(section, dict) else section
        )
    return Settings.model_validate(sections)


def another_worker(settings: Settings, worker: str) -> Settings:
    """Return the settings of another machine with one more assemble worker."""
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir.parent / f"machine-{worker}",
            "kafka": settings.kafka.model_copy(
                update={"bootstrap_servers": settings.bootstrap_servers}
            ),
            "jobs": settings.jobs.model_copy(update={"worker_id": worker}),
            "up": settings.up.model_copy(update={"processes": ("assemble",)}),
        }
    )


@dataclass
class Installation:
    """The machines, keyed by the name of their assemble worker.

    The first machine also runs all other processes.
    """

    settings: Settings
    machines: dict[str, Up]
    cluster: Cluster
    outputs: Outputs
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _assembly: Reader | None = None
    _owners: dict[int, str] = field(default_factory=dict)

    @property
    def first(self) -> Up:
        return next(iter(self.machines.values()))

    def pid(self, victim: str) -> int | None:
        """Return the process to kill: the victim itself, not the supervisor's wrapper around it.

        `assemble-N` names the process of worker N.
        """
        if victim == "broker":
            path = self.settings.broker_dir / "node-1" / "broker.pid"
            try:
                pid = int(path.read_text())
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (OSError, ValueError):
                return None
            return pid if str(path.parent).encode() in command else None
        name, _, worker = victim.partition("-")
        row = (self.machines[worker] if worker else self.first).table.get(name)
        return row["pid"] if row and row["state"] == "running" else None

    def kill(self, victim: str) -> None:
        """Run `kill -9` as soon as the victim has a process."""
        while True:
            self.first.until(lambda: self.pid(victim) is not None, f"{victim} runs")
            pid = self.pid(victim)
            try:
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    return
            except ProcessLookupError:
                continue  # it has just died of another cause, such as an unavailable broker

    def worker(self, name: str) -> subprocess.Popen[bytes]:
        """Start one more assemble worker without a supervisor."""
        settings = another_worker(self.settings, name)
        with (self.settings.data_dir.parent / "logs" / f"worker-{name}.log").open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    die_with_parent(command("jobs", "assemble", *overrides_of(settings))),
                    cwd=ROOT,
                    env=ENVIRON,
                    stdout=log,
                    stderr=log,
                )
            )
        return self.workers[-1]

    def owners(self) -> set[str]:
        """Return the workers that own a partition. Each record is read once."""
        if self._assembly is None:
            topic, partitions = self.settings.kafka.topics.assembly, self.settings.kafka.partitions
            self._assembly = self.cluster.reader(
                "tests", {(topic, p): 0 for p in range(partitions)}
            )
        codec, deadline = Codec(), time.monotonic() + 1.0
        while time.monotonic() < deadline and (records := self._assembly.poll(2000, 0.1)):
            for record in records:
                event = codec.decode(record.value)
                if isinstance(event, AssemblyMarker):
                    self._owners[record.partition] = event.worker
        return set(self._owners.values())

    def until_owned_by(self, *workers: str) -> None:
        """Wait until each of these workers owns a partition and no other worker does."""
        self.first.until(lambda: self.owners() == set(workers), f"{workers} are the owners")

    def until_batches(self, count: int, timeout_s: float = 300.0) -> None:
        """Wait until `count` more batches are published."""
        self.outputs.look()
        goal = self.outputs.batches + count

        def enough() -> bool:
            self.outputs.look()
            return self.outputs.batches >= goal

        self.first.until(enough, f"{goal} batches", timeout_s)

    def lag(self) -> dict[str, int]:
        """Return the lag of each group in records."""
        prefix = self.settings.kafka.topic_prefix
        groups = [f"{prefix}-{g}" for g in ("assemble", "reward", f"admit.{RUN}.train", "lake")]
        return {g: data_lag(self.cluster, self.settings, g) for g in groups}

    def settle(self, acks: list[Ack], timeout_s: float = SETTLE_S) -> None:
        """Wait until all sent records have reached their final state.

        Steps are closed, and groups are decided except those of the last, incomplete batch.
        """
        steps = {a.id for a in acks if a.kind == "Step"}
        out, partitions = self.outputs, self.settings.kafka.partitions
        caught_up_ms = 0

        def rest() -> str:
            nonlocal caught_up_ms
            out.look()
            if left := len(steps - out.steps):
                return f"{left} steps are in no closed trajectory"
            if (
                len(groups := {out.groups[t] for t in out.groups.keys() - out.decided})
                >= BATCH_GROUPS
            ):
                return f"{len(groups)} groups are not decided"
            lag = {g: n for g, n in self.lag().items() if n}
            if lag:
                return f"lag {lag}"
            # Unattributed records become dead letters after a waiting time. All sent records are
            # waiting by this time.
            caught_up_ms = caught_up_ms or time.time_ns() // 1_000_000
            until_ms = caught_up_ms + self.settings.jobs.orphan_after_s * 1000
            early = [p for p in range(partitions) if out.event_times.get(p, 0) <= until_ms]
            return f"orphans may wait in {early}" if early else ""

        patience, quiet = Patience(timeout_s), 0
        while quiet < 2:  # records written by the reward job must have passed assemble as well
            why = rest()
            quiet = 0 if why else quiet + 1
            patience.check(why)
            time.sleep(0.3)

    def stop(self) -> None:
        """Stop all machines in order, the first one last.

        Workers without a supervisor must have ended before.
        """
        for machine in reversed(self.machines.values()):
            machine.stop()


@contextmanager
def running(settings: Settings, workers: int) -> Iterator[Installation]:
    """Run the installation with this many assemble workers, each on its own machine."""
    with ExitStack() as stack:
        machines = {"0": stack.enter_context(up(settings))}
        cluster = Cluster(settings.bootstrap_servers)
        machines["0"].until_says("up", '"event": "up"')
        create_topics(cluster, settings)
        for n in range(1, workers):
            machines[str(n)] = stack.enter_context(up(another_worker(settings, str(n))))
        made = Installation(settings, machines, cluster, Outputs(settings, cluster))
        try:
            yield made
        finally:
            for worker in made.workers:
                worker.kill()
                worker.wait()


@contextmanager
def fed(made: Installation, steps: int, rate: float, seed: int, **load: Any) -> Iterator[Feeder]:
    """Run a feeder for the installation; the feeder has ended after the block."""
    feeder = Feeder(
        made.settings, made.settings.data_dir.parent / "feeder", steps, rate, seed, **load
    )
    try:
        yield feeder
    finally:
        feeder.kill()
