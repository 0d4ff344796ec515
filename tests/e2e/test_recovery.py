"""Time until the next output after an assemble worker is killed.

The worker has many open trajectories, and all its local files are deleted.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import Jobs, running, session, step

from clawstream.ops.lag import data_lag
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.records import Step, Trajectory
from clawstream.schemas.settings import Settings
from clawstream.schemas.tokens import pack_logprobs
from clawstream.schemas.topics import partition_of

OLDEST = "oldest"
TURNS = 8
RESPONSE_TOKENS, TURN_TOKENS = 256, 512
"""Tokens of a reply, and of a turn: a reply and the environment's answer.

Prompts have 256, 768, ... 3,840 tokens, 2,048 on average.
"""
LOGPROBS = pack_logprobs([-0.5] * RESPONSE_TOKENS)
SMALL_TURNS = 50
RECOVERY_S = 15.0


@pytest.fixture
def jobs(settings: Settings, cluster: Cluster, tmp_path: Path) -> Iterator[Jobs]:
    home = settings.model_copy(update={"data_dir": tmp_path / "data"})
    with running(home, cluster, tmp_path) as made:
        yield made


def realistic(key: str, rng: np.random.Generator) -> Iterator[Step]:
    """Yield the steps of a trajectory, of 2,048 + 256 tokens on average."""
    ids = rng.integers(0, 150_000, TURN_TOKENS * TURNS, dtype="<i4")
    for turn in range(TURNS):
        prompt = TURN_TOKENS * turn + RESPONSE_TOKENS
        made = step(key, [], [])
        yield Step(
            **{name: getattr(made, name) for name in made.__dataclass_fields__}
            | {
                "prompt_token_ids": ids[:prompt].tobytes(),
                "response_token_ids": ids[prompt : prompt + RESPONSE_TOKENS].tobytes(),
                "response_logprobs": LOGPROBS,
            }
        )


def small(count: int, partition: int, partitions: int) -> Iterator[Any]:
    """Yield at least `count` small records of one partition: trajectories that open and close."""
    number = made = 0
    while made < count:
        number += 1
        key = f"small-{number}"
        if partition_of(key.encode(), partitions) == partition:
            yield from (step(key, [1, turn], [2]) for turn in range(SMALL_TURNS))
            yield session(key, "completed")
            made += SMALL_TURNS + 1


def recover(
    jobs: Jobs, open_steps: int, between: int, timeout_s: float, eventually: Callable[..., Any]
) -> dict[str, float]:
    """Measure the recovery of a killed worker.

    Args:
        open_steps: steps of the open trajectories.
        between: records after the oldest open trajectory.

    Returns:
        Seconds from the kill to the first output, to the output of the oldest trajectory, and to
        the last output.
    """
    rng, partitions = np.random.default_rng(1), jobs.settings.kafka.partitions
    group = f"{jobs.topics.prefix}-assemble"
    keys = [OLDEST, *(f"open-{n}" for n in range(open_steps // TURNS - 1))]
    worker = jobs.start()

    def put(events: Iterator[Any]) -> None:
        for n, event in enumerate(events):
            jobs.put(event)
            if n % 2000 == 1999:
                jobs.producer.flush()
        jobs.producer.flush()

    put(realistic(OLDEST, rng))
    put(small(between, partition_of(OLDEST.encode(), partitions), partitions))
    put(event for key in keys[1:] for event in realistic(key, rng))
    eventually(lambda: data_lag(jobs.cluster, jobs.settings, group) == 0, timeout_s)

    topic = jobs.topics.trajectories
    ends = jobs.cluster.watermarks(topic)
    killed_ms = time.time_ns() // 1_000_000
    worker.kill()
    worker.wait()
    shutil.rmtree(jobs.settings.data_dir)
    jobs.start()
    put(session(key, "completed") for key in keys)
    eventually(
        lambda: (
            sum(e - ends[p][1] for p, (_, e) in jobs.cluster.watermarks(topic).items()) >= len(keys)
        ),
        timeout_s,
    )

    found: dict[str, int] = {}
    for p in range(partitions):
        for record in jobs.cluster.read_all(topic, p, first=ends[p][1]):
            event = jobs.codec.decode(record.value)
            if isinstance(event, Trajectory):
                assert (event.outcome, len(event.steps)) == ("completed", TURNS), (
                    event.trajectory_id
                )
                assert sum(len(s.token_ids) for s in event.segments) == 4 * TURN_TOKENS * TURNS
                found.setdefault(event.trajectory_id, record.timestamp_ms)
    assert found.keys() == set(keys)
    times = {
        "first_output_s": min(found.values()),
        "oldest_s": found[OLDEST],
        "last_output_s": max(found.values()),
    }
    return {name: (at - killed_ms) / 1000 for name, at in times.items()}


def test_recovers_what_was_open(jobs: Jobs, eventually: Callable[..., Any]) -> None:
    """The short version of the next test, without a bound on time."""
    print(json.dumps(recover(jobs, 2000, 20_000, 400.0, eventually)))


@pytest.mark.long
def test_recovers_fifty_thousand_open_steps(jobs: Jobs, eventually: Callable[..., Any]) -> None:
    """The oldest trajectory is a million records old.

    The bound holds for two cores without other load.
    """
    times = recover(jobs, 50_000, 1_000_000, 1800.0, eventually)
    print(json.dumps(times))
    assert times["first_output_s"] <= RECOVERY_S
