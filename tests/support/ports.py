"""Ports for real servers in tests."""

from __future__ import annotations

import fcntl
import itertools
import os
import socket
import tempfile
from collections import deque
from pathlib import Path
from uuid import uuid4

FIRST, END, BLOCK = 21000, 32000, 40
"""Below 32768: above it the kernel hands out ports to clients. A block has the ports of a broker of four nodes."""
BLOCKS = (END - FIRST) // BLOCK
HELD = 40

# A port that was given is not used at once: the next call must not find it free again. Each process begins elsewhere.
_numbers = itertools.count(uuid4().int % BLOCKS)
_locks: deque[int] = deque()


def free_port(nodes: int = 1) -> int:
    """A port that is free together with the one after it, and that neither this process nor another has been given in its last 40 calls.

    nodes: of an embedded broker, at most four, whose ports are all to be free.
    """
    for number in itertools.islice(_numbers, BLOCKS):
        block = number % BLOCKS
        port = FIRST + block * BLOCK
        if (lock := _locked(block)) is None:
            continue
        try:
            for p in (port + 10 * node + beside for node in range(nodes) for beside in (0, 1)):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            os.close(lock)
            continue
        _locks.append(lock)
        if len(_locks) > HELD:
            os.close(_locks.popleft())
        return port
    raise AssertionError(f"no free port between {FIRST} and {END}")


def _locked(block: int) -> int | None:
    """A lock on the block's file, which is let go of when the process ends; None when another process has it: it has not bound the port yet."""
    folder = Path(tempfile.gettempdir()) / f"clawstream-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / str(block), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
