"""Workers of assemble change under load.

One worker joins, one leaves, one is killed, and one is suspended while another takes over.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.chaos import Installation, fed, installation, running
from support.chaos_logs import Logs

from runtime.exit_codes import EXIT_FAILED
from schemas.settings import Settings

PROCESSES = ("broker", "assemble", "reward", "admit", "lake")
STALL_S = 30.0
STOPPED_S = 60.0


def settings_of(home: Path) -> Settings:
    """Settings without changelog truncation, because the tests check every decision."""
    return installation(
        home, PROCESSES, random.Random(os.getpid()), jobs={"snapshot_min_bytes": 1 << 30}
    )


def come_and_go(home: Path, rate: float, batches: int) -> float:
    """Start, stop and kill workers.

    Args:
        rate: steps per second.
        batches: batches to wait for after each change.

    Returns:
        The longest time without output of a partition, in seconds.
    """
    settings = settings_of(home)
    with running(settings, workers=1) as made:
        with fed(made, steps=1, rate=rate, seed=os.getpid()) as feeder:
            made.until_batches(batches)
            begun_ms = time.time_ns() // 1_000_000
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
            ended_ms = time.time_ns() // 1_000_000
            feeder.finish(timeout_s=300)
            acks = feeder.acks()
        logs = settled(made, acks)
    logs.check_lake()
    stall_s = logs.pause_of_trajectories_s(begun_ms, ended_ms)
    print(json.dumps({"seconds": (ended_ms - begun_ms) // 1000, "longest_stall_s": stall_s}))
    return stall_s


def settled(made: Installation, acks: list[Any]) -> Logs:
    """Wait for all outputs, check them and stop the installation."""
    made.settle(acks)
    logs = Logs.read(made.settings, made.cluster)
    print(json.dumps({**logs.check(acks), **logs.check_decisions(made.cluster)}))
    made.stop()
    return logs


def stand_still(home: Path, rate: float, stops_s: list[float], wait_s: float) -> None:
    """Suspend a worker once for each of `stops_s`, then resume it.

    Args:
        stops_s: suspension in seconds; it lasts at least until another worker has taken over.
        wait_s: longest random wait before a suspension, in seconds.
    """
    settings, rng = settings_of(home), random.Random(os.getpid())
    with running(settings, workers=1) as made:
        with fed(made, steps=1, rate=rate, seed=os.getpid()) as feeder:
            for stop_s in stops_s:
                stopped = made.worker("1")
                made.until_owned_by("0", "1")
                made.until_batches(2)
                # A random pause, so that the signal hits any point of the work.
                time.sleep(rng.uniform(0, wait_s))
                stopped.send_signal(signal.SIGSTOP)
                begun = time.monotonic()
                made.until_owned_by("0")
                time.sleep(max(0.0, begun + stop_s - time.monotonic()))
                stopped.send_signal(signal.SIGCONT)
                # A worker suspended within a batch is fenced and exits. A worker suspended between
                # two batches joins the group again.
                made.first.until(
                    lambda s=stopped: s.poll() is not None or "1" in made.owners(), "it has noticed"
                )  # type: ignore[misc]
                assert stopped.poll() in (None, EXIT_FAILED)
                made.until_batches(2)
                stopped.send_signal(signal.SIGTERM)
                assert stopped.wait(180) in (0, EXIT_FAILED)
            feeder.finish(timeout_s=300)
            acks = feeder.acks()
        logs = settled(made, acks)
    logs.check_lake()


@pytest.mark.timeout(1500)
def test_workers_come_and_go(tmp_path: Path) -> None:
    """The short version of `test_workers_come_and_go_under_load`, without its bound on stalls."""
    come_and_go(tmp_path, rate=150.0, batches=2)


@pytest.mark.timeout(1500)
def test_a_worker_that_stood_still(tmp_path: Path) -> None:
    """The short version of `test_a_worker_that_stood_still_for_a_minute`."""
    stand_still(tmp_path, rate=150.0, stops_s=[0.0], wait_s=1.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_workers_come_and_go_under_load(tmp_path: Path) -> None:
    assert come_and_go(tmp_path, rate=500.0, batches=60) <= STALL_S


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_worker_that_stood_still_for_a_minute(tmp_path: Path) -> None:
    stand_still(tmp_path, rate=500.0, stops_s=[STOPPED_S, 0.0, 0.0, 0.0], wait_s=5.0)
