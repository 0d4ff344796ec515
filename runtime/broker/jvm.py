"""One broker JVM as an operating-system process: start, reap, pid file, ports, readiness."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawstream.runtime.broker.node_config import NodePlan
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.process.child import die_with_parent

KILL_TIMEOUT_S = 10.0
_METADATA, _METADATA_VERSION = 3, 4


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
    JVM gets when this process dies; with None it outlives this process.
    """

    def __init__(
        self, command: list[str], output: Path, *, parent_death_signal: signal.Signals | None
    ) -> None:
        self._command = (
            command
            if parent_death_signal is None
            else die_with_parent(command, parent_death_signal)
        )
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


def recorded_pid(plan: NodePlan) -> int | None:
    """What the pid file says, be it stale; None after a `stop_pids`."""
    try:
        return int(plan.pid_file.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError):
        return None


def read_pid(plan: NodePlan) -> int | None:
    """Return the pid of this node's running broker, or None. The pid file may be stale."""
    pid = recorded_pid(plan)
    return pid if pid is not None and _runs(plan, pid) else None


def _runs(plan: NodePlan, pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return os.fsencode(plan.properties) in command.split(b"\0")


def stop_pids(plans: list[NodePlan], timeout_s: float) -> list[int]:
    """Send SIGTERM to the running brokers of `plans`, wait, then SIGKILL; return the stopped pids.

    The pid files are removed before the SIGKILL, so that a concurrent start sees that the nodes
    were stopped on purpose.
    """
    running = [(plan, pid) for plan in plans if (pid := read_pid(plan)) is not None]
    for _, pid in running:
        _send(pid, signal.SIGTERM)
    gone = wait_gone(plans, timeout_s)
    left = [] if gone else [(plan, pid) for plan in plans if (pid := read_pid(plan)) is not None]
    for plan in plans:
        plan.pid_file.unlink(missing_ok=True)
    for _, pid in left:
        _send(pid, signal.SIGKILL)
    _wait_until(lambda: not any(_runs(plan, pid) for plan, pid in left), KILL_TIMEOUT_S)
    return [pid for _, pid in running]


def wait_gone(plans: list[NodePlan], timeout_s: float) -> bool:
    """True once no broker of `plans` runs."""
    return _wait_until(lambda: all(read_pid(plan) is None for plan in plans), timeout_s)


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it exited by itself between the look and the signal


@dataclass(frozen=True)
class ClusterView:
    """A node's view of its cluster: the cluster id and the ids of the unfenced brokers."""

    cluster_id: str | None
    brokers: frozenset[int]


def ask_cluster(host: str, port: int, timeout_s: float = 5.0) -> ClusterView | None:
    """Send one Kafka Metadata request without topics; return None without an answer in time."""
    client = b"clawstream"
    request = (
        struct.pack(">hhih", _METADATA, _METADATA_VERSION, 1, len(client))
        + client
        + struct.pack(">i?", 0, False)
    )
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                (size,) = struct.unpack(">i", stream.read(4))
                return parse_metadata(stream.read(size))
    except (OSError, struct.error, UnicodeDecodeError):
        return None


def parse_metadata(body: bytes) -> ClusterView:
    """Parse a Metadata response, version 4: correlation id, throttle time, brokers, cluster id."""
    (count,) = struct.unpack_from(">i", body, 8)
    at = 12
    brokers = set()
    for _ in range(count):
        (broker,) = struct.unpack_from(">i", body, at)
        brokers.add(broker)
        _, at = _read_string(body, at + 4)  # host
        _, at = _read_string(body, at + 4)  # rack, after the port
    cluster_id, _ = _read_string(body, at)
    return ClusterView(cluster_id, frozenset(brokers))


def _read_string(body: bytes, at: int) -> tuple[str | None, int]:
    (length,) = struct.unpack_from(">h", body, at)
    if length < 0:
        return None, at + 2
    return body[at + 2 : at + 2 + length].decode(), at + 2 + length
