"""Calls to the engines: choice of an engine, waiting for one, retries (`retry_policy`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType

from clawstream.gateway.asgi.content_encoding import READABLE, Inflater, TooMuch, unpacked
from clawstream.gateway.asgi.in_flight_limits import ReplyReservation
from clawstream.gateway.asgi.sse import LONGEST_FIELD, begins_events
from clawstream.gateway.capture.stream import MAX_STREAM
from clawstream.gateway.engines.circuit_breaker import By
from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.http1 import Connection
from clawstream.gateway.engines.pool import EnginePool
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.engines.retry_policy import Outcome, outcome_of, pause_s, retries
from clawstream.gateway.errors import NoEngine, Unreachable, UpstreamFailed, UpstreamTimeout
from clawstream.gateway.protocols.request_fields import renamed

SETTLE_S = 0.05
ASK_S = 10.0
Body = Callable[[EngineSpec], bytes] | bytes | None
NO_CREDENTIALS: Mapping[str, str] = {}


async def ask(
    pool: EnginePool, spec: EngineSpec, path: str, headers: Mapping[str, str],
    credentials: Mapping[str, str],
) -> tuple[int, bytes]:  # fmt: skip
    """Send a GET request to one engine, without a retry; return status and body.

    Raises:
        Unreachable: No connection was possible.
        ConnectionError: The connection broke.
        TimeoutError: The engine did not answer within ASK_S.
    """
    engine = pool.named(spec.name)
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


def redirected(spec: EngineSpec, status: int, location: str | None) -> str:
    """Say that an engine sent a redirect, which the gateway does not follow."""
    where = f" to {location[:300]}" if location else ""
    return (
        f"the engine at {spec.base_url} answered {status}, a redirect{where}: name the URL that "
        "answers itself in gateway.upstreams"
    )


class EngineCall:
    """One call to an engine, and its reply: `async with EngineCall(...) as reply`.

    Entering the block sends the call and waits for the headers of the reply. `read` and `pieces`
    read the body; they raise UpstreamFailed or UpstreamTimeout. Leaving the block before the reply
    is read aborts the call at the engine. An error status of the engine is a reply, not an error.

    Args:
        pool: The engines.
        method: HTTP method.
        path: Path as in the OpenAI API, with `/v1`; it may have a query.
        body: The body, or a function that builds it for the chosen engine.
        headers: Headers of the client that are relevant to an engine; names in lower case.
        key: Trajectory key.
        run_id: Run of the call.
        model: Model that the client asks for.
        on_engine: Called with each engine before the request is sent to it, and with None when
            that engine has certainly sampled nothing.
        credentials: Headers of the client; the API keys in them are sent only to an upstream with
            `forward_credentials`.

    Attributes:
        spec: The engine that replied.
        status: Status of the reply.
        headers: Headers of the reply by name in lower case, those of one name joined.
        encoding: Compression of the body that `read` and `pieces` return; None: not compressed.
            The gateway asks engines for uncompressed replies, but some compress anyway; supported
            encodings are decompressed.

    Raises:
        NoEngine: On entry: no engine became ready in time, or all of them refused.
        UpstreamFailed: The connection broke.
        UpstreamTimeout: The engine did not answer in time.
    """

    __slots__ = (
        "_body", "_broke", "_credentials", "_engine", "_key", "_method", "_on_engine", "_open",
        "_path", "_pool", "_refusal", "_reply", "_role", "_route", "_sent", "_tried", "encoding",
        "headers", "spec", "status",
    )  # fmt: skip

    def __init__(
        self, pool: EnginePool, method: str, path: str, body: Body, headers: Mapping[str, str],
        *, key: str, run_id: str, model: str | None,
        on_engine: Callable[[EngineSpec | None], None] = lambda spec: None,
        credentials: Mapping[str, str] = NO_CREDENTIALS,
    ) -> None:  # fmt: skip
        self._pool, self._method, self._path, self._body = pool, method, path, body
        self._sent, self._credentials, self._on_engine = headers, credentials, on_engine
        self._key, self._route = key, (run_id, model)
        self._engine: Engine | None = None
        self._open: Connection | None = None  # the connection that `_release` gives back
        self._role: By = "call"
        self._tried: tuple[Engine, ...] = ()
        self._broke = False
        self._refusal: UpstreamFailed | UpstreamTimeout | NoEngine | None = None
        self._reply: Connection
        self.spec: EngineSpec
        self.status: int
        self.headers: Mapping[bytes, bytes]
        self.encoding: str | None

    async def __aenter__(self) -> EngineCall:
        pool, rounds = self._pool, 0
        deadline = pool.now_s() + pool.settings.worker_wait_s
        while True:
            engine = pool.pick(self._key, self._route, self._tried)
            if engine is not None:
                if await self._attempt(engine):
                    return self
                self._tried = (*self._tried, engine)
                continue
            left = deadline - pool.now_s()
            if left <= 0:
                raise self._refusal or pool.no_engine_error()
            if self._tried:
                rounds, self._tried = rounds + 1, ()
                await asyncio.sleep(min(pause_s(rounds), left))
            else:
                await pool.wait(deadline)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    # -- the reply

    def header(self, name: str) -> str | None:
        """Return a header of the reply; None: missing. name: In lower case."""
        value = self.headers.get(name.encode())
        return value.decode("latin-1") if value is not None else None

    async def streams(self) -> bool:
        """Return whether the body is a stream of events that `pieces` can read.

        Some servers stream events under another content type; their first bytes tell.
        """
        kind = self._reply.headers.get(b"content-type", b"")
        if kind[:17].lower() == b"text/event-stream":
            return self.encoding is None or self.encoding in READABLE
        if self.encoding is not None:
            return False
        try:
            return begins_events(await self._reply.peek(LONGEST_FIELD))
        except (ConnectionError, TimeoutError) as error:
            raise self._broken_at(error) from error

    async def read(self, held: ReplyReservation | None = None) -> bytes:
        """Read the whole body.

        Args:
            held: Reservation that counts the bytes; None: only for a body known to be small.
        """
        try:
            body = await self._reply.read(held.extend if held is not None else None)
        except (ConnectionError, TimeoutError) as error:
            raise self._broken_at(error) from error
        return body if self.encoding is None else self._unpacked(body)

    def _unpacked(self, body: bytes) -> bytes:
        """Decompress a body and clear `encoding`.

        Returns the body unchanged and keeps `encoding` if the body cannot be decompressed.
        """
        if self.encoding not in READABLE:
            return body
        try:
            found = unpacked(body, self._reply.max_reply)
        except TooMuch as error:
            raise UpstreamFailed(f"the engine at {self.spec.base_url}: {error}") from error
        except ValueError:
            return body
        self.encoding = None
        return found

    async def settle(self) -> None:
        """Read the irrelevant rest of the body, so that the connection can serve the next call."""
        if self._reply.complete:
            return
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._reply.read()
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
            while piece := await self._reply.piece():
                yield piece if inflater is None else inflater.feed(piece)
        except ValueError as error:
            raise UpstreamFailed(
                f"the engine at {self.spec.base_url}: its stream is {error}"
            ) from error
        except (ConnectionError, TimeoutError) as error:
            raise self._broken_at(error) from error

    def _broken_at(self, error: Exception) -> UpstreamFailed | UpstreamTimeout:
        if self._engine is not None:
            self._engine.failed("call")
        return broken(error, self.spec)

    # -- the attempts

    async def _attempt(self, engine: Engine) -> bool:
        """Send the call to this engine. False: retry on another engine."""
        spec = engine.spec
        self._engine, self._role = engine, engine.begin()
        try:
            self._on_engine(spec)
            await self._send(engine, spec)
        except Unreachable as error:
            engine.failed(self._role, surely=True)
            message = f"{error.message}: nothing was sampled, try again"
            self._retry("unreachable", NoEngine(message))
            return False
        except (ConnectionError, TimeoutError) as error:
            engine.failed(self._role)
            untouched = self._open is not None and not self._open.touched
            resendable = untouched and isinstance(error, ConnectionError)
            outcome: Outcome = "broken" if resendable else "failed"
            failure = broken(error, spec)
            if not retries(outcome, broke_before=self._broke):
                self._release()
                raise failure from error
            self._retry(outcome, failure)
            return False
        except BaseException:  # cancelled, or a bug: release the engine
            engine.left(self._role)
            self._release()
            raise
        outcome = outcome_of(self.status, spec.kind)
        if outcome == "replied":
            engine.answered(self._role)
            return True
        if outcome == "redirected":
            engine.answered(self._role)
            self._release()
            raise UpstreamFailed(redirected(spec, self.status, self.header("location")))
        if outcome == "limited":
            engine.answered(self._role)
            engine.start_cooldown(self.header("retry-after"))
        else:
            engine.failed(self._role)
        if not retries(outcome, another_free=self._another_free(engine)):
            return True
        message = f"the engine at {spec.base_url} says {self.status}, try again"
        self._retry(outcome, NoEngine(message))
        return False

    async def _send(self, engine: Engine, spec: EngineSpec) -> None:
        """Send the request and wait for the head of the reply."""
        body, method = self._body, self._method
        data = body(spec) if callable(body) else body
        if data is not None and (model := spec.model_map.get(self._route[1] or "")) is not None:
            data = renamed(data, model)
        length = len(data) if data is not None else 0 if method == "POST" else None
        head = engine.heads.build(method, self._path, self._sent, self._credentials, length)
        reply = self._open = await engine.connection()
        settings = self._pool.settings
        reply.send(head, data, settings.upstream_timeout_s, settings.upstream_total_timeout_s)
        await reply.begin()
        self._reply, self.spec, self.status, self.headers = reply, spec, reply.status, reply.headers
        packed = reply.headers.get(b"content-encoding")
        self.encoding = None if packed is None else _encoding(packed)

    def _another_free(self, engine: Engine) -> bool:
        return self._pool.pick(self._key, self._route, (*self._tried, engine)) is not None

    def _retry(
        self, outcome: Outcome, refusal: NoEngine | UpstreamFailed | UpstreamTimeout
    ) -> None:
        """Release the engine; keep the error for the case that no engine replies in time.

        After a broken attempt its error stays, because that engine may have sampled.
        """
        self._release()
        self._pool.retries.labels(outcome.removesuffix("_provider")).inc()
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
        connection, self._open = self._open, None
        if connection is not None:
            connection.release()
