"""One engine of this gateway: its connections, calls in flight, circuit, and the probing task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.auth.session_keys import KEY_PREFIXES
from gateway.engines.circuit_breaker import (
    CLOSED,
    Answered,
    By,
    Event,
    Failed,
    HalfOpenCancelled,
    HalfOpenStarted,
    admits,
    fold,
    kind_of,
)
from gateway.engines.http1 import MAX_REPLY, Connection, Pool, address_of
from gateway.engines.registry import EngineSpec
from gateway.errors import BadRequest, Unreachable
from gateway.protocols.base import EngineKind
from runtime.logs import logger
from schemas import engine_frames

PATIENCE = 2.0
"""A probe fails after this many probe intervals without an answer."""
REPROBE_OPEN_S = 0.5
REPROBE_TEXT_S = 60.0
"""Probe interval of an engine that is not a vLLM: long, to spare the server of a provider."""
REST_S = 30.0
"""Longest cooldown of an engine that sent `retry-after`."""
MUTE = 5
"""After this many probes that do not show its kind, an engine of the settings is a provider."""
NOT_UP = (502, 503)
MAX_HEADS = 256
TOKENLESS: Mapping[EngineKind, str] = {
    "text": "its steps have text only and are never trained. To train, name a vLLM that "
    "`clawstream rollout` starts, or a vLLM of yours",
    "vllm": "over Responses and Messages its steps are never trained. Use chat or completions, "
    "or let `clawstream rollout` start it",
}
"""Advice for an engine that returns no token ids, or not over every protocol."""
VERSION = "/version"


class Engine:
    """An engine.

    spec: The engine, with the kind that probes found; `listed` is the spec without it.
    clock: Monotonic clock, seconds.
    on_state_change: Called when the engine starts or stops accepting calls.
    max_reply: See `Pool`.
    """

    def __init__(
        self,
        spec: EngineSpec,
        clock: Callable[[], float],
        probe_interval_s: float,
        on_state_change: Callable[[Engine], None],
        max_reply: int = MAX_REPLY,
    ) -> None:
        self.spec, self.name = spec, spec.name
        self.listed = spec
        self.in_flight = 0
        self.circuit = CLOSED
        self.kind_known = spec.kind_known
        self.cooldown_until_s = float("-inf")
        self.first_probe = asyncio.Event()
        self._clock, self._interval_s, self._state_changed = (
            clock,
            probe_interval_s,
            on_state_change,
        )
        self._address = address_of(spec.base_url)
        self.pool = Pool(self._address, max_reply)
        self._heads: dict[tuple[str, str], tuple[str, str]] = {}
        self._soon = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._drained = False
        self._mute = 0

    # -- availability

    @property
    def healthy(self) -> bool:
        """Whether its kind is known, its circuit is closed and it is not in a cooldown."""
        return (
            self.kind_known
            and self.circuit.open_until_s is None
            and self.cooldown_until_s == float("-inf")
        )

    @property
    def probed(self) -> bool:
        """Whether probes show its recovery; otherwise a trial call has to."""
        return self.listed.kind != "text" or not self.listed.kind_known

    @property
    def state(self) -> str:
        """State for display: unknown (not probed yet), open, half_open, cooldown or ready."""
        if not self.kind_known:
            return "unknown"
        if self.circuit.open_until_s is not None:
            return "half_open" if self.circuit.half_open else "open"
        return "cooldown" if self.cooldown_until_s > self._clock() else "ready"

    def admits(self, now_s: float) -> bool:
        """Return whether the engine may get a call now."""
        return self.kind_known and admits(self.circuit, now_s, self.probed)

    def start_cooldown(self, retry_after: str | None) -> None:
        """Prefer other engines for a while: this one is at its limit.

        Args:
            retry_after: Value of its header `retry-after`, seconds.
        """
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 1.0
        self.cooldown_until_s = self._clock() + min(seconds, REST_S)
        self._state_changed(self)

    def cooled_down(self, now_s: float) -> bool:
        """Return whether it is not in a cooldown; end a cooldown that is over."""
        if self.cooldown_until_s <= now_s and self.cooldown_until_s != float("-inf"):
            self.cooldown_until_s = float("-inf")
            self._state_changed(self)
        return self.cooldown_until_s <= now_s

    # -- results of calls and probes

    def begin(self) -> By:
        """Count the start of a call; return its role for the circuit breaker."""
        self.in_flight += 1
        if self.circuit.open_until_s is None:
            return "call"
        self._take(HalfOpenStarted())
        return "half_open"

    def answered(self, by: By) -> None:
        """Record that the engine began to answer."""
        if self.circuit is not CLOSED:
            self._take(Answered(by, self._clock()))

    def failed(self, by: By, surely: bool = False) -> None:
        """Record that the engine did not answer. surely: The connection failed."""
        self._take(Failed(by, self._clock(), surely))

    def left(self, by: By) -> None:
        """Record that the client disconnected before the engine answered."""
        if by == "half_open":
            self._take(HalfOpenCancelled())

    def _take(self, event: Event) -> None:
        before, self.circuit = self.circuit, fold(self.circuit, event)
        if self.circuit == CLOSED:
            self.circuit = CLOSED  # the same object, so that the hot path compares identity
        if (before.open_until_s is None) != (
            self.circuit.open_until_s is None
        ) or before.half_open != self.circuit.half_open:
            if before.open_until_s is None:
                logger().warning("engine_out", engine=self.name, base_url=self.spec.base_url)
                self._soon.set()
            elif self.circuit.open_until_s is None:
                logger().info("engine_back", engine=self.name, base_url=self.spec.base_url)
            self._state_changed(self)

    # -- requests

    def head(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        credentials: Mapping[str, str],
        length: int | None,
    ) -> bytes:
        """Build the head of a request.

        Args:
            method: HTTP method.
            path: Path as in the OpenAI API, with `/v1`; it may have a query.
            headers: Headers of the client that are relevant to an engine.
            credentials: API keys of the client. The engine's own key takes precedence.
            length: Bytes of the body; None: no body.

        Raises:
            BadRequest: The path or a header has characters that a request cannot contain.
        """
        path, _, query = path.partition("?")
        line, rest = self._heads.get((method, path)) or self._fixed(method, path)
        if query:
            line = f"{line}?{_target(query)}"
        fields = [f"{name}: {_clean(value)}\r\n" for name, value in headers.items()]
        if credentials and self.spec.forward_credentials and self.spec.api_key is None:
            fields += [f"{n}: {_clean(v)}\r\n" for n, v in credentials.items() if not _ours(v)]
        if length is not None:
            fields.append(f"content-length: {length}\r\n")
        return f"{line}{rest}{''.join(fields)}\r\n".encode("latin-1")

    def _fixed(self, method: str, path: str) -> tuple[str, str]:
        """Build and cache the part of the head that all requests of a method and path share."""
        spec, fields = (
            self.spec,
            [f"host: {self._address.header}", "accept: */*", "accept-encoding: identity"],
        )
        fields.append("user-agent: clawstream")
        if spec.kind == "captured" or path == VERSION:
            fields.append(f"{engine_frames.ASK}: 1")
        if spec.api_key is not None:
            foreign = spec.kind == "text" and path.startswith("/v1/messages")
            name = spec.api_key_header or ("x-api-key" if foreign else "authorization")
            fields.append(f"{name}: {'Bearer ' if name == 'authorization' else ''}{spec.api_key}")
        target = self._address.prefix + (
            spec.api_root + path[3:] if path.startswith("/v1/") else path
        )
        if len(self._heads) >= MAX_HEADS:
            self._heads.clear()
        made = f"{method} {_target(target)}", " HTTP/1.1\r\n" + "".join(f"{f}\r\n" for f in fields)
        self._heads[method, path] = made
        return made

    # -- probes

    def watch(self) -> None:
        """Start to probe the engine, if it is `probed`."""
        if self.probed:
            self._watching = asyncio.create_task(self._watch())
            self._watching.add_done_callback(self._watched)
        else:
            self.first_probe.set()
        if self.kind_known:
            self._announce()

    def _announce(self) -> None:
        """Log advice if the engine returns no token ids, or not over every protocol."""
        if (do := TOKENLESS.get(self.spec.kind)) is not None:
            logger().warning(
                "engine_tells_no_tokens", engine=self.name, base_url=self.spec.base_url, do=do
            )

    def _watched(self, task: asyncio.Task[None]) -> None:
        """Restart the probing task after a bug ended it, so that the engine stays probed."""
        if task.cancelled() or self._drained:
            return
        logger().error(
            "probe_broke",
            engine=self.name,
            base_url=self.spec.base_url,
            error=repr(task.exception()),
        )
        self.first_probe.set()
        self._watching = asyncio.create_task(self._watch(self._interval_s))
        self._watching.add_done_callback(self._watched)

    async def drain(self) -> None:
        """Stop probing; close each connection when its call ends."""
        self._drained = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.pool.drain()

    async def close(self) -> None:
        """Stop probing and close all connections."""
        await self.drain()
        self.pool.close()

    async def _watch(self, after_s: float = 0.0) -> None:
        await asyncio.sleep(after_s)
        while True:
            await self._probe()
            self.first_probe.set()
            found = self.spec.kind == "text" and not self._mute
            pause = max(REPROBE_TEXT_S, self._interval_s) if found else self._interval_s
            if self.circuit.open_until_s is not None or not self.kind_known:
                pause = min(REPROBE_OPEN_S, self._interval_s)
            self._soon.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._soon.wait()
                    await asyncio.sleep(min(REPROBE_OPEN_S, self._interval_s))
            except TimeoutError:
                continue

    async def _probe(self) -> None:
        try:
            if not self.listed.kind_known:
                kind = await self._kind()
                if kind is None:
                    self.failed("probe")
                    return
                self._found(kind)
            if self.spec.kind != "text" and (await self._get("/health"))[0] >= 500:
                self.failed("probe")
                return
        except Unreachable:
            self.failed("probe", surely=True)
            return
        except (ConnectionError, TimeoutError):
            self.failed("probe")
            return
        self.answered("probe")

    async def _kind(self) -> EngineKind | None:
        """Query the kind of the engine; None: unknown.

        An engine that answers or hangs MUTE times without showing its kind counts as a provider
        until it shows another kind. A 502 or 503 is not an answer: the engine is not up yet.

        Raises:
            Unreachable: No connection was possible.
            ConnectionError: The connection broke.
        """
        try:
            status, told, body = await self._get(VERSION)
        except TimeoutError:
            kind, up = None, True
        else:
            kind, up = kind_of(status, told, body), status not in NOT_UP
        if kind is not None:
            self._mute = 0
        if kind is not None or not up:
            return kind
        self._mute += 1
        known = self.spec.worker_id is not None or (self.kind_known and self.spec.kind != "text")
        return "text" if self._mute >= MUTE and not known else None

    def _found(self, kind: EngineKind) -> None:
        if self.kind_known and kind == self.spec.kind:
            return
        logger().info("engine_found", engine=self.name, base_url=self.spec.base_url, kind=kind)
        self.spec = replace(self.spec, kind=kind)
        self._announce()
        self._heads.clear()
        self.kind_known = True
        self._state_changed(self)

    async def _get(self, path: str) -> tuple[int, bool, bytes]:
        """Send a GET request.

        Returns:
            Status, whether the reply has the header of our engine middleware, body.

        Raises:
            Unreachable: No connection was possible.
            ConnectionError: The connection broke.
            TimeoutError: The engine did not answer in time.
        """
        connection = await self.connection()
        try:
            patience_s = PATIENCE * self._interval_s
            connection.send(self.head("GET", path, {}, {}, None), None, patience_s, patience_s)
            body = await connection.read()
            return connection.status, engine_frames.ASK.encode() in connection.headers, body
        finally:
            connection.release()

    async def connection(self) -> Connection:
        """Return an idle connection, or a new one. Raises Unreachable."""
        try:
            return self.pool.take() or await self.pool.connect()
        except (OSError, TimeoutError, ValueError) as error:
            # ValueError: a host name that cannot be resolved.
            reason = "no answer" if isinstance(error, TimeoutError) else error
            raise Unreachable(
                f"the engine at {self.spec.base_url} cannot be reached: {reason}"
            ) from error


def _target(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text:
        raise BadRequest("path: characters that an engine's path cannot have", "path")
    return text


def _clean(text: str) -> str:
    if "\r" in text or "\n" in text or "\0" in text:
        raise BadRequest("headers: a line break or a null within a value")
    return text


def _ours(credential: str) -> bool:
    """Return whether a header value contains a key of this gateway, with or without a scheme."""
    return any(word.startswith(KEY_PREFIXES) for word in credential.split())
