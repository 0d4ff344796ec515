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
"""The ports are below 32768, because the kernel assigns higher ports to clients.

A block holds the ports of a broker of four nodes.
"""
BLOCKS = (END - FIRST) // BLOCK
HELD = 40

# An assigned port is not bound at once, so the next call must not return it again. Each process
# starts at a different block.
_numbers = itertools.count(uuid4().int % BLOCKS)
_locks: deque[int] = deque()


def free_port(nodes: int = 1) -> int:
    """Return a free port whose successor is free too.

    Neither this process nor another has returned the port in its last 40 calls.

    nodes: number of nodes of a broker, at most four; the ports of all nodes are free.
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
    """Lock the block's file until the process ends.

    Returns None when another process holds the lock; that process may not have bound the port yet.
    """
    folder = Path(tempfile.gettempdir()) / f"clawstream-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    lock = os.open(folder / str(block), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
