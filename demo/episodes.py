"""Run episodes: open a trajectory at the gateway, let the black-box agent play with it as its
base_url, and complete it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from clawstream.demo.task import Task, make_task, score
from clawstream.runtime.process.child import die_with_parent
from clawstream.schemas.errors import ForeseenError
from clawstream.schemas.settings import Settings

RETRY_S = 0.5
RETRIES = 120


class EpisodeFailed(ForeseenError):
    """The gateway refused to open or complete a trajectory; the message has its reply."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One trajectory to play. temperature: None means the engine's default of 1."""

    key: str
    group_id: str
    group_size: int
    channel: str
    task: Task
    temperature: float | None
    stream: bool


@dataclass(frozen=True, slots=True)
class Played:
    """How an episode ended. error: of the agent; None when it gave an answer."""

    correct: bool
    error: str | None


class Player:
    """The agent process and the client that opens and completes its trajectories."""

    def __init__(self, settings: Settings, log: Path) -> None:
        self._settings, self._log_path = settings, log
        self.url = f"http://127.0.0.1:{settings.gateway.port}"
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._free = asyncio.Semaphore(settings.demo.concurrency)
        self.answered: dict[str, int] = {}

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        # The SDK would parse a bundle of root certificates although it calls plain http.
        environ = {
            k: v for k, v in os.environ.items() if k not in ("SSL_CERT_FILE", "SSL_CERT_DIR")
        }
        command = [sys.executable, "-P", "-m", "clawstream.demo.agent"]
        command += ["--concurrency", str(self._settings.demo.concurrency)]
        with self._log_path.open("ab") as log:
            self._agents = await asyncio.create_subprocess_exec(
                *die_with_parent(command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environ,
            )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        assert self._agents.stdin is not None
        self._agents.stdin.close()
        if error is not None:
            self._agents.terminate()
        await self._agents.wait()
        await self._reading
        await self._http.close()

    async def _read(self) -> None:
        assert self._agents.stdout is not None
        while line := await self._agents.stdout.readline():
            result = json.loads(line)
            self._waiting.pop(result["id"]).set_result(result)
        for future in self._waiting.values():
            future.set_exception(EpisodeFailed("the agent process ended; see its log"))

    async def play(self, episode: Episode) -> Played:
        """Open, play and complete a trajectory. An error of the agent makes it a failed one."""
        async with self._free:
            base = f"{self.url}/{episode.key}/{episode.group_id}/v1"
            task = episode.task
            await self._post(
                f"{base}/register_trajectory",
                {
                    "channel": episode.channel,
                    "group_size": episode.group_size,
                    "metadata": {"key": task.key, "addend": task.addend, "gold": task.gold},
                },
            )
            result = await self._ask(episode, base)
            error = result.get("error")
            await self._post(
                f"{base}/complete_trajectory",
                {"outcome": "failed", "reason": error} if error else {"outcome": "completed"},
            )
        self.answered[episode.key] = result["turns"]
        return Played(score(task.gold, task.key, result["answer"], None) == 1.0, error)

    @property
    def turns_answered(self) -> int:
        """Number of answered calls in episodes that have ended."""
        return sum(self.answered.values())

    async def _ask(self, episode: Episode, base: str) -> dict[str, Any]:
        job = {
            "id": episode.key,
            "question": episode.task.question,
            "base_url": base,
            "stream": episode.stream,
        }
        if episode.temperature is not None:
            job["temperature"] = episode.temperature
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[episode.key] = future
        assert self._agents.stdin is not None
        self._agents.stdin.write(json.dumps(job).encode() + b"\n")
        return await future

    async def _post(self, url: str, body: dict[str, Any]) -> None:
        """POST until it is accepted: the gateway may be restarting."""
        await self._until_accepted("POST", url, RETRIES * RETRY_S, body)

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the gateway can serve a call.

        Raises:
            EpisodeFailed: it cannot after `timeout_s`.
        """
        await self._until_accepted("GET", f"{self.url}/ready", timeout_s)

    async def _until_accepted(
        self, method: str, url: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> None:
        """Repeat a request until its status is below 300; a 4xx other than 429 is final."""
        loop = asyncio.get_running_loop()
        deadline, last = loop.time() + timeout_s, "no answer"
        while loop.time() < deadline:
            try:
                async with self._http.request(method, url, json=body) as reply:
                    if reply.status < 300:
                        return
                    last = f"{reply.status} {await reply.text()}"
                    if reply.status < 500 and reply.status != 429:
                        break
            except (aiohttp.ClientError, TimeoutError) as e:
                last = repr(e)
            await asyncio.sleep(RETRY_S)
        raise EpisodeFailed(f"{method} {url}: {last}")

    async def steps_answered(self) -> int:
        """Return the gateway's own count of answered steps."""
        async with self._http.get(f"{self.url}/metrics") as reply:
            lines = (await reply.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return int(float(values["clawstream_gateway_steps_answered_total"]))


def training_group(settings: Settings, number: int, rng: random.Random) -> list[Episode]:
    """Return the episodes of a group: one task, the policy's group size; some of them stream."""
    demo, size = settings.demo, settings.admit.policy.group_size
    task = make_task(rng, held_out=False)
    group = f"s{demo.seed}-g{number}"
    return [
        Episode(f"{group}-{i}", group, size, "train", task, None, rng.random() < demo.stream_share)
        for i in range(size)
    ]


def evaluation(settings: Settings, name: str, temperature: float | None) -> list[Episode]:
    """Return an episode for each held-out task, the same tasks every time."""
    rng = random.Random(777)
    tasks = [make_task(rng, held_out=True) for _ in range(settings.demo.eval_tasks)]
    return [
        Episode(
            f"s{settings.demo.seed}-{name}-{i}", f"{name}-{i}", 1, "val", task, temperature, False
        )
        for i, task in enumerate(tasks)
    ]


def share_correct(played: Sequence[Played]) -> float:
    """Return the share of episodes with the right answer, in [0, 1]."""
    return sum(p.correct for p in played) / len(played)
