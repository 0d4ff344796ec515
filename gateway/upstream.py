"""Calls to the engines: picking one, waiting for one, retrying where nothing was sampled. The one owner of retries.

A call is tried again only when it surely sampled nothing: the connection was refused, or the engine said 502 or 503 before anything
else. Whatever breaks later is an error of the call.
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from gateway.clock import Clock
from gateway.errors import NoWorker, UpstreamFailed, UpstreamTimeout
from gateway.workers import Worker, WorkerTable, choose, suited
from schemas.settings import GatewaySettings

BACKOFF_S = (0.05, 0.1, 0.2, 0.4, 0.8)
SHUNNED_S = 1.0
"""So long a worker that refused is passed over when there are others."""
MAX_HEADER = 1 << 20
"""Version spans ride in a header."""
# Below the 5 s after which the engine closes an idle connection: a call must not race with that.
KEEPALIVE_S = 3.0
LONG_BODY = 1 << 20
SETTLE_S = 0.05
NOT_SAMPLED = (502, 503)
ENCODING = {"Accept-Encoding": "identity"}


@dataclass(slots=True)
class Response:
    """An engine's reply, headers read. Bodies are read with `read` or `pieces`, which raise UpstreamFailed or UpstreamTimeout."""

    worker: Worker
    raw: aiohttp.ClientResponse

    @property
    def status(self) -> int:
        return self.raw.status

    def header(self, name: str) -> str | None:
        """A header of the reply."""
        return self.raw.headers.get(name)

    async def read(self) -> bytes:
        """The whole body."""
        try:
            return await self.raw.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise broken(error, self.worker) from error

    async def settle(self) -> None:
        """All that matters was read: let the body end, so that the connection can serve the next call."""
        try:
            async with asyncio.timeout(SETTLE_S):
                await self.raw.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.raw.close()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        try:
            async for piece in self.raw.content.iter_any():
                yield piece
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise broken(error, self.worker) from error


def broken(error: Exception, worker: Worker) -> UpstreamFailed | UpstreamTimeout:
    """Our error for a connection's."""
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(f"the engine at {worker.base_url} took longer than gateway.upstream_timeout_s")
    return UpstreamFailed(f"the engine at {worker.base_url} went away: {type(error).__name__}: {error}")


class Upstream:
    """All engines. now_s: the clock of the worker table."""

    def __init__(
        self, settings: GatewaySettings, table: WorkerTable, now_s: Callable[[], float], clock: Clock | None = None
    ) -> None:
        self._settings, self._table, self._now_s = settings, table, now_s
        self._clock = clock or Clock()
        self._in_flight: Counter[str] = Counter()
        self._shunned: dict[str, float] = {}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Before the first call; on the event loop that serves."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=self._settings.upstream_timeout_s, sock_connect=5.0),
            auto_decompress=False,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    @property
    def ready(self) -> list[Worker]:
        """Engines that can be called now."""
        return self._table.ready(self._now_s())

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        key: str,
        run_id: str,
        model: str | None,
        on_asking: Callable[[Worker | None], None] = lambda worker: None,
    ) -> AsyncIterator[Response]:
        """Ask an engine; leaving the block before the reply is read aborts it there.

        on_asking: told which engine is being asked, and None when that one surely sampled nothing. Raises NoWorker,
        UpstreamFailed or UpstreamTimeout; an engine's own error status is a reply.
        """
        deadline = self._clock.monotonic() + self._settings.worker_wait_s
        attempt = 0
        while True:
            worker = await self._pick(key, run_id, model, deadline)
            self._in_flight[worker.name] += 1
            raw: aiohttp.ClientResponse | None = None
            try:
                on_asking(worker)
                raw = await self._send(method, worker, path, body, headers)
                again = raw is None or raw.status in NOT_SAMPLED
                if raw is not None and (not again or self._clock.monotonic() >= deadline):
                    yield Response(worker, raw)
                    return
                if self._clock.monotonic() >= deadline:
                    raise NoWorker(
                        f"the engine at {worker.base_url} refused connections: nothing was sampled, try again"
                    )
            finally:
                self._in_flight[worker.name] -= 1
                if raw is not None:
                    raw.close()  # a reply read to its end has given its connection back; else this makes the engine abort
            on_asking(None)
            self._shunned[worker.name] = self._clock.monotonic() + SHUNNED_S
            pause = BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)]
            attempt += 1
            await asyncio.sleep(max(0.0, min(pause, deadline - self._clock.monotonic())))

    async def _send(
        self, method: str, worker: Worker, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse | None:
        """The reply's head; None when the connection was refused."""
        assert self._session is not None, "open() comes first"
        try:
            # aiohttp writes bytes in one go; a long body must not hold up everyone else.
            data = io.BytesIO(body) if body is not None and len(body) >= LONG_BODY else body
            return await self._session.request(
                method, worker.base_url + path, data=data, headers={**ENCODING, **headers}, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise broken(error, worker) from error

    async def _pick(self, key: str, run_id: str, model: str | None, deadline: float) -> Worker:
        attempt = 0
        while True:
            now = self._clock.monotonic()
            candidates = suited(self.ready, run_id, model)
            fresh = [w for w in candidates if self._shunned.get(w.name, 0.0) <= now]
            worker = choose(fresh or candidates, key, self._in_flight)
            if worker is not None:
                return worker
            if now >= deadline:
                raise NoWorker(
                    f"no engine was ready within {self._settings.worker_wait_s:g} s: nothing was sampled, try again"
                )
            await asyncio.sleep(min(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)], max(0.001, deadline - now)))
            attempt += 1
