"""Runs processes on one machine: starts them in order, restarts what dies, stops them in order once they are drained.

The one owner of restarts. A process that ends by itself with an exit code of `lifecycle.NO_RESTART` stays down; any other
end is followed by a new start, after `restart_delay_s`. One that crashes again and again is started ever more slowly, twice as long
each time up to 30 s; one that was killed is not: it did nothing wrong, and others wait for it.
Children get SIGTERM when the supervisor itself is killed.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from runtime.config import PREFIX
from runtime.errors import PlumbingError
from runtime.lifecycle import EXIT_CRASH, EXIT_FENCED, EXIT_SETTINGS, EXIT_SOURCE, NO_RESTART
from runtime.telemetry import logger

MAX_DELAY_S = 30.0
HEALTHY_AFTER_S = 30.0
KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
"""By an operator or the kernel: as Python tells it, and as a wrapper such as the broker's tells it of its child."""
LOG_BYTES = 64 << 20
LOCK = "up.lock"
_PR_SET_PDEATHSIG = 1
_ENDS = {0: "done", EXIT_SETTINGS: "wrong settings", EXIT_FENCED: "fenced", EXIT_SOURCE: "source truncated"}


class AlreadyRunning(PlumbingError):
    """Another supervisor works on this data directory. Stop it, or choose another data_dir."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process: its name and its command line."""

    name: str
    argv: Sequence[str]


@dataclass(slots=True)
class Child:
    """What is known of one process."""

    spec: ProcessSpec
    state: str = "stopped"
    process: asyncio.subprocess.Process | None = None
    task: asyncio.Task[None] | None = None
    restarts: int = 0
    exit_code: int | None = None
    stopping: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


def _die_with_parent(parent: int) -> Callable[[], None]:
    libc = ctypes.CDLL(None)

    def preexec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request
            os._exit(1)

    return preexec


class Supervisor:
    """Processes of one data directory. Logs go to <dir>/logs/NAME.log, the table of processes to <dir>/up.json.

    <dir>/up.lock is locked while one works, and holds its pid.
    """

    def __init__(self, directory: Path, restart_delay_s: float = 1.0, stop_timeout_s: float = 20.0) -> None:
        self._dir, self._delay, self._stop_timeout = directory, restart_delay_s, stop_timeout_s
        self._children: dict[str, Child] = {}
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Be the only supervisor of the directory; raises AlreadyRunning."""
        self._dir.mkdir(parents=True, exist_ok=True)
        (self._dir / "logs").mkdir(exist_ok=True)
        self._lock = (self._dir / LOCK).open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self.release()
            raise AlreadyRunning(
                f"another `clawstream up` works on {self._dir}; stop it or set another data_dir"
            ) from e
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def start(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running."""
        child = self._children[spec.name] = Child(spec)
        child.task = asyncio.get_running_loop().create_task(self._keep(child), name=f"keep-{spec.name}")

    @property
    def table(self) -> Mapping[str, Mapping[str, object]]:
        """Name to state, pid, restarts and last exit code."""
        return {
            name: {
                "state": c.state,
                "pid": c.process.pid if c.process is not None and c.process.returncode is None else None,
                "restarts": c.restarts,
                "exit_code": c.exit_code,
            }
            for name, c in self._children.items()
        }

    def state(self, name: str) -> str:
        """`running`, `restarting`, `stopped`, or why it stays down."""
        return self._children[name].state

    async def wait_down(self, name: str) -> str:
        """Wait until the process stays down; returns why."""
        task = self._children[name].task
        if task is not None:
            await asyncio.shield(task)
        return self._children[name].state

    async def stop(self, *names: str) -> None:
        """SIGTERM, wait, after stop_timeout_s SIGKILL to its whole process group."""
        await asyncio.gather(*(self._stop(self._children[n]) for n in names if n in self._children))

    async def stop_all(self) -> None:
        """Stop what still runs, all at once: for the end after an error."""
        await self.stop(*self._children)

    def release(self) -> None:
        """Let another supervisor have the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _stop(self, child: Child) -> None:
        child.stopping = True
        child.changed.set()
        process = child.process
        if process is not None and process.returncode is None:
            process.terminate()
        if child.task is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(child.task), self._stop_timeout)
        except TimeoutError:
            logger().warning("stop_timeout", name=child.spec.name, seconds=self._stop_timeout)
            if child.process is not None and child.process.returncode is None:
                os.killpg(child.process.pid, signal.SIGKILL)
            await child.task

    async def _keep(self, child: Child) -> None:
        delay = self._delay
        while not child.stopping:
            started = time.monotonic()
            code = await self._run_once(child)
            if child.stopping or code in NO_RESTART:
                child.state = _ENDS.get(code, str(code))
                break
            if code in KILLED or time.monotonic() - started > HEALTHY_AFTER_S:
                delay = self._delay
            child.state, child.restarts = "restarting", child.restarts + 1
            logger().warning("restart", name=child.spec.name, exit_code=code, restarts=child.restarts, delay_s=delay)
            self._write_table()
            try:
                await asyncio.wait_for(child.changed.wait(), delay)
            except TimeoutError:
                delay = min(2 * delay, MAX_DELAY_S)
        if child.stopping:
            child.state = "stopped"
        else:
            level = logger().info if child.exit_code == 0 else logger().error
            level("stays_down", name=child.spec.name, why=child.state, exit_code=child.exit_code)
        self._write_table()

    async def _run_once(self, child: Child) -> int:
        path = self._dir / "logs" / f"{child.spec.name}.log"
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        try:
            with path.open("ab") as log:
                child.process = await asyncio.create_subprocess_exec(
                    *child.spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),
                )
        except OSError as e:  # no memory or no disk just now: tried again like any other crash
            logger().error("not_started", name=child.spec.name, error=str(e))
            child.exit_code = EXIT_CRASH
            return EXIT_CRASH
        if child.stopping:
            child.process.terminate()  # whoever asked it to stop found nobody to tell
        child.state = "running"
        self._write_table()
        child.exit_code = await child.process.wait()
        return child.exit_code

    def _write_table(self) -> None:
        temporary = self._dir / "up.json.tmp"
        temporary.write_text(json.dumps({"supervisor": os.getpid(), "processes": self.table}, indent=1))
        temporary.replace(self._dir / "up.json")


def ask_to_stop(directory: Path) -> int | None:
    """SIGTERM to the supervisor that works on the directory; its pid, None when there is none. One that was killed holds no lock."""
    try:
        with (directory / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        pid = int((directory / LOCK).read_text())
        os.kill(pid, signal.SIGTERM)
        return pid


def python(*words: str) -> list[str]:
    """Command line of one of our own processes."""
    # -P: a user's `rewards.py` in the working directory must not hide our package of that name.
    return [sys.executable, "-P", "-m", "runtime.cli", *words]
