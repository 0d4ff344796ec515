"""Ports for real servers in tests."""

from __future__ import annotations

import socket
from uuid import uuid4


def free_port(start: int = 21000, nodes: int = 1) -> int:
    """A port that is free together with the one after it. Below 32768: above it the kernel hands out ports to clients.

    nodes: of an embedded broker, whose ports are all to be free.
    """
    for port in range(start + (uuid4().int % 300) * 20, 32000, 20):
        try:
            for p in (port + 10 * node + beside for node in range(nodes) for beside in (0, 1)):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise AssertionError("no free port between 21000 and 32000")
