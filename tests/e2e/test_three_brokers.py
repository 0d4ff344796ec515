"""Three real brokers with three replicas of each partition.

Each is a `clawstream broker run` with a host and a data directory of its own. They are killed in
turn under load and started again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from support.chaos import Installation, fed, installation, running
from support.chaos_feed import longest_pause_s
from support.chaos_logs import Logs
from support.patience import until
from support.ports import free_port
from support.up import ENVIRON, ROOT, command

from clawstream.runtime.broker.embedded import status
from clawstream.runtime.process.child import die_with_parent
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.settings import Settings

HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
"""Addresses of this machine."""
ACKS_PAUSE_S, BATCHES_PAUSE_S = 10.0, 30.0


class Brokers:
    """The nodes of the cluster, each a process as a user starts it, by the address of its host."""

    def __init__(self, settings: Settings, home: Path) -> None:
        self.settings, self._home = settings, home
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str) -> None:
        words = (f"broker.advertised_host={host}", f"broker.data_dir={self._home / host}")
        with (self._home / f"{host}.log").open("ab") as log:
            self._processes[host] = subprocess.Popen(
                die_with_parent(
                    command("broker", "run", *overrides_of(self.settings), *words), signal.SIGTERM
                ),
                cwd=ROOT,
                env=ENVIRON,
                stdout=log,
                stderr=log,
            )

    def ready(self, host: str) -> bool:
        node = status(self._home / host)
        return node is not None and node.ready

    def kill(self, host: str) -> None:
        """Run `kill -9` on the JVM; its parent ends with it."""
        node = status(self._home / host)
        assert node is not None and node.pid is not None
        os.kill(node.pid, signal.SIGKILL)
        assert self._processes[host].wait(60) == 128 + signal.SIGKILL

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(60)


@contextmanager
def brokers(settings: Settings, home: Path) -> Iterator[Brokers]:
    """Run the cluster of the settings."""
    home.mkdir()
    nodes = Brokers(settings, home)
    try:
        for host in HOSTS:
            nodes.start(host)
        until(lambda: all(map(nodes.ready, HOSTS)), "three nodes that serve")
        yield nodes
    finally:
        nodes.stop()


def bring_back(made: Installation, nodes: Brokers, host: str) -> None:
    """Restart the dead node and wait until all replicas are in sync."""
    nodes.start(host)
    until(lambda: all(map(nodes.ready, HOSTS)), "three nodes that serve again")
    admin = AdminClient({"bootstrap.servers": made.settings.bootstrap_servers, "log_level": 0})

    def in_sync() -> bool:
        topics = admin.list_topics(timeout=30).topics.values()
        return all(len(p.isrs) == len(HOSTS) for t in topics for p in t.partitions.values())

    made.first.until(in_sync, "all copies are in sync")


def kill_nodes(
    home: Path, hosts: Sequence[str], rate: float, batches: int, settings_of: random.Random
) -> dict[str, float]:
    """Kill these nodes, one after the other.

    Args:
        hosts: of the nodes.
        rate: steps per second.
        batches: batches to wait for while a node is down, and again after its restart.

    Returns:
        The longest pauses, in seconds.
    """
    settings = installation(
        home, ("assemble", "reward", "admit", "lake"), settings_of,
        broker={"hosts": HOSTS, "port": free_port(nodes=len(HOSTS)), "heap_mb": 256},
    )  # fmt: skip
    assert settings.replication == (3, 2)
    with brokers(settings, home / "brokers") as nodes, running(settings, workers=1) as made:
        with fed(made, steps=1, rate=rate, seed=settings_of.randrange(1 << 30)) as feeder:
            made.until_batches(3)
            begun, begun_ms = time.monotonic(), time.time_ns() // 1_000_000
            for host in hosts:
                nodes.kill(host)
                made.until_batches(batches)
                bring_back(made, nodes, host)
                made.until_batches(batches)
            ended, ended_ms = time.monotonic(), time.time_ns() // 1_000_000
            feeder.finish(timeout_s=300)
            acks = feeder.acks()
        made.settle(acks)
        logs = Logs.read(settings, made.cluster)
        figures = logs.check(acks)
        made.stop()
    logs.check_lake()
    pauses = {
        "acks_pause_s": longest_pause_s([a for a in acks if begun <= a.at <= ended]),
        "batches_pause_s": logs.pause_of_batches_s(begun_ms, ended_ms),
    }
    print(
        json.dumps(
            {
                **{k: round(v, 1) for k, v in pauses.items()},
                "seconds": round(ended - begun),
                **figures,
            }
        )
    )
    return pauses


def test_one_is_killed(tmp_path: Path) -> None:
    """The short version of the next test: a random node, and no bounds on the pauses."""
    rng = random.Random(os.getpid())
    kill_nodes(tmp_path, [rng.choice(HOSTS)], rate=120.0, batches=3, settings_of=rng)


@pytest.mark.long
def test_each_is_killed_under_load(tmp_path: Path) -> None:
    rng = random.Random(os.getpid())
    pauses = kill_nodes(tmp_path, HOSTS, rate=500.0, batches=60, settings_of=rng)
    assert pauses["acks_pause_s"] <= ACKS_PAUSE_S
    assert pauses["batches_pause_s"] <= BATCHES_PAUSE_S
