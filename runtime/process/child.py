"""Start processes that must not outlive their parent.

`die_with_parent(command)` returns a command line that asks the kernel for a signal at the parent's
death (PR_SET_PDEATHSIG) and then execs the command: same pid, same standard streams. It needs no
preexec_fn, which runs Python between fork and exec and may deadlock beside other threads. The
kernel sends the signal when the starting *thread* ends, so start a process from a thread that lives
as long as the process should.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

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
