"""Which engines there are, from `claw.workers`: a fold over worker statuses, and who of them serves a call. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from schemas.events import WorkerStatus

MISSED_HEARTBEATS = 3


@dataclass(frozen=True, slots=True)
class Worker:
    """An engine that can be called. name: unique; worker_id None: it does not report, a setting names it. models (): not known."""

    name: str
    base_url: str
    worker_id: str | None = None
    models: tuple[str, ...] = ()
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class _Heard:
    worker: Worker
    until_s: float  # absent from then on


def _without_v1(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


class WorkerTable:
    """The last word of every worker that is ready. Times are seconds of one clock that stands still while the topic cannot be read:
    an outage of Kafka silences the heartbeats, not the engines.
    """

    def __init__(self, upstreams: Iterable[str] = ()) -> None:
        self._static = tuple(Worker(url, _without_v1(url)) for url in upstreams)
        self._heard: dict[str, _Heard] = {}

    def hear(self, worker_id: str, status: WorkerStatus | None, now_s: float) -> None:
        """Fold one record; None is a tombstone, the worker's clean exit."""
        if status is None or status.state != "ready":
            self._heard.pop(worker_id, None)
            return
        worker = Worker(worker_id, _without_v1(status.base_url), worker_id, status.models, status.run_id)
        self._heard[worker_id] = _Heard(worker, now_s + MISSED_HEARTBEATS * status.heartbeat_interval_ms / 1000)

    def forget(self) -> None:
        """The topic was made anew: nothing of the old one holds."""
        self._heard.clear()

    def ready(self, now_s: float) -> list[Worker]:
        """Workers that said they are ready, not longer ago than three of their heartbeats; and the static ones."""
        return [*self._static, *(h.worker for h in self._heard.values() if now_s <= h.until_s)]


def suited(workers: Collection[Worker], run_id: str, model: str | None) -> list[Worker]:
    """Those that follow the run and serve the model, as far as there are any: else the engine itself says what is wrong."""
    chosen = list(workers)
    for wish in (
        lambda w: w.run_id is None or w.run_id == run_id,
        lambda w: not w.models or model is None or model in w.models,
    ):
        chosen = [w for w in chosen if wish(w)] or chosen
    return chosen


def choose(workers: Collection[Worker], key: str, in_flight: Mapping[str, int]) -> Worker | None:
    """The worker of a trajectory, by rendezvous hash: its prefix is in that one's cache. The least loaded one when the
    affine one has more than twice as many calls in flight.
    """
    if len(workers) < 2:
        return next(iter(workers), None)
    affine = max(workers, key=lambda w: hashlib.blake2b(f"{w.name}\0{key}".encode(), digest_size=8).digest())
    least = min(workers, key=lambda w: in_flight.get(w.name, 0))
    crowded = in_flight.get(affine.name, 0) > 2 * max(1, in_flight.get(least.name, 0))
    return least if crowded else affine
