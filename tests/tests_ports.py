"""Ports for real servers in tests."""

from __future__ import annotations

import itertools
import socket
from uuid import uuid4

FIRST, END, BLOCK = 21000, 32000, 40
"""Below 32768: above it the kernel hands out ports to clients. A block has the ports of a broker of four nodes."""
BLOCKS = (END - FIRST) // BLOCK

# A port that was given is not used at once: the next call must not find it free again. Each process begins elsewhere.
_numbers = itertools.count(uuid4().int % BLOCKS)


def free_port(nodes: int = 1) -> int:
    """A port that is free together with the one after it, and that this process has not been given in its last 200 calls.

    nodes: of an embedded broker, at most four, whose ports are all to be free.
    """
    for number in itertools.islice(_numbers, BLOCKS):
        port = FIRST + number % BLOCKS * BLOCK
        try:
            for p in (port + 10 * node + beside for node in range(nodes) for beside in (0, 1)):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise AssertionError(f"no free port between {FIRST} and {END}")
