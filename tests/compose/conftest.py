"""Build the image and run the project's containers on a real Docker engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI
from support.ports import free_port

HERE = Path(__file__).parent
INFRA = HERE.parents[1] / "infra"
FAST = {
    "lake": {"flush_interval_s": 0.5},
    "admit": {"policy": {"group_size": 2, "batch_groups": 1}},
}
"""Settings in which two trajectories are a batch, added to those of the containers."""


def compose_command() -> list[str]:
    """Return `docker compose`, or the stand-alone `docker-compose`."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    return ["docker", "compose"]


class Containers:
    """Run the project's containers and an engine under a separate project name.

    Args:
        profile: a profile to add, if any.
        settings: the file with the settings of all containers.
    """

    def __init__(self, profile: str | None, settings: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*compose_command(), "--project-name", "clawstream-test"]
        for file in (INFRA / "docker-compose.yml", HERE / "engine.yml"):
            self._command += ["--file", str(file)]
        if profile is not None:
            self._command += ["--profile", profile]
        self._environment = os.environ | {
            "PUBLISH": f"127.0.0.1:{port}",
            "ENGINES": "[http://engine:9000]",
            "SETTINGS": str(settings),
            "TESTS": str(HERE),
        }
        self._key = ""

    def __call__(self, *arguments: str, read: bool = False) -> str:
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE if read else None,
        )
        return done.stdout or ""

    def up(self) -> None:
        """Start what does not run, and wait until all are healthy."""
        self("up", "--detach", "--wait")

    def kill(self, *services: str) -> None:
        self("kill", "--signal", "KILL", *services)

    def clawstream(self, *arguments: str) -> str:
        """Run a command next to the gateway, and return its output."""
        config = ("--config", "/etc/clawstream/settings.yaml")
        return self("exec", "-T", "gateway", "clawstream", *arguments, *config, read=True)

    def count(self, query: str) -> int:
        """Return the single number that a query gives; 0 while the table does not exist."""
        try:
            (row,) = json.loads(self.clawstream("sql", query, "--format", "json"))
        except subprocess.CalledProcessError:
            return 0
        (value,) = row.values()
        return int(value)

    def play(self, group: str) -> None:
        """Create a group of two trajectories of one call each, with different rewards."""
        if not self._key:
            scopes = ("--scope", "agent", "--scope", "reward")
            self._key = self.clawstream("keys", "create", "--name", "agent", *scopes).split()[-1]
        for reward in (0.0, 1.0):
            base = f"{self.url}/{group}-{reward:g}/{group}"
            with OpenAI(base_url=f"{base}/v1", api_key=self._key, max_retries=5) as client:
                reply = client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "Hi"}]
                )
            assert reply.choices[0].message.content == "Hello"
            done = httpx.post(
                f"{base}/v1/complete_trajectory",
                json={"reward": reward},
                headers={"authorization": f"Bearer {self._key}"},
                timeout=60,
            )
            assert done.status_code == 200, done.text


Run = Callable[..., Any]


@pytest.fixture(scope="session")
def image() -> None:
    """Build the image of the data part."""
    # Not with compose: without the buildx plugin it builds nothing.
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    options = ("--target", "core", "--tag", "clawstream-core", "--build-arg", f"BASE_IMAGE={base}")
    subprocess.run(
        ["docker", "build", "--file", INFRA / "Dockerfile", *options, INFRA.parent], check=True
    )


@pytest.fixture
def run(image: None, tmp_path: Path) -> Run:
    """Return a context manager that runs the containers of a profile with a settings file."""

    @contextmanager
    def run(settings: str, profile: str | None = None) -> Iterator[Containers]:
        tree = yaml.safe_load((INFRA / settings).read_text())
        path = tmp_path / settings
        path.write_text(yaml.safe_dump(FAST | tree))
        containers = Containers(profile, path)
        try:
            containers.up()
            yield containers
        finally:
            containers("logs", "--tail", "20")
            containers("down", "--volumes", "--timeout", "60")

    return run
