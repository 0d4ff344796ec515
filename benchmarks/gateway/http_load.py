"""A cheap HTTP client: makes calls over persistent connections, on each one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast


@dataclass
class Outcome:
    """The replies. latencies_s: Of each call, in the order of their ends.

    failed: Number of replies other than 200 to 209, with the first one's beginning.
    """

    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0
    first_failure: bytes = b""


class _Caller(asyncio.Protocol):
    def __init__(
        self, requests: Iterator[bytes], outcome: Outcome, done: asyncio.Future[None]
    ) -> None:
        self._requests, self._outcome, self._done = requests, outcome, done
        self._buffer = b""
        self._began = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {exc}"))

    def _next(self) -> None:
        assert self._transport is not None
        request = next(self._requests, None)
        if request is None:
            if not self._done.done():
                self._done.set_result(None)
            self._transport.close()
            return
        self._began = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = self._buffer[:head_end].lower()
        at = head.find(b"content-length:")
        if at >= 0:
            if len(self._buffer) < head_end + 4 + int(head[at + 15 :].split(b"\r\n", 1)[0]):
                return
        elif not self._buffer.endswith(b"0\r\n\r\n"):
            return
        outcome = self._outcome
        outcome.latencies_s.append(time.perf_counter() - self._began)
        if not head.startswith(b"http/1.1 20") or b'"error"' in self._buffer[-400:]:
            outcome.failed += 1
            outcome.first_failure = outcome.first_failure or self._buffer[:600]
        self._buffer = b""
        self._next()


async def load(port: int, request: Callable[[int], bytes], calls: int, concurrency: int) -> Outcome:
    """Make calls.

    request: Returns the bytes of the n-th call. Raises ConnectionError when a connection breaks.
    """
    outcome, loop = Outcome(), asyncio.get_running_loop()
    requests = (request(i) for i in range(calls))
    ends = [loop.create_future() for _ in range(min(concurrency, calls))]
    for end in ends:
        await loop.create_connection(partial(_Caller, requests, outcome, end), "127.0.0.1", port)
    await asyncio.gather(*ends)
    return outcome
