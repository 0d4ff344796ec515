"""Three real brokers with three replicas of each partition.

Brokers are killed in turn under load and restarted by `clawstream broker start`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from support.chaos import Installation, fed, installation, running
from support.chaos_feed import longest_pause_s
from support.chaos_logs import Logs
from support.ports import free_port
from support.up import call

from clawstream.runtime.broker.embedded import status
from clawstream.runtime.process.config import overrides_of
from clawstream.schemas.settings import Settings

NODES = 3
ACKS_PAUSE_S, BATCHES_PAUSE_S = 10.0, 30.0


@contextmanager
def brokers(settings: Settings) -> Iterator[None]:
    """Run the cluster of the settings, started by the command line as a user starts it."""
    started = call("broker", "start", "--nodes", str(NODES), *overrides_of(settings), timeout_s=400)
    try:
        assert started.returncode == 0, started.stderr
        yield
    finally:
        call("broker", "stop", *overrides_of(settings))


def kill_node(settings: Settings, node: int) -> None:
    (pid,) = [n.pid for n in status(settings.broker_dir) if n.node == node]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def bring_back(made: Installation) -> None:
    """Restart the dead node and wait until all replicas are in sync."""
    back = call("broker", "start", *overrides_of(made.settings), timeout_s=400)
    assert back.returncode == 0, back.stderr
    assert len([n for n in status(made.settings.broker_dir) if n.ready]) == NODES
    admin = AdminClient({"bootstrap.servers": made.settings.bootstrap_servers, "log_level": 0})

    def in_sync() -> bool:
        topics = admin.list_topics(timeout=30).topics.values()
        return all(len(p.isrs) == NODES for t in topics for p in t.partitions.values())

    made.first.until(in_sync, "all copies are in sync")


def kill_nodes(
    home: Path, nodes: Sequence[int], rate: float, batches: int, settings_of: random.Random
) -> dict[str, float]:
    """Kill these nodes, one after the other.

    Args:
        nodes: numbers of the nodes, from 1.
        rate: steps per second.
        batches: batches to wait for while a node is down, and again after its restart.

    Returns:
        The longest pauses, in seconds.
    """
    settings = installation(
        home, ("assemble", "reward", "admit", "lake"), settings_of,
        broker={"nodes": NODES, "port": free_port(nodes=NODES), "heap_mb": 256},
    )  # fmt: skip
    assert settings.replication == (3, 2)
    with brokers(settings), running(settings, workers=1) as made:
        with fed(made, steps=1, rate=rate, seed=settings_of.randrange(1 << 30)) as feeder:
            made.until_batches(3)
            begun, begun_ms = time.monotonic(), time.time_ns() // 1_000_000
            for node in nodes:
                kill_node(settings, node)
                made.until_batches(batches)
                bring_back(made)
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
    kill_nodes(tmp_path, [rng.randint(1, NODES)], rate=120.0, batches=3, settings_of=rng)


@pytest.mark.long
def test_each_is_killed_under_load(tmp_path: Path) -> None:
    rng = random.Random(os.getpid())
    pauses = kill_nodes(tmp_path, range(1, NODES + 1), rate=500.0, batches=60, settings_of=rng)
    assert pauses["acks_pause_s"] <= ACKS_PAUSE_S
    assert pauses["batches_pause_s"] <= BATCHES_PAUSE_S
