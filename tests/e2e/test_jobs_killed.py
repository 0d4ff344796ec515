"""Kill every stream job, admission, the lake writer and the broker at random, under load.

Then count all records and fold them again.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from support.chaos import VICTIMS, fed, installation, running
from support.chaos_feed import longest_pause
from support.chaos_logs import Logs

PROCESSES = ("broker", "assemble", "reward", "admit", "lake")


def kill_at_random(
    home: Path, kills: int, steps: int, rate: float, pause_s: float, seed: int
) -> None:
    """Kill processes at random and check the result.

    Args:
        rate: steps per second.
        pause_s: average time between two kills, in seconds.
    """
    rng = random.Random(seed)
    victims = [
        v for _ in range(-(-kills // len(VICTIMS))) for v in rng.sample(VICTIMS, len(VICTIMS))
    ][:kills]
    settings = installation(home, PROCESSES, rng)
    with running(settings, workers=2) as made, fed(made, steps, rate, seed) as feeder:
        made.until_batches(1)
        begun, broker_killed = time.monotonic(), list[float]()
        for victim in victims:
            # A random pause, so that the kill hits any point of the work.
            time.sleep(rng.uniform(0, 2 * pause_s))
            made.kill(victim)
            if victim == "broker":
                broker_killed.append(time.monotonic())
        killed_s = time.monotonic() - begun
        feeder.finish(timeout_s=3 * steps / rate + 300)  # a busy machine does not reach the rate
        acks = feeder.acks()
        made.settle(acks)
        logs = Logs.read(settings, made.cluster)
        figures = logs.check(acks)
        assert figures["steps"] >= steps
        restarts = [made.first.table[n]["restarts"] for n in PROCESSES] + [
            made.machines["1"].table["assemble"]["restarts"]
        ]
        assert all(restarts), f"somebody was never killed: {restarts}"
        made.stop()
    logs.check_lake()
    # One pause can contain several kills, if the broker is killed again before it serves.
    since, until = longest_pause(acks)
    pause = {
        "longest_pause_of_acks_s": round(until - since, 1),
        "broker_kills_in_it": sum(since <= t <= until for t in broker_killed),
    }
    print(json.dumps({"kills": kills, "seconds_of_kills": round(killed_s), **pause, **figures}))


def test_killed_at_random(tmp_path: Path) -> None:
    """The short version of `test_a_hundred_kills`: every process is killed once."""
    kill_at_random(
        tmp_path,
        kills=len(VICTIMS),
        steps=5_000,
        rate=400.0,
        pause_s=2.5,
        seed=random.randrange(1 << 30),
    )


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    """102 kills during 200,000 steps: about 17 minutes on two cores."""
    kill_at_random(
        tmp_path, kills=102, steps=200_000, rate=500.0, pause_s=7.0, seed=random.randrange(1 << 30)
    )
