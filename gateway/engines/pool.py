"""The engines of this gateway: which ones accept calls, which one serves a trajectory, and waiting.

The pool creates an Engine when the registry reports it ready. When the registry no longer does, the
engine gets no new calls; calls in flight finish.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from clawstream.gateway.clock import Clock
from clawstream.gateway.engines.engine import Engine
from clawstream.gateway.engines.registry import (
    EngineRegistry,
    EngineSpec,
    choose,
    eligible,
)
from clawstream.gateway.errors import NoEngine
from clawstream.gateway.metrics import Metrics
from clawstream.schemas.settings import GatewaySettings

FIRST_PROBES_S = 1.0
"""Longest time that the start waits for the first probes of the engines in the settings."""


class EnginePool:
    """All engines. now_s: The clock of the engine registry, seconds."""

    def __init__(
        self,
        settings: GatewaySettings,
        registry: EngineRegistry,
        now_s: Callable[[], float],
        clock: Clock | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings, self._registry, self._now_s = settings, registry, now_s
        self._clock, self._metrics = clock or Clock(), metrics or Metrics()
        self.now_s, self.retries = self._clock.monotonic, self._metrics.upstream_retries
        self._specs: tuple[EngineSpec, ...] = ()
        self._engines: dict[str, Engine] = {}
        self._impaired: set[Engine] = set()
        self._waiting: set[asyncio.Future[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._shown: dict[str, str] = {}
        self._open = False
        registry.subscribe(self._table_changed)

    async def open(self) -> None:
        """Start probing. Call it on the serving event loop, before the first call."""
        self._open = True
        self._refresh()
        firsts = [
            asyncio.ensure_future(engine.prober.first_probe.wait())
            for engine in self._engines.values()
        ]
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=FIRST_PROBES_S)
            for first in late:
                first.cancel()

    async def close(self) -> None:
        """Close all connections."""
        self._open = False
        engines, self._engines, self._specs = list(self._engines.values()), {}, ()
        await asyncio.gather(*self._ending, *(engine.close() for engine in engines))

    @property
    def ready(self) -> list[EngineSpec]:
        """The engines that accept calls now."""
        self._refresh()
        now = self._clock.monotonic()
        return [engine.spec for engine in self._engines.values() if engine.admits(now)]

    def named(self, name: str) -> Engine | None:
        """Return the engine of a name; None: it has left."""
        return self._engines.get(name)

    # -- choice of an engine

    def pick(
        self, key: str, route: tuple[str, str | None], exclude: tuple[Engine, ...]
    ) -> Engine | None:
        """Choose the engine for a call; None: no engine accepts calls now.

        The rules are `eligible` and `choose` in `clawstream.gateway.engines.registry`.

        Args:
            key: Trajectory key. Calls of a key prefer the same engine.
            route: Run id and model of the call.
            exclude: Engines to leave out.
        """
        self._refresh()
        engines = [self._engines[spec.name] for spec in eligible(self._specs, *route)]
        if self._impaired or exclude:
            now = self._clock.monotonic()
            engines = [
                engine
                for engine in engines
                if engine not in exclude and (engine.healthy or engine.admits(now))
            ]
            engines = [engine for engine in engines if engine.cooled_down(now)] or engines
        return choose(engines, key)

    async def wait(self, deadline: float) -> None:
        """Wait until an engine changes, or until the deadline on the clock of the gateway."""
        now = self._clock.monotonic()
        trials = [
            engine.circuit.open_until_s for engine in self._engines.values() if not engine.probed
        ]
        until = min([deadline, *(t for t in trials if t is not None and t > now)])
        woken = asyncio.get_running_loop().create_future()
        self._waiting.add(woken)
        self._metrics.waiting.inc()
        try:
            await asyncio.wait((woken,), timeout=until - now)
        finally:
            self._waiting.discard(woken)
            self._metrics.waiting.dec()

    def no_engine_error(self) -> NoEngine:
        """Build the error for a call that got no engine in time."""
        counts = Counter(self.states().values())
        known = ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) or "none is known"
        return NoEngine(
            f"no engine was ready within {self.settings.worker_wait_s:g} s ({known}): "
            "nothing was sampled, try again"
        )

    # -- set of engines

    def states(self) -> dict[str, str]:
        """Return the state of every engine by name.

        The state that the engine reports; if that is `ready`, the state by its calls and probes.
        """
        return self._registry.states(self._now_s()) | {
            engine.name: engine.state for engine in self._engines.values()
        }

    def _refresh(self) -> None:
        specs = self._registry.ready(self._now_s())
        if specs is self._specs or not self._open:
            return
        self._specs = specs
        listed = {spec.name: spec for spec in specs}
        for name, engine in list(self._engines.items()):
            if listed.get(name) != engine.listed:
                del self._engines[name]
                self._end(engine)
        for name, spec in listed.items():
            if name not in self._engines:
                settings = self.settings
                engine = self._engines[name] = Engine(
                    spec,
                    self._clock.monotonic,
                    settings.probe_interval_s,
                    self._state_changed,
                    settings.max_reply_bytes,
                )
                engine.watch()
        self._impaired = {engine for engine in self._engines.values() if not engine.healthy}
        self._changed()

    def _end(self, engine: Engine) -> None:
        """Drain an engine: it gets no new calls, and its calls in flight finish."""
        task = asyncio.create_task(engine.drain())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _table_changed(self) -> None:
        if self._open:
            self._refresh()
            self._changed()

    def _state_changed(self, engine: Engine) -> None:
        if self._engines.get(engine.name) is not engine:
            return
        if engine.healthy:
            self._impaired.discard(engine)
        else:
            self._impaired.add(engine)
        self._changed()

    def _changed(self) -> None:
        """Wake the calls that wait for an engine; update the metrics."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        states = self.states()
        for name, state in self._shown.items():
            if states.get(name) != state:
                self._metrics.engines.remove(name, state)
                if state not in ("open", "half_open") and states.get(name) == "open":
                    self._metrics.engine_outages.labels(name).inc()
        for name, state in states.items():
            self._metrics.engines.labels(name, state).set(1)
        self._shown = states
        self._metrics.failed_loads.clear()
        for name, number in self._registry.failed_loads().items():
            self._metrics.failed_loads.labels(name).set(number)
