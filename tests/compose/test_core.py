"""Test the containers of the core profile on a real Docker engine.

The tests call through the published port, kill containers and keep volumes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from support.ports import free_port

pytestmark = pytest.mark.compose

HERE = Path(__file__).parent
FILES = (HERE.parents[1] / "infra" / "docker-compose.yml", HERE / "engine.yml")
Eventually = Callable[..., Any]


def compose_command() -> list[str]:
    """Return `docker compose`, or the stand-alone `docker-compose`."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return ["docker", "compose"]


class Containers:
    """Run the project's containers and an engine under a separate project name."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*compose_command(), "--project-name", "clawstream-test"]
        for file in FILES:
            self._command += ["--file", str(file)]
        self._environment = os.environ | {
            "PUBLISH": f"127.0.0.1:{port}",
            "ENGINES": "[http://engine:9000]",
            "SETTINGS": str(HERE / "settings.yaml"),
            "TESTS": str(HERE),
        }

    def __call__(self, *arguments: str, read: bool = False) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE if read else None,
        )
        return done.stdout or ""

    def clawstream(self, *arguments: str) -> str:
        """Run a command next to the gateway, and return its output."""
        return self(
            "exec",
            "-T",
            "gateway",
            "clawstream",
            *arguments,
            "--config",
            "/etc/clawstream/settings.yaml",
            read=True,
        )

    def count(self, query: str) -> int:
        """Return the single number that a query gives; 0 while the table does not exist."""
        try:
            (row,) = json.loads(self.clawstream("sql", query, "--format", "json"))
        except subprocess.CalledProcessError:
            return 0
        (value,) = row.values()
        return int(value)


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    containers = Containers(free_port())
    # Not with compose: without the buildx plugin it builds nothing.
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    image = ("--target", "core", "--tag", "clawstream-core", "--build-arg", f"BASE_IMAGE={base}")
    subprocess.run(
        ["docker", "build", "--file", FILES[0].with_name("Dockerfile"), *image, HERE.parents[1]],
        check=True,
    )
    try:
        containers("up", "--detach", "--wait")
        yield containers
    finally:
        containers("logs", "--tail", "20")
        containers("down", "--volumes", "--timeout", "60")


def call(containers: Containers, key: str, trajectory: str, reward: float) -> None:
    """Create one trajectory of one call, and complete it with a reward."""
    base = f"{containers.url}/{trajectory}/group"
    with OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=5) as client:
        reply = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}]
        )
    assert reply.choices[0].message.content == "Hello"
    done = httpx.post(
        f"{base}/v1/complete_trajectory",
        json={"reward": reward},
        headers={"authorization": f"Bearer {key}"},
    )
    assert done.status_code == 200, done.text


def test_calls_reach_the_lake_and_a_batch_and_kills_lose_nothing(
    containers: Containers, eventually: Eventually
) -> None:
    assert httpx.post(f"{containers.url}/v1/chat/completions", json={}).status_code == 401, (
        "keys are required"
    )
    key = containers.clawstream(
        "keys", "create", "--name", "agent", "--scope", "agent", "--scope", "reward"
    )
    key = key.split()[-1]
    call(containers, key, "one", 1.0)
    call(containers, key, "two", 0.0)
    eventually(lambda: containers.count("select count(*) from steps") == 2, 300)
    eventually(lambda: containers.count("select count(*) from batches") == 1, 300)
    containers("kill", "--signal", "KILL", "kafka", "assemble", "admit", "lake", "gateway")
    containers("up", "--detach", "--wait")
    call(containers, key, "three", 1.0)
    call(containers, key, "four", 0.0)
    eventually(lambda: containers.count("select count(*) from batches") == 2, 300)
    assert containers.count("select count(*) from steps") == 4
