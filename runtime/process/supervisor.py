"""Supervise processes on one machine: start in order, restart, stop in order.

The supervisor alone restarts processes. A process that exits with a code of `exit_codes.NO_RESTART`
stays down; any other exit is followed by a restart after `restart_delay_s`. The delay doubles up to
30 s while a process keeps crashing, but not when it was killed: others wait for it.

A supervisor is an `async with` block that owns all its tasks. An exception in any task ends all
processes and leaves the block; leaving the block ends all processes. Processes die with the
supervisor (`clawstream.runtime.process.child`). Their readiness
(`clawstream.runtime.process.readiness`) is logged and kept in the table.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from clawstream.runtime.errors import InUse, PlumbingError
from clawstream.runtime.exit_codes import EXIT_CRASH, EXIT_SETTINGS, NAMES, NO_RESTART
from clawstream.runtime.logs import logger
from clawstream.runtime.process.child import ChildProcess
from clawstream.runtime.process.config import PREFIX
from clawstream.runtime.process.log_file import ProcessLog
from clawstream.runtime.process.readiness import VARIABLE, ReadinessListener
from clawstream.runtime.process.table import ProcessTable

MAX_DELAY_S = 30.0
HEALTHY_AFTER_S = 30.0
KILLED = frozenset({-signal.SIGKILL, 128 + signal.SIGKILL})
"""Exit codes of a killed process: as Python reports it, and as a wrapper reports its child's."""
LOCK = "up.lock"


class AlreadyRunning(InUse):
    """Another supervisor works on this data directory. Stop it, or choose another data_dir."""


class Unwritable(PlumbingError):
    """The data directory is not writable: fix owner, mode or disk, or choose another data_dir."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process: its name, its command line, and what it reads on standard input."""

    name: str
    argv: Sequence[str]
    stdin: bytes = b""


@dataclass(slots=True)
class Child:
    """The state of one process.

    ready: As reported by the process. error: The last error that it logged before it exited.
    started: Start time on the monotonic clock.
    """

    spec: ProcessSpec
    log: ProcessLog
    state: str = "stopped"
    process: ChildProcess | None = None
    task: asyncio.Task[None] | None = None
    started: float = 0.0
    ready: bool = False
    status: str = ""
    restarts: int = 0
    exit_code: int | None = None
    error: str | None = None
    stopping: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def row(self) -> Mapping[str, object]:
        """What the table shows of it."""
        running = self.process is not None and self.process.returncode is None
        return {
            "state": self.state,
            "pid": self.process.pid if self.process is not None and running else None,
            "ready": self.ready,
            "status": self.status,
            "restarts": self.restarts,
            "exit_code": self.exit_code,
            "error": self.error,
        }

    @property
    def is_settled(self) -> bool:
        """Whether it is ready, or stays down."""
        return self.ready or (self.task is not None and self.task.done())

    def kill(self) -> None:
        """SIGKILL to its whole process group. Nothing to kill is fine."""
        if self.process is not None:
            self.process.kill_group()


class Supervisor:
    """Processes of one data directory.

    Logs go to <dir>/logs/NAME.log, the table of processes to <dir>/up.json. <dir>/up.lock is locked
    while a supervisor runs and contains its pid. The supervisor survives a full disk.
    """

    def __init__(
        self, directory: Path, restart_delay_s: float = 1.0, stop_timeout_s: float = 20.0
    ) -> None:
        self._dir, self._delay, self._stop_timeout = directory, restart_delay_s, stop_timeout_s
        self._children: dict[str, Child] = {}
        self._lock: IO[str] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._writing: asyncio.Task[None] | None = None
        self._file = ProcessTable(
            directory / "up.json", lambda: {"supervisor": os.getpid(), "processes": self.table}
        )
        self._news = asyncio.Event()

    def acquire(self) -> None:
        """Be the only supervisor of the directory; raises AlreadyRunning or Unwritable."""
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            (self._dir / "logs").mkdir(exist_ok=True)
            self._lock = (self._dir / LOCK).open("a")
        except OSError as e:
            raise Unwritable(f"data_dir={self._dir} cannot be used: {e}") from e
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._unlock()
            raise AlreadyRunning(
                f"another `clawstream up` works on {self._dir}; stop it or set another data_dir"
            ) from e
        try:
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        except OSError as e:
            self._unlock()
            raise Unwritable(f"data_dir={self._dir} cannot be written to: {e}") from e

    async def __aenter__(self) -> Self:
        """Be the only supervisor of the directory; raises AlreadyRunning or Unwritable."""
        self.acquire()
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._writing = self._tasks.create_task(self._file.keep(), name="keep-table")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop all running processes in parallel.

        Raises an ExceptionGroup when a task has failed.
        """
        assert self._tasks is not None and self._writing is not None
        try:
            try:
                await self.stop_all()
            finally:
                self._writing.cancel()
                # The group has to see that it cancelled the block itself. Any other error leaves
                # the block as it is.
                cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
                await self._tasks.__aexit__(
                    *((kind, error, trace) if cancelled else (None, None, None))
                )
        finally:
            self.release()

    def start(self, spec: ProcessSpec) -> None:
        """Start a process and keep it running."""
        assert self._tasks is not None, "outside of the block there is nobody to see it fail"
        child = Child(spec, ProcessLog(self._dir / "logs" / f"{spec.name}.log"))
        self._children[spec.name] = child
        child.task = self._tasks.create_task(self._keep(child), name=f"keep-{spec.name}")

    @property
    def table(self) -> Mapping[str, Mapping[str, object]]:
        """Name to state, pid, readiness, restarts, last exit code and error."""
        return {name: c.row for name, c in self._children.items()}

    def state(self, name: str) -> str:
        """`running`, `restarting`, `stopped`, or why it stays down."""
        return self._children[name].state

    async def wait_down(self, name: str) -> str:
        """Wait until the process stays down; returns why."""
        task = self._children[name].task
        if task is not None:
            await asyncio.wait({task})
        return self._children[name].state

    async def wait_settled(self, names: Iterable[str]) -> None:
        """Wait until each process is ready or down, or one of them has wrong settings."""
        waited = [self._children[n] for n in names]
        while not any(c.exit_code == EXIT_SETTINGS for c in waited) and not all(
            c.is_settled for c in waited
        ):
            self._news.clear()
            await self._news.wait()

    async def stop(self, *names: str) -> None:
        """SIGTERM, wait, after stop_timeout_s SIGKILL to its whole process group."""
        await asyncio.gather(*(self._stop(self._children[n]) for n in names if n in self._children))

    async def stop_all(self) -> None:
        """Stop what still runs, all at once: for the end after an error."""
        await self.stop(*self._children)

    def release(self) -> None:
        """Let another supervisor have the directory. The table says how this one has ended."""
        if self._lock is not None:
            with suppress(OSError):
                self._file.write()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _stop(self, child: Child) -> None:
        child.stopping = True
        child.changed.set()
        process = child.process
        if process is not None:
            process.terminate()
        if child.task is None:
            return
        done, _ = await asyncio.wait({child.task}, timeout=self._stop_timeout)
        if not done:
            logger().warning("stop_timeout", name=child.spec.name, seconds=self._stop_timeout)
            child.kill()
            await asyncio.wait({child.task})

    async def _keep(self, child: Child) -> None:
        try:
            await self._keep_running(child)
        finally:
            self._news.set()

    async def _keep_running(self, child: Child) -> None:
        delay = self._delay
        while not child.stopping:
            child.started = time.monotonic()
            code = await self._run_once(child)
            if child.stopping or code in NO_RESTART:
                child.state = NAMES.get(code, str(code))
                break
            if code in KILLED or time.monotonic() - child.started > HEALTHY_AFTER_S:
                delay = self._delay
            child.state, child.restarts = "restarting", child.restarts + 1
            logger().warning(
                "restart",
                name=child.spec.name,
                exit_code=code,
                error=child.error,
                restarts=child.restarts,
                delay_s=delay,
            )
            self._file.changed()
            try:
                await asyncio.wait_for(child.changed.wait(), delay)
            except TimeoutError:
                delay = min(2 * delay, MAX_DELAY_S)
        if child.stopping:
            child.state = "stopped"
        else:
            level = logger().info if child.exit_code == 0 else logger().error
            level(
                "stays_down",
                name=child.spec.name,
                why=child.state,
                exit_code=child.exit_code,
                error=child.error,
            )
        self._file.changed()

    async def _run_once(self, child: Child) -> int:
        listener = ReadinessListener(lambda ready, status: self._heard(child, ready, status))
        try:
            child.exit_code = await self._run(child, listener.address)
        finally:
            listener.close()
            child.ready, child.status = False, ""
            if (
                child.process is not None and child.process.returncode is None
            ):  # this task was cancelled
                child.kill()
                await child.process.wait()
        return child.exit_code

    async def _run(self, child: Child, notify: str) -> int:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)} | {
            VARIABLE: notify
        }
        try:
            with child.log.open() as log, _readable(child.spec.stdin) as stdin:
                child.process = ChildProcess(
                    child.spec.argv, stdin=stdin, stdout=log, stderr=log, env=environ
                )
        except OSError as e:  # no memory or no disk just now: tried again like any other crash
            child.error = f"not started: {e}"
            return EXIT_CRASH
        child.state, child.error = "running", None
        self._file.changed()
        code = await child.process.wait()
        child.error = (
            None if code == 0 or code in KILLED or child.stopping else child.log.last_error()
        )
        return code

    def _heard(self, child: Child, ready: bool, status: str) -> None:
        if (ready, status) == (child.ready, child.status):
            return
        if ready and not child.ready:
            seconds = round(time.monotonic() - child.started, 1)
            logger().info("ready", name=child.spec.name, status=status, seconds=seconds)
        elif child.ready and not ready:
            logger().warning("not_ready", name=child.spec.name, status=status)
        child.ready, child.status = ready, status
        self._file.changed()
        self._news.set()


@contextmanager
def _readable(data: bytes) -> Iterator[int]:
    """Open an in-memory file with these bytes: the reader needs no concurrent writer."""
    descriptor = os.memfd_create("stdin")
    try:
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def supervisor_of(directory: Path) -> int | None:
    """Return the pid of the directory's running supervisor, or None. A dead one holds no lock."""
    try:
        with (directory / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = (directory / LOCK).read_text()
        return int(text) if text else None


def ask_to_stop(directory: Path) -> int | None:
    """SIGTERM to the supervisor that works on the directory; its pid, None when there is none."""
    pid = supervisor_of(directory)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
    return pid
