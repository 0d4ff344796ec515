"""Ports for real servers in tests."""

from __future__ import annotations

import itertools
import os
import socket
from uuid import uuid4

FIRST, END, BLOCK = 21000, 32000, 40
"""Below 32768: above it the kernel hands out ports to clients. A block has the ports of a broker of four nodes."""
BLOCKS = (END - FIRST) // BLOCK

# A port that was given is not used at once, or never, where nobody is to listen: neither the next call nor another worker of pytest must find
# it free. So each worker has blocks of its own, and each process begins elsewhere.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_MINE = range(BLOCKS)[_worker :: max(_worker + 1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
_numbers = itertools.count(uuid4().int % len(_MINE))


def free_port(nodes: int = 1) -> int:
    """A port that is free together with the one after it, and that this process has not been given in its last hundred calls.

    nodes: of an embedded broker, at most four, whose ports are all to be free.
    """
    for number in itertools.islice(_numbers, len(_MINE)):
        port = FIRST + _MINE[number % len(_MINE)] * BLOCK
        try:
            for p in (port + 10 * node + beside for node in range(nodes) for beside in (0, 1)):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise AssertionError(f"no free port between {FIRST} and {END}")
