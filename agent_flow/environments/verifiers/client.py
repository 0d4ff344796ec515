"""Start the process that has verifiers, hand it rollouts, and take their rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from clawstream.agent_flow.child_environment import child_environment
from clawstream.agent_flow.environments.environment import Split
from clawstream.agent_flow.errors import FlowError, RolloutFailed
from clawstream.agent_flow.file_tail import tail
from clawstream.agent_flow.flow import Flow, Limits
from clawstream.agent_flow.rollout import Rollout
from clawstream.agent_flow.tasks import Task, tasks_of_file

PYTHON = "CLAWSTREAM_VERIFIERS_PYTHON"
"""Environment variable: the Python that has verifiers."""
DEFAULT_PYTHON = Path(".venv-verifiers/bin/python")
START_S = 600.0
"""Also for a data set that is downloaded."""
CANCEL_S = 5.0
STOP_S = 10.0
"""verifiers itself waits 5 s before it kills a tool server."""
LONGEST_LINE = 1 << 24
SHOWN_ERROR = 500
"""Bytes of the process's standard error that a reason shows."""


def environment(name: str, split: Split) -> Flow:
    """Return the flow of a taskset.

    Args:
        name: of a taskset that is installed beside verifiers or a module in the working directory;
            or its file, `PATH/NAME.py`.
        split: `config` is verifiers' configuration of an environment, for example
            `{"taskset": {"difficulty": 3}, "agent": {"max_turns": 8}}`.

    Raises:
        FlowError: There is no Python that has verifiers, or `split` has a seed.
    """
    python = _python(name)
    if split.seed:
        raise FlowError(
            f"env=verifiers:{name}: seed={split.seed} has no effect; a taskset has its own tasks. "
            "Remove it, or set the taskset's own seed in env_config"
        )
    path = Path(name).resolve() if name.endswith(".py") else None
    if path is not None and not path.is_file():
        raise FlowError(f"env=verifiers:{name}: no such file")
    directory = tempfile.TemporaryDirectory(prefix="flow-verifiers-")
    files = Path(directory.name)
    argument = {
        "id": path.stem if path else name,
        "channel": split.channel,
        "size": split.size,
        "config": dict(split.config),
        "tasks": str(files / "tasks.jsonl"),
    }
    # Of the user's own modules only. verifiers starts tool servers as `python -m MODULE` in another
    # directory, so sys.path of the process alone is not enough.
    worker = Worker(python, argument, path.parent if path else Path.cwd(), files / "stderr")

    async def play(task: Task, rollout: Rollout) -> Any:
        rewards = await worker.play(task["index"], rollout)
        return rewards or None

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        with directory:
            try:
                await worker.start()
                yield
            finally:
                await worker.stop()

    flow = Flow(play, Limits(), Path(name).stem)
    flow.tasks(lambda: tasks_of_file(files / "tasks.jsonl"))
    flow.lifespan(running)
    return flow


def _python(name: str) -> Path:
    """Return the Python that has verifiers. Raises FlowError if there is none."""
    python = Path(os.environ.get(PYTHON) or DEFAULT_PYTHON).absolute()
    if not python.is_file():
        raise FlowError(
            f"env=verifiers:{name}: {python}: no such file. Run `make environments`, or install "
            f"verifiers==0.4.0 and uv in a virtual environment and set {PYTHON} to its Python"
        )
    return python


class Worker:
    """The process that plays. One that has ended is started again for the next rollout."""

    def __init__(self, python: Path, argument: dict[str, Any], modules: Path, stderr: Path) -> None:
        self._python, self._argument = python, argument
        self._modules, self._stderr = modules, stderr
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._blocked = False
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> None:
        """Start the process unless it runs; return when it has loaded the environment.

        Raises:
            FlowError: The environment cannot be played.
        """
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            self._blocked = False
            with self._stderr.open("wb") as stderr:
                self._process = await asyncio.create_subprocess_exec(
                    self._python,
                    "-P",
                    Path(__file__).with_name("worker.py"),
                    json.dumps(self._argument),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=self._environment(),
                    start_new_session=True,
                    limit=LONGEST_LINE,
                )
            first = await self._first_line(self._process)
            if "ready" not in first:
                _kill(self._process)
                what = first.get("refused") or f"the process ended: {self._last_error()}"
                raise FlowError(f"env=verifiers:{self._argument['id']}: {what}")
            self._reading = asyncio.create_task(self._read(self._process))

    async def play(self, index: int, rollout: Rollout) -> dict[str, float]:
        """Play a task; return its rewards by name.

        Raises:
            RolloutFailed: verifiers reports an error, or its process has ended.
            FlowError: The process cannot be started again.
        """
        await self.start()
        number = next(self._numbers)
        replied = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._write(
                id=number,
                task=index,
                base_url=rollout.base_url,
                api_key=rollout.api_key,
                model=rollout.model,
                sampling=dict(rollout.sampling),
            )
            reply = await asyncio.shield(replied)
        except asyncio.CancelledError:
            await self._cancel(number, replied)
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in reply:
            raise RolloutFailed(reply["error"])
        rewards: dict[str, float] = reply["rewards"]
        return rewards

    async def stop(self) -> None:
        """End the process; one that does not end within `STOP_S` is killed."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
        _kill(process)
        await process.wait()
        if self._reading is not None:
            await self._reading

    async def _cancel(self, number: int, replied: asyncio.Future[dict[str, Any]]) -> None:
        """Stop a rollout. A process that does not answer is blocked by a function: kill it."""
        try:
            async with asyncio.timeout(CANCEL_S):
                await self._write(id=number, cancel=True)
                await replied
        except TimeoutError:
            self._blocked = True
            if self._process is not None:
                _kill(self._process)
            if self._reading is not None:
                await self._reading
        except RolloutFailed:
            pass

    def _environment(self) -> dict[str, str]:
        # A client of another agent names the variable that has its key.
        kept = child_environment(re.findall(r'"(\w+)"', json.dumps(self._argument["config"])))
        for name in ("PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV"):
            kept.pop(name, None)
        # verifiers calls uv, which is in its environment.
        path = f"{self._python.parent}{os.pathsep}{kept.get('PATH', '')}"
        return {**kept, "PATH": path, "PYTHONPATH": str(self._modules)}

    async def _first_line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
            first: dict[str, Any] = json.loads(line) if line else {}
        except TimeoutError:
            return {"refused": f"not loaded within {START_S:g} s: {self._last_error()}"}
        except asyncio.CancelledError:
            _kill(process)
            raise
        except ValueError as error:
            return {"refused": f"its process wrote no reply ({error})"}
        return first

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out the replies; then end the process, and fail what waits for it."""
        assert process.stdout is not None
        reason = "the process of verifiers ended"
        try:
            while line := await process.stdout.readline():
                reply = json.loads(line)
                waiting = self._waiting.get(reply["id"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (ValueError, KeyError, TypeError) as error:
            reason = f"the process of verifiers wrote no reply ({error!r})"
            _kill(process)
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(RolloutFailed(f"{reason}: {self._last_error()}"))
                waiting.exception()  # one that is being cancelled does not wait for it

    async def _write(self, **request: Any) -> None:
        process = self._process
        assert process is not None and process.stdin is not None
        with suppress(ConnectionError):  # it has ended, which `_read` reports
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()

    def _last_error(self) -> str:
        if self._blocked:
            return "a function of the environment blocked it and all other rollouts"
        return tail(self._stderr, SHOWN_ERROR).strip() or "it wrote no error"


def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all that it started: tool servers and agents have groups of their own."""
    if process.returncode is not None:
        return
    killed = {process.pid}
    waiting = [process.pid]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                children = set(map(int, (task / "children").read_text().split())) - killed
                killed |= children
                waiting += children
    for pid in killed:
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
