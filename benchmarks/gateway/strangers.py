"""Latency of `/health` and of authorized calls while strangers hold connections.

The strangers have no key. They send nothing, a blank line, or a part of a request, and stay.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvloop

from benchmarks.gateway.http_load import load
from benchmarks.gateway.sides import Side
from clawstream.runtime.process.open_files import raise_limit

CALL = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
SENT = (
    b"",
    b"\r\n",
    b"GET /hea",
    CALL,
    CALL + b"content-length: 100000\r\n\r\n{",
    b"POST /sessions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n",
    b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n",
)
"""What strangers send, in turn; they read nothing."""
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@contextmanager
def strangers(port: int, count: int) -> Iterator[None]:
    """Hold connections of strangers."""
    raise_limit()
    held: list[socket.socket] = []
    try:
        for at in range(count):
            held.append(connection := socket.create_connection(("127.0.0.1", port)))
            connection.sendall(SENT[at % len(SENT)])
        yield
    finally:
        for connection in held:
            connection.close()


def among_strangers(gateway: Side, body: bytes, count: int, calls: int) -> Sequence[list[float]]:
    """Return the seconds of each `/health`, and of each call, among `count` strangers.

    Each request has a connection of its own. Ends the benchmark unless every one is answered.
    """

    async def latencies(request: bytes) -> list[float]:
        found = []
        for _ in range(calls):
            began = time.perf_counter()
            outcome = await load(gateway.port, lambda _: request, 1, 1)
            if outcome.failed:
                raise SystemExit(f"among strangers: {outcome.first_failure!r}")
            found.append(time.perf_counter() - began)
        return found

    async def both() -> list[list[float]]:
        return [await latencies(HEALTH), await latencies(gateway.request(0, body))]

    with strangers(gateway.port, count):
        return uvloop.run(both())
