"""Calls to the engines: choice of an engine, waiting for one, retries (`retry_policy`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType

from clawstream.gateway.asgi.content_encoding import READABLE, Inflater, TooMuch, unpacked
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.sse import LONGEST_FIELD, begins_events
from clawstream.gateway.capture.stream import MAX_STREAM
from clawstream.gateway.clock import Clock
from clawstream.gateway.engines.circuit_breaker import By
from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.http1 import Connection
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineRegistry, EngineSpec
from clawstream.gateway.engines.retry_policy import Outcome, outcome_of, pause_s, retries
from clawstream.gateway.errors import NoEngine, Unreachable, UpstreamFailed, UpstreamTimeout
from clawstream.gateway.metrics import Metrics
from clawstream.gateway.protocols.request_fields import renamed
from clawstream.schemas.settings import GatewaySettings

SETTLE_S = 0.05
ASK_S = 10.0
Body = Callable[[EngineSpec], bytes] | bytes | None


class Response:
    """The reply of an engine after its headers.

    `read` and `pieces` read the body; they raise UpstreamFailed or UpstreamTimeout.

    encoding: Compression of the body that they return; None: not compressed. The gateway asks
        engines for uncompressed replies, but some compress anyway; supported encodings are
        decompressed.
    """

    __slots__ = ("_connection", "_engine", "encoding", "spec")

    def __init__(self, spec: EngineSpec, engine: Engine, connection: Connection) -> None:
        self.spec, self._engine, self._connection = spec, engine, connection
        packed = connection.headers.get(b"content-encoding")
        self.encoding = None if packed is None else _encoding(packed)

    @property
    def status(self) -> int:
        return self._connection.status

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Headers by name in lower case, those of one name joined."""
        return self._connection.headers

    def header(self, name: str) -> str | None:
        """Return a header of the reply; None: missing. name: In lower case."""
        value = self._connection.headers.get(name.encode())
        return value.decode("latin-1") if value is not None else None

    async def streams(self) -> bool:
        """Return whether the body is a stream of events that `pieces` can read.

        Some servers stream events under another content type; their first bytes tell.
        """
        kind = self._connection.headers.get(b"content-type", b"")
        if kind[:17].lower() == b"text/event-stream":
            return self.encoding is None or self.encoding in READABLE
        if self.encoding is not None:
            return False
        try:
            return begins_events(await self._connection.peek(LONGEST_FIELD))
        except (ConnectionError, TimeoutError) as error:
            raise self._broken(error) from error

    async def read(self, held: ReplyReservation | None = None) -> bytes:
        """Read the whole body.

        Args:
            held: Reservation that counts the bytes; None: only for a body known to be small.
        """
        try:
            body = await self._connection.read(held.extend if held is not None else None)
        except (ConnectionError, TimeoutError) as error:
            raise self._broken(error) from error
        return body if self.encoding is None else self._unpacked(body)

    def _unpacked(self, body: bytes) -> bytes:
        """Decompress a body and clear `encoding`.

        Returns the body unchanged and keeps `encoding` if the body cannot be decompressed.
        """
        if self.encoding not in READABLE:
            return body
        try:
            found = unpacked(body, self._connection.max_reply)
        except TooMuch as error:
            raise UpstreamFailed(f"the engine at {self.spec.base_url}: {error}") from error
        except ValueError:
            return body
        self.encoding = None
        return found

    async def settle(self) -> None:
        """Read the irrelevant rest of the body, so that the connection can serve the next call."""
        if self._connection.complete:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._connection.read()
        except (ConnectionError, TimeoutError):
            return  # the end of the block closes the connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives. The reply must be one that `streams`.

        Raises:
            UpstreamFailed: The connection breaks, or the stream is malformed.
            UpstreamTimeout: The engine sends nothing for too long.
        """
        inflater = None if self.encoding is None else Inflater(MAX_STREAM)
        try:
            while piece := await self._connection.piece():
                yield piece if inflater is None else inflater.feed(piece)
        except ValueError as error:
            raise UpstreamFailed(
                f"the engine at {self.spec.base_url}: its stream is {error}"
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> UpstreamFailed | UpstreamTimeout:
        self._engine.failed("call")
        return broken(error, self.spec)


def _encoding(value: bytes) -> str | None:
    name = value.decode("latin-1").strip().lower()
    return None if name in ("", "identity") else name


def broken(error: Exception, spec: EngineSpec) -> UpstreamFailed | UpstreamTimeout:
    """Convert an error of a connection to an error of the gateway."""
    if isinstance(error, TimeoutError):
        return UpstreamTimeout(f"the engine at {spec.base_url} {error or 'did not answer'}")
    return UpstreamFailed(
        f"the engine at {spec.base_url} went away: {type(error).__name__}: {error}"
    )


def redirected(spec: EngineSpec, status: int, response: Response) -> str:
    """Say that an engine sent a redirect, which the gateway does not follow."""
    location = response.header("location")
    where = f" to {location[:300]}" if location else ""
    return (
        f"the engine at {spec.base_url} answered {status}, a redirect{where}: name the URL that "
        "answers itself in gateway.upstreams"
    )


class Upstream:
    """The client of all engines. now_s: The clock of the engine registry, seconds."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: EngineRegistry,
        now_s: Callable[[], float],
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        clock, metrics = clock or Clock(), metrics or Metrics()
        self.settings, self.retries = settings, metrics.upstream_retries
        self.now_s = clock.monotonic
        self.engines = EnginePool(settings, registry, now_s, clock, metrics)

    async def open(self) -> None:
        """Start the engine pool. Call it on the serving event loop, before the first call."""
        await self.engines.open()

    async def close(self) -> None:
        """Close all connections."""
        await self.engines.close()

    @property
    def ready(self) -> list[EngineSpec]:
        """The engines that accept calls now."""
        return self.engines.ready

    async def ask(
        self,
        spec: EngineSpec,
        path: str,
        headers: Mapping[str, str],
        credentials: Mapping[str, str],
    ) -> tuple[int, bytes]:
        """Send a GET request to one engine, without a retry; return status and body.

        Raises:
            Unreachable: No connection was possible.
            ConnectionError: The connection broke.
            TimeoutError: The engine did not answer within ASK_S.
        """
        engine = self.engines.named(spec.name)
        if engine is None:
            raise Unreachable(f"the engine at {spec.base_url} has left")
        connection = await engine.connection()
        try:
            head = engine.heads.build("GET", path, headers, credentials, None)
            connection.send(head, None, ASK_S, ASK_S)
            body = await connection.read()
            return connection.status, body
        finally:
            connection.release()

    def call(
        self,
        method: str,
        path: str,
        body: Body,
        headers: Mapping[str, str],
        *,
        key: str,
        run_id: str,
        model: str | None,
        on_engine: Callable[[EngineSpec | None], None] = lambda spec: None,
        credentials: Mapping[str, str] | None = None,
    ) -> UpstreamCall:
        """Call an engine: `async with upstream.call(...) as response`.

        Leaving the block before the reply is read aborts the call at the engine. An error status of
        the engine is a reply, not an error.

        Args:
            method: HTTP method.
            path: Path as in the OpenAI API, with `/v1`; it may have a query.
            body: The body, or a function that builds it for the chosen engine.
            headers: Headers of the client that are relevant to an engine; names in lower case.
            key: Trajectory key.
            run_id: Run of the call.
            model: Model that the client asks for.
            on_engine: Called with each engine before the request is sent to it, and with None when
                that engine has certainly sampled nothing.
            credentials: API keys of the client, sent only to an upstream with
                `forward_credentials`.

        Raises:
            NoEngine: On entry: no engine became ready in time, or all of them refused.
            UpstreamFailed: The connection broke.
            UpstreamTimeout: The engine did not answer in time.
        """
        return UpstreamCall(
            self, method, path, body, headers, key, (run_id, model), on_engine, credentials or {}
        )


class UpstreamCall:
    """One call in progress, as an async context manager.

    A plain class, because a generator-based context manager would cost more than the choice of the
    engine.
    """

    __slots__ = (
        "_body", "_broke", "_connection", "_credentials", "_engine", "_headers", "_key", "_method",
        "_on_engine", "_path", "_refusal", "_role", "_route", "_tried", "_upstream",
    )  # fmt: skip

    def __init__(
        self, upstream: Upstream, method: str, path: str, body: Body, headers: Mapping[str, str],
        key: str, route: tuple[str, str | None], on_engine: Callable[[EngineSpec | None], None],
        credentials: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._upstream, self._method, self._path, self._body = upstream, method, path, body
        self._headers, self._credentials, self._on_engine = headers, credentials, on_engine
        self._key, self._route = key, route
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._role: By = "call"
        self._tried: tuple[Engine, ...] = ()
        self._broke = False
        self._refusal: UpstreamFailed | UpstreamTimeout | NoEngine | None = None

    async def __aenter__(self) -> Response:
        upstream, rounds = self._upstream, 0
        deadline = upstream.now_s() + upstream.settings.worker_wait_s
        while True:
            engine = upstream.engines.pick(self._key, self._route, self._tried)
            if engine is not None:
                response = await self._attempt(engine)
                if response is not None:
                    return response
                self._tried = (*self._tried, engine)
                continue
            left = deadline - upstream.now_s()
            if left <= 0:
                raise self._refusal or upstream.engines.no_engine_error()
            if self._tried:
                rounds, self._tried = rounds + 1, ()
                await asyncio.sleep(min(pause_s(rounds), left))
            else:
                await upstream.engines.wait(deadline)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    async def _attempt(self, engine: Engine) -> Response | None:
        """Send the call to this engine. None: retry on another engine."""
        spec = engine.spec
        self._engine, self._role = engine, engine.begin()
        try:
            self._on_engine(spec)
            connection = await self._send(engine, spec)
        except Unreachable as error:
            engine.failed(self._role, surely=True)
            message = f"{error.message}: nothing was sampled, try again"
            self._retry("unreachable", NoEngine(message))
            return None
        except (ConnectionError, TimeoutError) as error:
            engine.failed(self._role)
            untouched = self._connection is not None and not self._connection.touched
            resendable = untouched and isinstance(error, ConnectionError)
            outcome: Outcome = "broken" if resendable else "failed"
            failure = broken(error, spec)
            if not retries(outcome, broke_before=self._broke):
                self._release()
                raise failure from error
            self._retry(outcome, failure)
            return None
        except BaseException:  # cancelled, or a bug: release the engine
            engine.left(self._role)
            self._release()
            raise
        outcome = outcome_of(connection.status, spec.kind)
        response = Response(spec, engine, connection)
        if outcome == "replied":
            engine.answered(self._role)
            return response
        if outcome == "redirected":
            engine.answered(self._role)
            self._release()
            raise UpstreamFailed(redirected(spec, connection.status, response))
        if outcome == "limited":
            engine.answered(self._role)
            engine.start_cooldown(response.header("retry-after"))
        else:
            engine.failed(self._role)
        if not retries(outcome, another_free=self._another_free(engine)):
            return response
        message = f"the engine at {spec.base_url} says {connection.status}, try again"
        self._retry(outcome, NoEngine(message))
        return None

    async def _send(self, engine: Engine, spec: EngineSpec) -> Connection:
        """Send the request and wait for the head of the reply."""
        body, method = self._body, self._method
        data = body(spec) if callable(body) else body
        if data is not None and (model := spec.model_map.get(self._route[1] or "")) is not None:
            data = renamed(data, model)
        length = len(data) if data is not None else 0 if method == "POST" else None
        head = engine.heads.build(method, self._path, self._headers, self._credentials, length)
        connection = self._connection = await engine.connection()
        settings = self._upstream.settings
        connection.send(head, data, settings.upstream_timeout_s, settings.upstream_total_timeout_s)
        await connection.begin()
        return connection

    def _another_free(self, engine: Engine) -> bool:
        tried = (*self._tried, engine)
        return self._upstream.engines.pick(self._key, self._route, tried) is not None

    def _retry(
        self, outcome: Outcome, refusal: NoEngine | UpstreamFailed | UpstreamTimeout
    ) -> None:
        """Release the engine; keep the error for the case that no engine replies in time.

        After a broken attempt its error stays, because that engine may have sampled.
        """
        self._release()
        self._upstream.retries.labels(outcome.removesuffix("_provider")).inc()
        if outcome == "broken":
            self._broke, self._refusal = True, refusal
        elif not self._broke:
            self._refusal = refusal
            self._on_engine(None)

    def _release(self) -> None:
        """Release the connection: reuse it after a complete reply, otherwise close it.

        Closing the connection makes the engine abort the call.
        """
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.in_flight -= 1
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
