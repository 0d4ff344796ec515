"""All engines as this gateway sees them: who may be called now, who serves which trajectory, and waiting for one.

An engine gets a lane when it becomes ready and loses it when it no longer is: then it gets no new calls, those in flight end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from gateway.clock import Clock
from gateway.engines.engine import Lane
from gateway.engines.registry import Ranking, Worker, WorkerTable, choose, suited
from gateway.errors import NoWorker
from gateway.metrics import Metrics
from schemas.settings import GatewaySettings

FIRST_PROBES_S = 1.0
"""So long the start waits for the first word of the engines in the settings."""
ROUTES = 1024
"""Model names are the clients': so many are remembered."""


class Lanes:
    """All engines. now_s: the clock of the worker table."""

    def __init__(
        self,
        settings: GatewaySettings,
        table: WorkerTable,
        now_s: Callable[[], float],
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self._settings, self._table, self._now_s = settings, table, now_s
        self._clock, self._metrics = clock, metrics
        self._workers: tuple[Worker, ...] = ()
        self._lanes: dict[str, Lane] = {}
        self._impaired: set[Lane] = set()
        self._routes: dict[tuple[str, str | None], Ranking[Lane]] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._shown: dict[str, str] = {}
        self._open = False
        table.listen(self._table_changed)

    async def open(self) -> None:
        """Before the first call; on the event loop that serves."""
        self._open = True
        self._refresh()
        firsts = [asyncio.ensure_future(lane.first_probe.wait()) for lane in self._lanes.values()]
        if firsts:
            _, late = await asyncio.wait(firsts, timeout=FIRST_PROBES_S)
            for first in late:
                first.cancel()

    async def close(self) -> None:
        """Close all connections."""
        self._open = False
        lanes, self._lanes, self._workers = list(self._lanes.values()), {}, ()
        await asyncio.gather(*self._ending, *(lane.close() for lane in lanes))

    @property
    def ready(self) -> list[Worker]:
        """Engines that can be called now."""
        self._refresh()
        now = self._clock.monotonic()
        return [lane.worker for lane in self._lanes.values() if lane.admits(now)]

    # -- which engine

    def pick(self, key: str, who: tuple[str, str | None], avoid: tuple[Lane, ...]) -> Lane | None:
        """The engine for a trajectory; None: none can be called now."""
        self._refresh()
        ranking = self._routes.get(who)
        if ranking is None:
            ranking = self._route(who)
        order = ranking.order(key)
        if self._impaired or avoid:
            now = self._clock.monotonic()
            order = [
                lane for lane in order if lane not in avoid and (lane.plain or lane.admits(now))
            ]
            order = [lane for lane in order if lane.rested(now)] or order
        return choose(order)

    def _route(self, who: tuple[str, str | None]) -> Ranking[Lane]:
        """The engines for a run and model."""
        if len(self._routes) >= ROUTES:
            self._routes.clear()
        lanes = tuple(self._lanes[w.name] for w in suited(self._workers, *who))
        same = next((r for r in self._routes.values() if r.engines == lanes), None)
        ranking = self._routes[who] = same or Ranking(lanes)
        return ranking

    async def wait(self, deadline: float) -> None:
        """Until something about the engines changes, or the deadline."""
        now = self._clock.monotonic()
        trials = [lane.circuit.open_until_s for lane in self._lanes.values() if not lane.probed]
        until = min([deadline, *(t for t in trials if t is not None and t > now)])
        woken = asyncio.get_running_loop().create_future()
        self._waiting.add(woken)
        self._metrics.waiting.inc()
        try:
            await asyncio.wait((woken,), timeout=until - now)
        finally:
            self._waiting.discard(woken)
            self._metrics.waiting.dec()

    def nobody(self) -> NoWorker:
        """The error when no engine was ready in time."""
        counts = Counter(self.states().values())
        known = ", ".join(f"{n} {state}" for state, n in sorted(counts.items())) or "none is known"
        return NoWorker(
            f"no engine was ready within {self._settings.worker_wait_s:g} s ({known}): nothing was sampled, try again"
        )

    # -- the engines there are

    def states(self) -> dict[str, str]:
        """Every engine's state: as it says itself, or when it says `ready`, as its calls and probes say."""
        return self._table.states(self._now_s()) | {
            lane.name: lane.state for lane in self._lanes.values()
        }

    def _refresh(self) -> None:
        workers = self._table.ready(self._now_s())
        if workers is self._workers or not self._open:
            return
        self._workers = workers
        listed = {worker.name: worker for worker in workers}
        for name, lane in list(self._lanes.items()):
            if listed.get(name) != lane.listed:
                del self._lanes[name]
                self._end(lane)
        for name, worker in listed.items():
            if name not in self._lanes:
                settings = self._settings
                lane = self._lanes[name] = Lane(
                    worker,
                    self._clock.monotonic,
                    settings.probe_interval_s,
                    self._judged,
                    settings.max_reply_bytes,
                )
                lane.watch()
        self._routes.clear()
        self._impaired = {lane for lane in self._lanes.values() if not lane.plain}
        self._changed()

    def _end(self, lane: Lane) -> None:
        """It gets no new calls; those in flight end."""
        task = asyncio.create_task(lane.drain())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _table_changed(self) -> None:
        if self._open:
            self._refresh()
            self._changed()

    def _judged(self, lane: Lane) -> None:
        if self._lanes.get(lane.name) is not lane:
            return
        if lane.plain:
            self._impaired.discard(lane)
        else:
            self._impaired.add(lane)
        self._changed()

    def _changed(self) -> None:
        """Wake whoever waits for an engine; show what there is."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        states = self.states()
        for name, state in self._shown.items():
            if states.get(name) != state:
                self._metrics.engines.remove(name, state)
                if state not in ("out", "trying") and states.get(name) == "out":
                    self._metrics.engine_outages.labels(name).inc()
        for name, state in states.items():
            self._metrics.engines.labels(name, state).set(1)
        self._shown = states
