"""One broker JVM as an operating-system process: start, reap, pid file."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from clawstream.runtime.broker.node_config import NodePlan
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.process.child import die_with_parent

KILL_TIMEOUT_S = 10.0


class BrokerError(PlumbingError):
    """The embedded broker cannot start or go on; says why and what to change."""


class JvmDied(BrokerError):
    """A node ended during its start; the message has the end of its log.

    exit_code is 128 + signal number for a killed node.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NotReady(BrokerError):
    """A node runs but does not serve in time.

    After an unclean shutdown it recovers its logs first.
    """


class Jvm:
    """A running JVM of this process, started and reaped by a thread of its own.

    The thread lives as long as the JVM, because the kernel's parent-death signal follows the thread
    that forked. Processes that the JVM has started end with it. `parent_death_signal` is what the
    JVM gets when this process dies.
    """

    def __init__(
        self,
        command: list[str],
        output: Path,
        *,
        parent_death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self._command = die_with_parent(command, parent_death_signal)
        self._output = output
        self._spawned = threading.Event()
        self._exited = threading.Event()
        self._reaping = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        threading.Thread(target=self._run, name="broker-jvm", daemon=True).start()
        self._spawned.wait()
        if self._failure is not None:
            raise BrokerError(f"cannot run {command[0]}: {self._failure}") from self._failure

    def _run(self) -> None:
        try:
            with self._output.open("wb") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._spawned.set()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:  # until it is reaped nothing else can have its number
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._exited.set()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell tells it (128 + signal number); None while the JVM runs."""
        if not self._exited.is_set() or self._process is None or self._process.returncode is None:
            return None
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        with self._reaping:
            if not self._exited.is_set():
                os.kill(self.pid, number)

    def end(self, patience_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `patience_s` (0: at once), and wait for the end.

        Raises:
            BrokerError: The process survives SIGKILL.
        """
        if patience_s > 0:
            self.signal(signal.SIGTERM)
            self._exited.wait(patience_s)
        self.signal(signal.SIGKILL)
        if not self._exited.wait(KILL_TIMEOUT_S):
            raise BrokerError(
                f"broker process {self.pid} does not die of SIGKILL (is its disk stuck?)"
            )


def read_pid(plan: NodePlan) -> int | None:
    """Return the pid of this node's running broker, or None. The pid file may be stale."""
    try:
        pid = int(plan.pid_file.read_text(encoding="ascii"))
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    return pid if os.fsencode(plan.properties) in command.split(b"\0") else None


def wait_gone(plan: NodePlan, timeout_s: float) -> None:
    """Wait until no broker of `plan` runs, for at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while read_pid(plan) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
