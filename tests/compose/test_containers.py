"""Test the containers on a real Docker engine: kill them, and follow every call to the lake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.containers import Containers

pytestmark = pytest.mark.compose

JOBS = ("assemble", "reward", "admit", "lake")
BROKERS = ("kafka", "kafka-2", "kafka-3")
STEPS = "select count(*) from steps"
DISTINCT_STEPS = "select count(distinct step_id) from steps"
BATCHES = "select count(*) from batches"
Eventually = Callable[..., Any]
Run = Callable[..., Any]


@pytest.mark.parametrize("profile", ["cluster", "s3", "learn", "gpu", "monitoring", "ui"])
def test_every_profile_is_valid(profile: str, tmp_path: Path) -> None:
    Containers(profile, tmp_path / "settings.yaml")("config", "--quiet")


def test_calls_reach_the_lake_and_a_batch_and_kills_lose_nothing(
    run: Run, eventually: Eventually
) -> None:
    with run("settings.yaml") as containers:
        assert httpx.post(f"{containers.url}/v1/chat/completions", json={}).status_code == 401, (
            "keys are required"
        )
        containers.play("one")
        eventually(lambda: containers.count(STEPS) == 2, 300)
        eventually(lambda: containers.count(BATCHES) == 1, 300)
        containers.kill("kafka", "gateway", *JOBS)
        containers.up()
        containers.play("two")
        eventually(lambda: containers.count(BATCHES) == 2, 300)
        assert containers.count(STEPS) == 4


def test_a_cluster_of_brokers_serves_while_any_other_container_is_dead(
    run: Run, eventually: Eventually
) -> None:
    with run("settings-cluster.yaml", profile="cluster") as containers:
        containers.play("first")
        groups = 1
        for service in (*BROKERS, *JOBS):
            containers.kill(service)
            containers.play(f"without-{service}")
            containers.up()
            groups += 1
        containers.kill("gateway")
        containers.up()
        containers.play("last")
        groups += 1
        eventually(lambda: containers.count(BATCHES) == groups, 600)
        assert containers.count(STEPS) == containers.count(DISTINCT_STEPS) == 2 * groups
