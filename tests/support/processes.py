"""Processes that a test starts.

Each process logs into a file, and ends with the block that started it and with the test process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from clawstream.runtime.process.child import die_with_parent

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the test's time limit ends a wait for ever."""
    while not condition():
        time.sleep(0.01)


def freeze(pid: int) -> None:
    """Stop a process by SIGSTOP; all its threads have stopped on return.

    On a busy machine the threads of a JVM go on for up to half a second after `kill` has returned,
    and a broker acknowledges records in that time. SIGCONT lets it go on.
    """
    os.kill(pid, signal.SIGSTOP)
    until(lambda: set(_thread_states(pid)) == {"T"})


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has ended
            yield stat.read_text().rpartition(")")[2].split()[0]


def pids_with(word: str) -> list[str]:
    """Return the processes of this machine with a word on their command line."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            found += [place.name] if word in (place / "cmdline").read_text() else []
        except OSError:  # no process, or it has ended
            continue
    return found


class Processes:
    """The processes that a test has started. logs: directory of `<name>.log`.

    patience_s: time between SIGTERM and SIGKILL at the end, for processes with children; 0 sends
    SIGKILL at once.
    """

    def __init__(self, logs: Path, patience_s: float = 0.0) -> None:
        self.logs, self._patience_s = logs, patience_s
        self.started: list[subprocess.Popen[bytes]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        """Start a process in the repository's root. how: arguments of Popen."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.started.append(
                subprocess.Popen(die_with_parent(command), cwd=ROOT, stdout=log, stderr=log, **how)
            )
        return self.started[-1]

    def log(self, name: str) -> str:
        """Return the log of the processes with this name."""
        path = self.logs / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self, process: subprocess.Popen[bytes], timeout_s: float = 180.0) -> int:
        """Send SIGTERM, as Ctrl-C does; return the exit code."""
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        left = [p for p in self.started if p.poll() is None]
        for process in left:
            process.terminate() if self._patience_s else process.kill()
        for process in left:
            try:
                process.wait(self._patience_s or None)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
