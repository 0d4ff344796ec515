"""`clawstream up` in the background: its process table, its logs, and single extra processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from support.patience import Patience
from support.ports import free_port
from support.processes import ROOT as ROOT
from support.processes import Processes

from clawstream.runtime.process.config import PREFIX, overrides_of
from clawstream.schemas.settings import Settings

ENVIRON = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}


def command(*words: str) -> list[str]:
    """Return a command line of clawstream."""
    return [sys.executable, "-m", "clawstream", *words]


def call(*words: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        command(*words),
        cwd=ROOT,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def own_installation(home: Path, partitions: int = 2, **gateway: Any) -> dict[str, Any]:
    """Return settings of an installation with a directory, topics and ports of its own.

    gateway: further settings of the gateway.
    """
    return {
        "data_dir": home / "run",
        "kafka": {"partitions": partitions, "topic_prefix": f"t{uuid4().hex[:8]}"},
        "broker": {"port": free_port()},
        "gateway": {"port": free_port(), **gateway},
    }


class Up:
    """A supervisor on the data directory of `settings`.

    `alone` starts a single process without the supervisor, such as a second instance.
    """

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self.settings, self.home, self._processes = settings, settings.data_dir, processes
        self.home.mkdir(parents=True, exist_ok=True)
        self.process = self.alone("up", "up")

    def alone(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Start one process by itself, with the same settings."""
        return self._processes.start(
            name, command(*words, *overrides_of(self.settings)), env=ENVIRON
        )

    def log(self, name: str) -> str:
        """Return the log of a process, supervised or started alone."""
        path = self.home / "logs" / f"{name}.log"
        return (path.read_text(errors="replace") if path.exists() else "") + self._processes.log(
            name
        )

    @property
    def table(self) -> dict[str, Any]:
        """Return the supervisor's table of processes."""
        try:
            return dict(json.loads((self.home / "up.json").read_text())["processes"])
        except (OSError, ValueError):
            return {}

    def state(self, name: str) -> str | None:
        found = self.table.get(name)
        return found and found["state"]

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
        """Wait for the condition while the supervisor lives.

        At the deadline, fail with the ends of all logs.
        """
        patience = Patience(timeout_s)
        while not condition():
            assert self.process.poll() is None, self._tails(
                f"`up` has ended with {self.process.poll()}: {what}"
            )
            assert patience.left_s > 0, self._tails(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.1)

    def until_says(self, name: str, text: str, timeout_s: float = 180.0) -> None:
        """Wait until a process has logged a text."""
        self.until(lambda: text in self.log(name), f"{name} says {text!r}", timeout_s)

    def until_state(self, name: str, state: str, timeout_s: float = 180.0) -> None:
        """Wait until the supervisor reports this state of a process."""
        self.until(lambda: self.state(name) == state, f"{name} is {state}", timeout_s)

    def _tails(self, why: str) -> str:
        paths = sorted([*self._processes.logs.glob("*.log"), *(self.home / "logs").glob("*.log")])
        ends = [
            f"== {p}\n" + "\n".join(p.read_text(errors="replace").splitlines()[-6:]) for p in paths
        ]
        return "\n".join([why, json.dumps(self.table), *ends])[-20_000:]

    def stop(self) -> None:
        """Send SIGTERM, as Ctrl-C does: all processes drain and end, in order."""
        code = self._processes.stop(self.process, 300)
        assert code == 0, self._tails(f"`up` ended with {code}")


@contextmanager
def up(settings: Settings) -> Iterator[Up]:
    """Run `clawstream up` with these settings; all its processes have ended after the block."""
    with Processes(settings.data_dir.parent / "logs", patience_s=60) as processes:
        yield Up(settings, processes)
