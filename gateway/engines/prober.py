"""Probes an engine: finds its kind, and reports to its circuit breaker whether it is up."""

from __future__ import annotations

import asyncio
from typing import Protocol

import orjson

from clawstream.gateway.engines.circuit_breaker import By, Circuit
from clawstream.gateway.engines.http1 import Connection
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.engines.request_heads import VERSION_PATH, RequestHeads
from clawstream.gateway.engines.retry_policy import outcome_of
from clawstream.gateway.errors import Overloaded, Unreachable
from clawstream.gateway.protocols.base import EngineKind
from clawstream.runtime.logs import logger
from clawstream.schemas import engine_frames

PATIENCE = 2.0
"""A probe fails after this many probe intervals without an answer."""
REPROBE_OPEN_S = 0.5
REPROBE_TEXT_S = 60.0
"""Probe interval of an engine that is not a vLLM: long, to spare the server of a provider."""
MAX_UNCLEAR = 5
"""After this many probes that do not show its kind, an engine of the settings is a provider."""
NOT_UP = (502, 503)


class ProbedEngine(Protocol):
    """The methods and attributes of `Engine` that probes use."""

    name: str
    spec: EngineSpec
    listed: EngineSpec
    circuit: Circuit
    kind_known: bool
    heads: RequestHeads

    def found(self, kind: EngineKind) -> None: ...

    def answered(self, by: By) -> None: ...

    def failed(self, by: By, surely: bool = False) -> None: ...

    async def connection(self) -> Connection: ...


class Prober:
    """The probing task of one engine.

    interval_s: gateway.probe_interval_s. first_probe: Set after the first probe, or a bug in it.
    """

    def __init__(self, engine: ProbedEngine, interval_s: float) -> None:
        self._engine, self._interval_s = engine, interval_s
        self.first_probe = asyncio.Event()
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopped = self._redirects = False
        self._location = ""
        self._unclear = 0

    def start(self, after_s: float = 0.0) -> None:
        """Start probing."""
        self._task = asyncio.create_task(self._run(after_s))
        self._task.add_done_callback(self._ended)

    def wake(self) -> None:
        """Probe soon: a call has failed."""
        self._woken.set()

    async def stop(self) -> None:
        """Stop probing."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Restart the task after a bug ended it, so that the engine stays probed."""
        if task.cancelled() or self._stopped:
            return
        spec, error = self._engine.spec, repr(task.exception())
        logger().error("probe_broke", engine=spec.name, base_url=spec.base_url, error=error)
        self.first_probe.set()
        self.start(self._interval_s)

    async def _run(self, after_s: float) -> None:
        engine = self._engine
        await asyncio.sleep(after_s)
        while True:
            await self._probe()
            self.first_probe.set()
            provider = engine.spec.kind == "text" and not self._unclear
            pause = max(REPROBE_TEXT_S, self._interval_s) if provider else self._interval_s
            if engine.circuit.open_until_s is not None or not engine.kind_known:
                pause = min(REPROBE_OPEN_S, self._interval_s)
            self._woken.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._woken.wait()
                    await asyncio.sleep(min(REPROBE_OPEN_S, self._interval_s))
            except TimeoutError:
                continue

    async def _probe(self) -> None:
        engine = self._engine
        try:
            up = True
            if not engine.listed.kind_known:
                kind = await self._kind()
                up = kind is not None
                if kind is not None:
                    engine.found(kind)
            if up and engine.spec.kind != "text":
                status = (await self._get("/health"))[0]
                up = status < 500 and outcome_of(status, engine.spec.kind) != "redirected"
        except Overloaded as error:  # it tells nothing about the engine
            logger().warning("probe_skipped", engine=engine.name, error=str(error))
            return
        except (ConnectionError, TimeoutError, Unreachable) as error:
            engine.failed("probe", surely=isinstance(error, Unreachable))
            return
        if up:
            engine.answered("probe")
        else:
            engine.failed("probe")

    async def _kind(self) -> EngineKind | None:
        """Query the kind of the engine; None: unknown.

        An engine that answers or hangs MAX_UNCLEAR times without showing its kind counts as a
        provider until it shows another kind. A 502 or 503 is not an answer: the engine is not up.

        Raises:
            Unreachable: No connection was possible.
            ConnectionError: The connection broke.
        """
        try:
            status, captures, body = await self._get(VERSION_PATH)
            self._note_redirect(status)
        except TimeoutError:
            kind, up = None, True
        else:
            kind, up = kind_of(status, captures, body), status not in NOT_UP
        if kind is not None:
            self._unclear = 0
        if kind is not None or not up:
            return kind
        self._unclear += 1
        spec = self._engine.spec
        known = spec.worker_id is not None or (self._engine.kind_known and spec.kind != "text")
        return "text" if self._unclear >= MAX_UNCLEAR and not known else None

    def _note_redirect(self, status: int) -> None:
        """Log once that the engine redirects: its calls will fail."""
        redirects, self._redirects = self._redirects, outcome_of(status, "text") == "redirected"
        if self._redirects and not redirects:
            logger().warning(
                "engine_redirects",
                engine=self._engine.name,
                base_url=self._engine.spec.base_url,
                status=status,
                location=self._location,
                do="name the URL that answers itself in gateway.upstreams",
            )

    async def _get(self, path: str) -> tuple[int, bool, bytes]:
        """Send a GET request.

        Returns:
            Status, whether the reply has the header of our engine middleware, body.

        Raises:
            Unreachable: No connection was possible.
            ConnectionError: The connection broke.
            TimeoutError: The engine did not answer in time.
        """
        connection = await self._engine.connection()
        try:
            patience_s = PATIENCE * self._interval_s
            head = self._engine.heads.build("GET", path, {}, {}, None)
            connection.send(head, None, patience_s, patience_s)
            body = await connection.read()
            self._location = connection.headers.get(b"location", b"").decode("latin-1")[:300]
            return connection.status, engine_frames.ASK.encode() in connection.headers, body
        finally:
            connection.release()


def kind_of(status: int, captures: bool, body: bytes) -> EngineKind | None:
    """Find the kind of an engine from its reply to `GET /version`; None: it shows none.

    captures: The reply has the header of our engine middleware.
    """
    if status >= 500 or status == 429 or outcome_of(status, "text") == "redirected":
        return None
    if status == 200 and captures:
        return "captured"
    try:
        version = orjson.loads(body)
    except orjson.JSONDecodeError:
        return "text"
    known = status == 200 and isinstance(version, dict) and isinstance(version.get("version"), str)
    return "vllm" if known else "text"
