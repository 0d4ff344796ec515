"""One engine of this gateway: its connections, calls in flight, circuit and cooldown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from clawstream.gateway.engines.circuit_breaker import (
    CLOSED,
    Answered,
    By,
    Event,
    Failed,
    HalfOpenCancelled,
    HalfOpenStarted,
    admits,
    fold,
)
from clawstream.gateway.engines.http1 import MAX_REPLY, Connection, Pool, address_of
from clawstream.gateway.engines.prober import Prober
from clawstream.gateway.engines.registry import EngineSpec
from clawstream.gateway.engines.request_heads import RequestHeads
from clawstream.gateway.errors import Overloaded, Unreachable
from clawstream.gateway.protocols.base import EngineKind
from clawstream.runtime.logs import logger
from clawstream.runtime.process.open_files import exhausted

MAX_COOLDOWN_S = 30.0
"""Longest cooldown of an engine that sent `retry-after`."""
NO_COOLDOWN = float("-inf")
TOKENLESS: Mapping[EngineKind, str] = {
    "text": "its steps have text only and are never trained. To train, name a vLLM that "
    "`clawstream rollout` starts, or a vLLM of yours",
    "vllm": "over Responses and Messages its steps are never trained. Use chat or completions, "
    "or let `clawstream rollout` start it",
}
"""Advice for an engine that returns no token ids, or not over every protocol."""


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
        self.spec = self.listed = spec
        self.name = spec.name
        self.in_flight = 0
        self.circuit = CLOSED
        self.kind_known = spec.kind_known
        self.cooldown_until_s = NO_COOLDOWN
        self._clock, self._state_changed = clock, on_state_change
        self._address = address_of(spec.base_url)
        self.pool = Pool(self._address, max_reply)
        self.heads = RequestHeads(spec, self._address)
        self.prober = Prober(self, probe_interval_s)

    async def drain(self) -> None:
        """Stop probing; close each connection when its call ends."""
        await self.prober.stop()
        self.pool.drain()

    async def close(self) -> None:
        """Stop probing and close all connections."""
        await self.drain()
        self.pool.close()

    # -- kind

    def watch(self) -> None:
        """Start to probe the engine, if it is `probed`."""
        if self.probed:
            self.prober.start()
        else:
            self.prober.first_probe.set()
        if self.kind_known:
            self._announce()

    def found(self, kind: EngineKind) -> None:
        """Set the kind that a probe found."""
        if self.kind_known and kind == self.spec.kind:
            return
        logger().info("engine_found", engine=self.name, base_url=self.spec.base_url, kind=kind)
        self.spec = replace(self.spec, kind=kind)
        self.heads = RequestHeads(self.spec, self._address)
        self._announce()
        self.kind_known = True
        self._state_changed(self)

    def _announce(self) -> None:
        """Log advice if the engine returns no token ids, or not over every protocol."""
        if (do := TOKENLESS.get(self.spec.kind)) is not None:
            logger().warning(
                "engine_tells_no_tokens", engine=self.name, base_url=self.spec.base_url, do=do
            )

    # -- availability

    @property
    def healthy(self) -> bool:
        """Whether its kind is known, its circuit is closed and it is not in a cooldown."""
        return (
            self.kind_known
            and self.circuit.open_until_s is None
            and self.cooldown_until_s == NO_COOLDOWN
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
        self.cooldown_until_s = self._clock() + min(seconds, MAX_COOLDOWN_S)
        self._state_changed(self)

    def cooled_down(self, now_s: float) -> bool:
        """Return whether it is not in a cooldown; end a cooldown that is over."""
        if self.cooldown_until_s <= now_s and self.cooldown_until_s != NO_COOLDOWN:
            self.cooldown_until_s = NO_COOLDOWN
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
                self.prober.wake()
            elif self.circuit.open_until_s is None:
                logger().info("engine_back", engine=self.name, base_url=self.spec.base_url)
            self._state_changed(self)

    async def connection(self) -> Connection:
        """Return an idle connection, or a new one.

        Raises:
            Unreachable: The engine cannot be reached.
            Overloaded: This process cannot open a connection, whatever the engine does.
        """
        try:
            return self.pool.take() or await self.pool.connect()
        except (OSError, TimeoutError, ValueError) as error:
            if (remedy := exhausted(error)) is not None:
                raise Overloaded(f"{remedy}, or lower gateway.max_in_flight") from error
            # ValueError: a host name that cannot be resolved.
            reason = "no answer" if isinstance(error, TimeoutError) else error
            raise Unreachable(
                f"the engine at {self.spec.base_url} cannot be reached: {reason}"
            ) from error
