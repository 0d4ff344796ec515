"""Workers of assemble change under load.

One worker joins, one leaves, one is killed, and one is suspended while another takes over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.chaos import Installation, fed, installation, running
from support.chaos_logs import Logs
from support.processes import freeze

from clawstream.runtime.exit_codes import EXIT_FAILED
from clawstream.schemas.settings import Settings

PROCESSES = ("broker", "assemble", "reward", "admit", "lake")
STALL_S = 30.0
STOPPED_S = 60.0


def settings_of(home: Path) -> Settings:
    """Settings without changelog truncation, because the tests check every decision."""
    return installation(
        home, PROCESSES, random.Random(os.getpid()), jobs={"snapshot_min_bytes": 1 << 30}
    )


def under_load(home: Path, rate: float, change: Callable[[Installation], None]) -> float:
    """Change the workers of an installation under load, then check all records.

    Args:
        rate: steps per second.

    Returns:
        The longest time without output of a partition during the change, in seconds.
    """
    settings = settings_of(home)
    with running(settings, workers=1) as made:
        with fed(made, steps=1, rate=rate, seed=os.getpid()) as feeder:
            made.until_batches(2)
            begun_ms = time.time_ns() // 1_000_000
            change(made)
            ended_ms = time.time_ns() // 1_000_000
            feeder.finish(timeout_s=300)
            acks = feeder.acks()
        made.settle(acks)
        logs = Logs.read(settings, made.cluster)
        print(json.dumps({**logs.check(acks), **logs.check_decisions(made.cluster)}))
        made.stop()
    logs.check_lake()
    stall_s = logs.pause_of_trajectories_s(begun_ms, ended_ms)
    print(json.dumps({"seconds": (ended_ms - begun_ms) // 1000, "longest_stall_s": stall_s}))
    return stall_s


def come_and_go(made: Installation, batches: int) -> None:
    """Start, stop and kill workers. batches: to wait for after each change."""
    joins = made.worker("1")
    made.until_owned_by("0", "1")
    made.until_batches(batches)
    joins.send_signal(signal.SIGTERM)
    assert joins.wait(180) == 0
    made.until_owned_by("0")
    made.until_batches(batches)
    killed = made.worker("2")
    made.until_owned_by("0", "2")
    made.until_batches(batches)
    killed.kill()
    made.until_owned_by("0")
    made.until_batches(batches)


def stand_still(made: Installation, stop_s: float, wait_s: float) -> None:
    """Suspend a worker, then resume it.

    Args:
        stop_s: suspension in seconds; it lasts at least until another worker has taken over.
        wait_s: longest random wait before the suspension, in seconds.
    """
    stopped = made.worker("1")
    made.until_owned_by("0", "1")
    made.until_batches(2)
    # A random pause, so that the signal hits any point of the work.
    time.sleep(random.uniform(0, wait_s))
    freeze(stopped.pid)
    begun = time.monotonic()
    made.until_owned_by("0")
    time.sleep(max(0.0, begun + stop_s - time.monotonic()))
    stopped.send_signal(signal.SIGCONT)
    # A worker suspended within a batch is fenced and exits. A worker suspended between two batches
    # joins the group again.
    made.first.until(lambda: stopped.poll() is not None or "1" in made.owners(), "it has noticed")
    assert stopped.poll() in (None, EXIT_FAILED)
    made.until_batches(2)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(180) in (0, EXIT_FAILED)


def test_workers_change(tmp_path: Path) -> None:
    """The short version of the next two tests, without their bound on stalls."""

    def change(made: Installation) -> None:
        come_and_go(made, batches=2)
        stand_still(made, stop_s=0.0, wait_s=1.0)

    under_load(tmp_path, 150.0, change)


@pytest.mark.long
def test_workers_come_and_go_under_load(tmp_path: Path) -> None:
    assert under_load(tmp_path, 500.0, lambda made: come_and_go(made, batches=60)) <= STALL_S


@pytest.mark.long
def test_a_worker_that_stood_still_for_a_minute(tmp_path: Path) -> None:
    def change(made: Installation) -> None:
        for stop_s in (STOPPED_S, 0.0, 0.0, 0.0):
            stand_still(made, stop_s, wait_s=5.0)

    under_load(tmp_path, 500.0, change)
