"""Run one command of a flow, and leave none of its processes behind.

Started by `clawstream.agent_flow.play.command` as a script; imports nothing of Clawstream. Standard
input is a socket of the flow. The arguments are the process id of the flow and the command. It

1. asks the kernel for SIGTERM when the flow dies, and to become the parent of orphans (Linux);
2. starts the command in a session of its own, which is killed when this process dies;
3. waits for the end of the command, for SIGTERM, or until the flow closes its socket;
4. kills the command's process group, and every process that it or its children left (on Linux also
   those in sessions of their own);
5. writes a JSON line to the socket: `{"exit": CODE}`, negative for a signal, or `{"error": WHY}`
   if the command cannot be started.

Thus also a `kill -9` of the flow leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any

FLOW = 0
"""File descriptor of the socket."""
KILL_S = 3.0
"""Time in which killed processes must have ended; one of another user's cannot be killed."""
_PDEATHSIG, _SUBREAPER = 1, 36


def main() -> None:
    """Run the command of the arguments."""
    flow, command = int(sys.argv[1]), sys.argv[2:]
    wake_reading, wake_writing = os.pipe()
    os.set_blocking(wake_writing, False)
    signal.set_wakeup_fd(wake_writing)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    prctl(_PDEATHSIG, signal.SIGTERM)
    prctl(_SUBREAPER, 1)
    if os.getppid() != flow:
        return  # it died before
    refused_reading, refused_writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        execute(command, os.getppid(), refused_writing)
    os.close(refused_writing)
    if error := os.read(refused_reading, 1000):
        tell({"error": error.decode(errors="replace")})
        return
    code = None
    while code is None:
        ready, _, _ = select.select([FLOW, wake_reading], [], [])
        numbers = os.read(wake_reading, 1000) if wake_reading in ready else b""
        if FLOW in ready or signal.SIGTERM in numbers:
            break
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
    kill_all(pid)
    tell({"exit": -signal.SIGKILL if code is None else code})


def execute(command: list[str], launcher: int, refused: int) -> None:
    """Become the command; write why not to the pipe."""
    try:
        os.setsid()
        prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, FLOW)
        signal.set_wakeup_fd(-1)
        # What Python ignores and catches, a command expects at its default.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(refused, str(error).encode())
    finally:
        os._exit(1)


def kill_all(command: int) -> None:
    """Kill the command's process group and all children of this process, orphans included."""
    deadline = time.monotonic() + KILL_S
    kill(os.killpg, command)
    while time.monotonic() < deadline:
        for child in children():
            kill(os.kill, child)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            time.sleep(0.002)


def kill(function: Any, target: int) -> None:
    """Send SIGKILL if there is such a process."""
    with suppress(OSError):  # it has ended, or is another user's
        function(target, signal.SIGKILL)


def children() -> list[int]:
    """Return the ids of this process's children, as far as /proc tells."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; without effect on systems other than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def tell(reply: dict[str, Any]) -> None:
    """Write the reply, unless the flow has gone."""
    with suppress(OSError):
        os.write(FLOW, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
