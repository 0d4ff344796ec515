"""Processes under measurement: start, CPU, memory, end."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from clawstream.runtime.process.child import die_with_parent

START_S = 120.0
LOG_TAIL = 3000
"""Characters of a log that the report of a failure shows."""


class Process:
    """A started process and its log."""

    def __init__(self, name: str, pid: int, log: Path) -> None:
        self.name, self._process, self._log = name, psutil.Process(pid), log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Return CPU seconds so far: user and system, all threads, all children."""
        times = [p.cpu_times() for p in (self._process, *self._process.children(recursive=True))]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def rss(self) -> int:
        """Return resident bytes."""
        return int(self._process.memory_info().rss)

    def check(self) -> None:
        """End the benchmark when the process has died."""
        if not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE:
            raise SystemExit(f"{self.name} died; its log ends:\n{self.log[-LOG_TAIL:]}")

    def until_answers(self, url: str) -> None:
        """Wait for a 200. Ends the benchmark when it does not come within `START_S`."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=2) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} did not answer; the log ends:\n{self.log[-LOG_TAIL:]}")
            time.sleep(0.1)


@contextmanager
def running(
    name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Iterator[Process]:
    """Run a command; stop it at the end, also when this process ends in any other way."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            die_with_parent(command),
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            yield Process(name, process.pid, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


def free_port() -> int:
    """Return a port that is free together with the one after it.

    Below 32768: above it the kernel hands out ports to clients.
    """
    for port in range(22000, 32000, 10):
        try:
            for p in (port, port + 1):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise SystemExit("no free port between 22000 and 32000")
