"""Start processes that must not outlive their parent, and stop them.

`die_with_parent(command)` returns a command line that asks the kernel for a signal at the parent's
death (PR_SET_PDEATHSIG) and then execs the command: same pid, same standard streams. It needs no
preexec_fn, which runs Python between fork and exec and may deadlock beside other threads. The
kernel sends the signal when the starting *thread* ends, so start a process from a thread that lives
as long as the process should.

`ChildProcess` runs a command line on the event loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# The parent may die before the kernel is asked: then it is another process that is the parent by
# now.
_GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.stderr.write(f"cannot run {sys.argv[3]}: {error.strerror}\\n")
    sys.exit(127)
"""


def die_with_parent(
    command: Sequence[str], parent_death_signal: signal.Signals = signal.SIGKILL
) -> list[str]:
    """Return a command line that runs `command` and dies with this process.

    Args:
        command: The program, looked up on PATH, and its arguments.
        parent_death_signal: The signal that the kernel sends. SIGKILL ends every process; a process
            that handles another signal may take as long as it wants.
    """
    guard = (sys.executable, "-I", "-S", "-c", _GUARD)
    return [*guard, str(os.getpid()), str(int(parent_death_signal)), *command]


class ChildProcess:
    """A process of its own process group, which dies with this one.

    It is reaped by the event loop that starts it, in one step with the change of `returncode`. So
    long as `returncode` is None, no other process can have its number or that of its group.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        """Start it. how: arguments of Popen. Raises OSError."""
        self._process = subprocess.Popen(die_with_parent(command), start_new_session=True, **how)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            self._descriptor = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._loop.add_reader(self._descriptor, self._reap)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int:
        """Its number, which may belong to another process once `returncode` is set."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None until it is reaped."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the exit code."""
        await self._ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        """Send SIGKILL to its process group, unless it has ended."""
        if self.returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
