"""The project's containers and a scripted engine on a real Docker engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import httpx
from openai import OpenAI
from support.ports import free_port
from support.processes import until

TESTS = Path(__file__).parents[1] / "compose"
INFRA = TESTS.parents[1] / "infra"


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
        for file in (INFRA / "docker-compose.yml", TESTS / "engine.yml"):
            self._command += ["--file", str(file)]
        if profile is not None:
            self._command += ["--profile", profile]
        self._environment = os.environ | {
            "PUBLISH": f"127.0.0.1:{port}",
            "ENGINES": "[http://engine:9000]",
            "SETTINGS": str(settings),
            "TESTS": str(TESTS),
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
            until(lambda: self._get("/v1/models") != 401)  # gateways read keys once a second
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
                headers=self._login,
                timeout=60,
            )
            assert done.status_code == 200, done.text

    @property
    def _login(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"}

    def _get(self, path: str) -> int:
        return httpx.get(self.url + path, headers=self._login).status_code
