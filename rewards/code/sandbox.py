"""Run a Python program that nobody trusts: bubblewrap, resource limits, no privileges.

1. A process of root becomes user 65534 first, because RLIMIT_NPROC does not bind root.
2. bubblewrap gives the program its own user, process, network, IPC and mount namespaces. It sees
   /usr read-only and two small file systems in memory; it has no capabilities, no network and no
   further namespaces, and the kernel refuses it the calls of `clawstream.rewards.code.seccomp`.
3. The kernel limits CPU time, address space and file size of each process, and the number of
   processes. The resident memory of all of them together is measured every `_POLL_S`.
4. Whatever it started ends with it: its namespace ends when this process kills it or dies.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from clawstream.rewards.code.seccomp import ARCHITECTURES, filter_program

_DISK_BYTES = 16 << 20
"""Of each file, of /tmp, of /dev/shm and of the output."""
_NOBODY = 65534
_OPEN_FILES = 64
_POLL_S = 0.05
_PROBE_S = 20.0
_RETRY_S = 0.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PROGRAM = "/program.py"
_FIRST_SIGNAL = 129
_SIGNALLED = range(_FIRST_SIGNAL, _FIRST_SIGNAL + 64)
"""Exit codes by which bubblewrap reports a signal: 128 + its number. 128 and codes above 192 are of
a program that ended by itself."""

Ending = Literal["exited", "timeout", "memory"]


class SandboxError(Exception):
    """The sandbox is not available on this machine; the program did not run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    processes: also threads. memory_mb: address space of each process, and resident memory of all.
    """

    memory_mb: int
    processes: int


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended. code: its exit code, negative for a signal; None if it was killed."""

    ending: Ending
    code: int | None
    stdout: bytes


class Sandbox:
    """Runs programs under limits, one at a time a caller."""

    def __init__(self, limits: Limits, machine: str = platform.machine()) -> None:
        """Run a small program as a probe.

        Args:
            limits: Of each program.
            machine: Hardware name, as of `uname -m`.

        Raises:
            SandboxError: This machine cannot run it; the message says what is missing.
        """
        self._limits, self._machine = limits, machine
        if machine not in ARCHITECTURES:
            raise SandboxError(
                f"code rewards do not run on {machine}: the sandbox knows the system calls of "
                f"{' and '.join(ARCHITECTURES)}"
            )
        for tool, package in (
            ("bwrap", "bubblewrap"),
            ("prlimit", "util-linux"),
            ("setpriv", "util-linux"),
        ):
            if shutil.which(tool) is None:
                raise SandboxError(
                    f"code rewards need {tool} (apt-get install {package}): answers are not run "
                    "without a sandbox"
                )
        try:
            probed = self.run("print(6 * 7)", b"", time.monotonic() + _PROBE_S)
        except SandboxError as e:
            raise SandboxError(
                f"{e}; code rewards need user namespaces: allow them (sysctl "
                "kernel.unprivileged_userns_clone, apparmor_restrict_unprivileged_userns) or rate "
                "on another machine"
            ) from e
        if probed.stdout != b"42\n":
            raise SandboxError(
                f"the probe of the sandbox gave {probed}, not 42; memory_mb={limits.memory_mb} or "
                f"processes={limits.processes} may be too few for Python"
            )

    def run(self, program: str, stdin: bytes, deadline: float) -> Result:
        """Run a program until it ends, exceeds its memory or reaches the deadline.

        Args:
            program: Python source. It is the file /program.py of the sandbox.
            stdin: Its standard input.
            deadline: As of `time.monotonic()`.

        Raises:
            SandboxError: The sandbox could not start, twice; the program did not run.
        """
        try:
            return self._run(program, stdin, deadline)
        except (SandboxError, OSError):  # a machine that is short of processes for a moment
            if time.monotonic() + _RETRY_S >= deadline:
                raise
            time.sleep(_RETRY_S)
            return self._run(program, stdin, deadline)

    def _run(self, program: str, stdin: bytes, deadline: float) -> Result:
        with ExitStack() as stack:
            contents = (
                stdin,
                program.encode("utf-8", "replace"),
                filter_program(self._machine),
                b"",
                b"",
                b"",
            )
            files = [stack.enter_context(tempfile.TemporaryFile()) for _ in contents]
            for file, content in zip(files, contents, strict=True):
                file.write(content)
                file.seek(0)
            given, source, seccomp, stdout, stderr, status = files
            # Above the deadline, so that a program in a loop ends by the deadline.
            seconds = max(0, math.ceil(deadline - time.monotonic())) + 1
            passed = [file.fileno() for file in (source, seccomp, status)]
            process = subprocess.Popen(
                _command(self._limits, seconds, *passed),
                stdin=given,
                stdout=stdout,
                stderr=stderr,
                pass_fds=passed,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )
            try:
                ending = self._wait(process, deadline)
            finally:
                process.kill()
                process.wait()
            code = _exit_code(status)
            if code is None and ending == "exited":
                raise SandboxError(f"the sandbox did not start: {_text(stderr) or 'no message'}")
            stdout.seek(0)
            return Result(ending, code, stdout.read())

    def _wait(self, process: subprocess.Popen[bytes], deadline: float) -> Ending:
        limit = self._limits.memory_mb << 20
        while time.monotonic() < deadline:
            try:
                process.wait(_POLL_S)
                return "exited"
            except subprocess.TimeoutExpired:
                if sum(map(_resident_bytes, _tree(process.pid))) > limit:
                    return "memory"
        return "timeout"


def _command(limits: Limits, cpu_s: int, source: int, seccomp: int, status: int) -> list[str]:
    """Return the command line. source, seccomp, status: file descriptors."""
    drop = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    size = str(_DISK_BYTES)
    return [
        *(drop if os.geteuid() == 0 else []),
        *("prlimit", f"--cpu={cpu_s}", f"--as={limits.memory_mb << 20}", "--core=0"),
        *(f"--fsize={_DISK_BYTES}", f"--nofile={_OPEN_FILES}"),
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--uid", str(_NOBODY), "--gid", str(_NOBODY), "--cap-drop", "ALL"),
        *("--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "HOME", "/tmp"),
        *_read_only(),
        *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm"),
        *("--ro-bind", "/dev/null", "/dev/zero"),  # mapped it is memory that nothing counts
        *("--remount-ro", "/dev", "--size", size, "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--ro-bind-data", str(source), _PROGRAM, "--remount-ro", "/"),
        *("--seccomp", str(seccomp), "--json-status-fd", str(status)),
        *("prlimit", f"--nproc={limits.processes}"),
        *(_interpreter(), "-I", "-B", _PROGRAM),
    ]


def _interpreter() -> str:
    """Return the system's Python. The virtual environment may lie where nobody else may read.

    Raises:
        SandboxError: There is none below /usr.
    """
    for path in (Path("/usr/local/bin/python3"), Path("/usr/bin/python3")):
        if path.exists() and path.resolve().is_relative_to("/usr"):
            return str(path.resolve())
    raise SandboxError("code rewards need a python3 in /usr/bin (apt-get install python3)")


def _read_only() -> Iterator[str]:
    """Yield the options that mount the system's programs and libraries."""
    yield from (
        "--ro-bind",
        "/usr",
        "/usr",
        "--ro-bind-try",
        "/etc/ld.so.cache",
        "/etc/ld.so.cache",
    )
    for name in ("lib", "lib64", "bin"):
        place = Path("/", name)
        if place.is_symlink():
            yield from ("--symlink", os.readlink(place), str(place))
        else:
            yield from ("--ro-bind-try", str(place), str(place))


def _tree(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it; processes that end meanwhile are left out."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            waiting += [
                int(child)
                for task in Path(f"/proc/{pid}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
        except OSError:
            continue


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _exit_code(status: IO[bytes]) -> int | None:
    """Return the exit code that bubblewrap wrote; None if the program was not started or killed."""
    status.seek(0)
    for line in status:
        code = json.loads(line).get("exit-code")
        if code is not None:
            return _FIRST_SIGNAL - 1 - int(code) if int(code) in _SIGNALLED else int(code)
    return None


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(400).decode("utf-8", "replace").strip()
