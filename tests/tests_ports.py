"""Ports for real servers in tests."""

from __future__ import annotations

import socket
from uuid import uuid4


def free_port(start: int = 21000) -> int:
    """A port that is free together with the one after it. Below 32768: above it the kernel hands out ports to clients."""
    for port in range(start + (uuid4().int % 300) * 20, 32000, 20):
        try:
            for p in (port, port + 1):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", p))
        except OSError:
            continue
        return port
    raise AssertionError("no free port between 21000 and 32000")
