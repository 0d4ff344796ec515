"""Score answers side by side, for `clawstream.agent_flow.environments.reasoning_gym`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from clawstream.agent_flow.errors import RolloutFailed
from clawstream.agent_flow.threads import in_thread

START_S = 120.0
REPLY_S = 30.0
"""Above the limit of one score in the scorer."""
SIZE = max(2, min(8, os.cpu_count() or 1))
"""Scorers of a flow. At least two: one slow answer must not delay all others."""


class ScorerPool:
    """Scores answers in up to `size` processes at a time; each is started when it is needed."""

    def __init__(self, name: str, config: Mapping[str, Any], size: int = SIZE) -> None:
        self._scorers = [Scorer(name, config) for _ in range(size)]
        # Last in, first out: no further process is started while one is free.
        self._free = asyncio.LifoQueue[Scorer]()
        for scorer in self._scorers:
            self._free.put_nowait(scorer)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End the processes at the exit."""
        try:
            yield
        finally:
            for scorer in self._scorers:
                await scorer.end()

    async def score(self, answer: str | None, entry: Any) -> float:
        """Return the data set's score of an answer.

        Raises:
            RolloutFailed: See `Scorer.score`.
        """
        scorer = await self._free.get()
        try:
            return await scorer.score(answer, entry)
        finally:
            self._free.put_nowait(scorer)


class Scorer:
    """The process that scores answers: it may run them (docs/agent-flows.md).

    Started for the first score, and again when it has ended. It scores one answer at a time, as the
    pool gives it out to one caller.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self._argument = json.dumps({"name": name, "config": dict(config)})
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, answer: str | None, entry: Any) -> float:
        """Return the data set's score of an answer.

        Raises:
            RolloutFailed: The data set cannot score it, or the process has ended.
        """
        request = {"answer": answer, "entry": base64.b64encode(pickle.dumps(entry)).decode()}
        try:
            process = self._process or await self._start()
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            reply = await _line(process, REPLY_S)
        # Also when it is cancelled: a late reply would be read as another answer's.
        except BaseException:
            await self.end()
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

    async def end(self) -> None:
        """Kill the process, if there is one."""
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
