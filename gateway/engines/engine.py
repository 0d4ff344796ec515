"""One engine as this gateway sees it: its connections, its calls in flight, whether it may be asked; and the task that probes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.attribution.sessions import OURS
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
"""An engine that takes so many probe intervals to say that it is well is not."""
REPROBE_OPEN_S = 0.5
REPROBE_TEXT_S = 60.0
"""What was found to be no vLLM is seldom asked again: a provider's own server should not be bothered."""
REST_S = 30.0
"""Longest time for which an engine that said `retry-after` is passed over."""
MUTE = 5
"""So many probes without a word of its kind make an engine of the settings a provider."""
NOT_UP = (502, 503)
MAX_HEADS = 256
TOKENLESS: Mapping[EngineKind, str] = {
    "text": "its steps have text only and are never trained. To train, name a vLLM that `clawstream rollout` starts, or a vLLM of yours",
    "vllm": "over Responses and Messages its steps are never trained. Use chat or completions, or let `clawstream rollout` start it",
}
"""What to do about an engine that tells no tokens, or not over each protocol."""
VERSION = "/version"


class Engine:
    """An engine. on_state_change: called when it became callable, or ceased to be. spec: with the kind that was found. max_reply: see `Pool`."""

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

    # -- whether it may be asked

    @property
    def healthy(self) -> bool:
        """Nothing speaks against it."""
        return (
            self.kind_known
            and self.circuit.open_until_s is None
            and self.cooldown_until_s == float("-inf")
        )

    @property
    def probed(self) -> bool:
        """A probe says when it is well again; else a call has to try."""
        return self.listed.kind != "text" or not self.listed.kind_known

    @property
    def state(self) -> str:
        """For people: unknown (not probed yet), open, half_open, cooldown or ready."""
        if not self.kind_known:
            return "unknown"
        if self.circuit.open_until_s is not None:
            return "half_open" if self.circuit.half_open else "open"
        return "cooldown" if self.cooldown_until_s > self._clock() else "ready"

    def admits(self, now_s: float) -> bool:
        """Whether a call may go there now."""
        return self.kind_known and admits(self.circuit, now_s, self.probed)

    def start_cooldown(self, retry_after: str | None) -> None:
        """It said that it has enough: others are preferred for a while."""
        seconds = float(retry_after) if retry_after is not None and retry_after.isdecimal() else 1.0
        self.cooldown_until_s = self._clock() + min(seconds, REST_S)
        self._state_changed(self)

    def cooled_down(self, now_s: float) -> bool:
        """Whether it does not rest."""
        if self.cooldown_until_s <= now_s and self.cooldown_until_s != float("-inf"):
            self.cooldown_until_s = float("-inf")
            self._state_changed(self)
        return self.cooldown_until_s <= now_s

    # -- what its calls and probes tell

    def begin(self) -> By:
        """A call goes there."""
        self.in_flight += 1
        if self.circuit.open_until_s is None:
            return "call"
        self._take(HalfOpenStarted())
        return "half_open"

    def answered(self, by: By) -> None:
        """It began to answer."""
        if self.circuit is not CLOSED:
            self._take(Answered(by, self._clock()))

    def failed(self, by: By, surely: bool = False) -> None:
        """It did not answer."""
        self._take(Failed(by, self._clock(), surely))

    def left(self, by: By) -> None:
        """The client left before it could answer."""
        if by == "half_open":
            self._take(HalfOpenCancelled())

    def _take(self, event: Event) -> None:
        before, self.circuit = self.circuit, fold(self.circuit, event)
        if self.circuit == CLOSED:
            self.circuit = CLOSED  # the very same, so that the hot path sees it at a glance
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
        """A request's head. path: as of OpenAI, with `/v1`; it may have a query. headers, credentials: the client's, as far as they
        mean something to an engine; the engine's own key goes before.
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
        """What is the same for all requests of a method and path."""
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
        """Begin to probe it, if it is one that is probed."""
        if self.probed:
            self._watching = asyncio.create_task(self._watch())
            self._watching.add_done_callback(self._watched)
        else:
            self.first_probe.set()
        if self.kind_known:
            self._announce()

    def _announce(self) -> None:
        """Who tells no tokens is named, with what to do: nothing of it can be trained."""
        if (do := TOKENLESS.get(self.spec.kind)) is not None:
            logger().warning(
                "engine_tells_no_tokens", engine=self.name, base_url=self.spec.base_url, do=do
            )

    def _watched(self, task: asyncio.Task[None]) -> None:
        """It ends when it is cancelled, else by a bug: an engine must not go unprobed for it."""
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
        """No more probes; connections are closed as their calls end."""
        self._drained = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.pool.drain()

    async def close(self) -> None:
        """No more probes, no connections."""
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
        """What it says to be; None: nothing. What answers or hangs MUTE times without a word of it is a provider, until it
        says otherwise. A 502 or 503 is no answer: nothing is up there yet. Raises as `_get` does.
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
        """Status, whether it carries our middleware's header, body. Raises Unreachable, ConnectionError or TimeoutError."""
        connection = await self.connection()
        try:
            patience_s = PATIENCE * self._interval_s
            connection.send(self.head("GET", path, {}, {}, None), None, patience_s, patience_s)
            body = await connection.read()
            return connection.status, engine_frames.ASK.encode() in connection.headers, body
        finally:
            connection.release()

    async def connection(self) -> Connection:
        """An idle connection, or a new one. Raises Unreachable."""
        try:
            return self.pool.take() or await self.pool.connect()
        except (
            OSError,
            TimeoutError,
            ValueError,
        ) as error:  # ValueError: a name that cannot be looked up
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
    """Whether a header holds a key of this gateway, however it is put."""
    return any(word.startswith(OURS) for word in credential.split())
