"""Tasks of reasoning-gym: one question, one answer in <answer> tags, scored by its data set."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from agent_flow.environments.environment import Split
from agent_flow.errors import FlowError, RolloutFailed
from agent_flow.flow import Flow, Limits
from agent_flow.rollout import Rollout
from agent_flow.tasks import Task
from agent_flow.threads import in_thread

FORM = {"role": "system", "content": SYSTEM_PROMPTS["default"]}
REMEMBERED = 256
"""Tasks that are not generated again for each rollout of their group."""
START_S = 120.0
REPLY_S = 30.0
"""Above the limit of one score in the scorer."""


def environment(name: str, split: Split) -> Flow:
    """Return the flow of a data set.

    Args:
        name: of the data set, for example chain_sum.
        split: `config` has the data set's own settings, for example `{"max_terms": 3}`.

    Raises:
        FlowError: There is no such data set, or a setting is wrong.
    """
    seeds = split.seeds
    config = {"seed": seeds.start, "size": len(seeds), **split.config}
    try:
        dataset = reasoning_gym.create_dataset(name, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise FlowError(f"env=reasoning_gym:{name}: {error}") from error
    entry_of = functools.lru_cache(REMEMBERED)(dataset.__getitem__)
    scorer = Scorer(name, config)

    async def play(task: Task, rollout: Rollout) -> Any:
        entry = await in_thread(entry_of, task["index"])
        question = {"role": "user", "content": entry["question"]}
        reply = await rollout.chat([FORM, question])
        return await scorer.score(extract_answer(reply.text), entry)

    def tasks() -> Iterator[Task]:
        for index in range(len(dataset)):
            entry = entry_of(index)
            yield {
                "id": seeds.start + index,
                "index": index,
                "question": entry["question"],
                "answer": str(entry["answer"]),
            }

    flow = Flow(play, Limits(), name)
    flow.tasks(tasks)
    flow.lifespan(scorer.running)
    return flow


class Scorer:
    """The process that scores answers, one at a time: it may run them (docs/agent-flows.md).

    Started for the first score, and again when it has ended.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._argument = json.dumps({"name": name, "config": dict(config)})
        self._process: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End the process at the exit."""
        try:
            yield
        finally:
            await self._kill()

    async def score(self, answer: str | None, entry: Any) -> float:
        """Return the data set's score of an answer.

        Raises:
            RolloutFailed: The data set cannot score it, or the process has ended.
        """
        request = {"answer": answer, "entry": base64.b64encode(pickle.dumps(entry)).decode()}
        async with self._free:
            try:
                process = self._process or await self._start()
                assert process.stdin is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                reply = await _line(process, REPLY_S)
            # Also when it is cancelled: a late reply would be read as another answer's.
            except BaseException:
                await self._kill()
                raise
        if "error" in reply:
            raise RolloutFailed(reply["error"])
        return float(reply["score"])

    async def _start(self) -> asyncio.subprocess.Process:
        isolation = await in_thread(_isolation)
        names = ("PATH", "HOME", "LANG")
        with tempfile.TemporaryDirectory(prefix="flow-") as empty:
            self._process = await asyncio.create_subprocess_exec(
                *isolation,
                *(sys.executable, "-P", Path(__file__).with_name("reasoning_gym_scorer.py")),
                self._argument,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=empty,
                env={
                    **{name: os.environ[name] for name in names if name in os.environ},
                    "PYTHONPATH": os.pathsep.join(_python_path()),
                },
                start_new_session=True,
            )
            await _line(self._process, START_S)
        return self._process

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _line(process: asyncio.subprocess.Process, limit_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limit_s):
            line = await process.stdout.readline()
    except TimeoutError as error:
        raise RolloutFailed(
            f"the scorer of reasoning-gym gave no reply in {limit_s:g} s"
        ) from error
    if not line:
        raise RolloutFailed("the scorer of reasoning-gym has ended")
    reply: dict[str, Any] = json.loads(line)
    return reply


def _python_path() -> list[str]:
    return [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(":") if p]


def _isolation() -> list[str]:
    """Return the command that isolates the scorer; empty where bubblewrap does not work."""
    command = [
        *("bwrap", "--unshare-all", "--die-with-parent", "--cap-drop", "ALL"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
        *("--tmpfs", "/run", "--tmpfs", "/tmp"),  # no sockets of other processes
    ]
    for path in {sys.prefix, str(Path(__file__).parent), *_python_path()}:
        if path.startswith("/tmp/") and Path(path).exists():
            command += ["--ro-bind", path, path]
    command += ["--chdir", "/tmp"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=START_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return command
