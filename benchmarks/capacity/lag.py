"""Lag of the stream jobs as fluid queues in discrete time: bursts, kills, broker failovers, a lake
that stands still. Pure, seeded.

What flows is steps. A partition is a queue in front of each job; a worker serves its partitions in
the ratio of what waits there, at so many steps a second; killed, it serves none of them until it
has recovered. While a partition has no leader nothing is appended to it or read from it, and what
gateways hold is appended when it has one again. A step is ready when assemble, then the reward job,
then the admission of its run have passed it. Waiting for the other steps of a trajectory and the
other members of a group is not in it: that is the agents' time. The lake reads beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
JOBS = ("assemble", "reward", "admit", "lake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What serves. rate: steps a second of one worker of each job. admit has one worker a run.

    skew: how unlike partitions are.

    floor_s, lake_floor_s: what a step takes when nothing waits: batching, round trips, a flush.
    """

    partitions: int
    runs: int
    workers: Mapping[str, int]
    rate: Mapping[str, float]
    skew: float
    floor_s: float
    lake_floor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """One worker of a job, or all (None), serves nothing for a while.

    Job "broker": that share of the partitions has no leader.
    """

    job: str
    at_s: float
    seconds: float
    worker: int | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Steps a second over time: `mean`, a day's wave of `wave` times it, times `factor` while a
    burst lasts; and what fails.

    kills_per_hour: of every worker of every job, by chance, each for kill_s.
    """

    name: str
    seconds: float
    mean: float
    wave: float = 0.0
    bursts: Sequence[tuple[float, float, float]] = ()
    """(from second, seconds, factor)"""
    outages: Sequence[Outage] = ()
    kills_per_hour: float = 0.0
    kill_s: float = 15.0

    def rate(self, at: Floats) -> Floats:
        """Steps a second at each time."""
        rate = self.mean * (1 - self.wave * np.cos(2 * np.pi * at / 86_400))
        for begin, length, factor in self.bursts:
            rate = np.where((at >= begin) & (at < begin + length), rate * factor, rate)
        return rate

    @property
    def calm_from_s(self) -> float:
        """When the last burst or outage is over."""
        ends = [begin + length for begin, length, _ in self.bursts] + [
            o.at_s + o.seconds for o in self.outages
        ]
        return max(ends, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """max_lag: steps appended or held and not yet through assemble.

    drain_s: from the end of the last burst or outage until what waits is less than two seconds of
    arrivals; None: not within the scenario. Delays: seconds, over steps. lake_*: of the lake.
    """

    steps: int
    max_lag: int
    drain_s: float | None
    delay_p50_s: float
    delay_p99_s: float
    delay_max_s: float
    lake_max_lag: int
    lake_drain_s: float | None
    lake_delay_p99_s: float


def simulate(fleet: Fleet, scenario: Scenario, seed: int, dt: float = 1.0) -> Lag:
    """The lag of a scenario. dt: seconds a tick; delays are exact to a tick."""
    rng = np.random.default_rng(seed)
    ticks = int(scenario.seconds / dt)
    at: Floats = np.arange(ticks, dtype=np.float64) * dt
    weight = np.maximum(rng.normal(1.0, fleet.skew, fleet.partitions), 0.1)
    weight /= weight.sum()
    offered = rng.poisson(scenario.rate(at)[:, None] * dt * weight[None, :]).astype(np.float64)
    led = _led(fleet, scenario, at)
    appended = _held_back(offered, led)

    def through(job: str, arrivals: Floats, may: Flags) -> Floats:
        up = _up(fleet, scenario, job, at, rng)
        return _served(arrivals, up, may, fleet.rate[job] * dt)

    assembled = through("assemble", appended, led)
    rewarded = through("reward", assembled, led)
    by_run = np.repeat(rewarded.sum(axis=1)[:, None] / fleet.runs, fleet.runs, axis=1)
    admitted = through("admit", by_run, np.ones_like(by_run, dtype=np.bool_))
    kept = through("lake", appended, led)

    judged = _passed(_due(offered), offered, rewarded)
    runs = range(fleet.runs)
    ready = np.stack([_passed(judged, by_run[:, [r]], admitted[:, [r]]) for r in runs])
    since = np.arange(ticks)[:, None]
    delay = (ready - since) * dt + fleet.floor_s
    lake_delay = (_passed(_due(offered), offered, kept) - since) * dt + fleet.lake_floor_s
    p50, p99, most = _quantiles(delay, np.stack([offered for _ in runs]), (0.5, 0.99, 1.0))
    waiting, in_lake = _waiting(offered, assembled), _waiting(offered, kept)
    arrivals: Floats = offered.sum(axis=1) / dt

    def drained(behind: Floats) -> float | None:
        return (
            None
            if scenario.kills_per_hour
            else _drained(behind, arrivals, scenario.calm_from_s, at)
        )

    return Lag(
        steps=int(offered.sum()),
        max_lag=int(waiting.max()),
        drain_s=drained(_waiting(offered, admitted)),
        delay_p50_s=p50,
        delay_p99_s=p99,
        delay_max_s=most,
        lake_max_lag=int(in_lake.max()),
        lake_drain_s=drained(in_lake),
        lake_delay_p99_s=_quantiles(lake_delay, offered, (0.99,))[0],
    )


def _led(fleet: Fleet, scenario: Scenario, at: Floats) -> Flags:
    """Whether a partition has a leader, by tick."""
    led = np.ones((len(at), fleet.partitions), dtype=np.bool_)
    for outage in (o for o in scenario.outages if o.job == "broker"):
        count = round(outage.share * fleet.partitions)
        led[(at >= outage.at_s) & (at < outage.at_s + outage.seconds), :count] = False
    return led


def _up(fleet: Fleet, scenario: Scenario, job: str, at: Floats, rng: np.random.Generator) -> Flags:
    """Whether each worker of a job serves, by tick."""
    workers = fleet.runs if job == "admit" else fleet.workers[job]
    up = np.ones((len(at), workers), dtype=np.bool_)
    outages = [o for o in scenario.outages if o.job == job]
    for worker in range(workers):
        kills = rng.poisson(scenario.kills_per_hour * scenario.seconds / 3600)
        times = rng.uniform(0, scenario.seconds, kills)
        outages += [Outage(job=job, at_s=t, seconds=scenario.kill_s, worker=worker) for t in times]
    for o in outages:
        off = (at >= o.at_s) & (at < o.at_s + o.seconds)
        up[off, slice(None) if o.worker is None else o.worker] = False
    return up


def _held_back(offered: Floats, led: Flags) -> Floats:
    """What is appended: all that is offered, or held, while there is a leader."""
    held = np.zeros(offered.shape[1])
    out = np.zeros_like(offered)
    for tick in range(len(offered)):
        held += offered[tick]
        out[tick] = np.where(led[tick], held, 0.0)
        held -= out[tick]
    return out


def _served(arrivals: Floats, up: Flags, may: Flags, most: float) -> Floats:
    """What leaves each queue in each tick.

    most: what one worker serves in a tick. Queue q is worker q modulo workers'.
    """
    workers = up.shape[1]
    owner = np.arange(arrivals.shape[1]) % workers
    queue = np.zeros(arrivals.shape[1])
    out = np.zeros_like(arrivals)
    for tick in range(len(arrivals)):
        queue += arrivals[tick]
        open_ = np.where(may[tick] & up[tick][owner], queue, 0.0)
        load = np.bincount(owner, open_, minlength=workers)
        share = np.minimum(1.0, most / np.maximum(load, 1e-9))
        out[tick] = open_ * share[owner]
        queue -= out[tick]
    return out


def _due(offered: Floats) -> NDArray[np.int64]:
    """The tick in which each tick's steps were offered."""
    return np.repeat(np.arange(len(offered))[:, None], offered.shape[1], axis=1)


def _passed(due: NDArray[np.int64], arrivals: Floats, departures: Floats) -> NDArray[np.int64]:
    """The tick in which the last of what had arrived by `due` has left, first in first out.

    The ticks' number: not within them.
    """
    came, left = np.cumsum(arrivals, axis=0), np.cumsum(departures, axis=0)
    ticks = len(came)
    out = np.empty_like(due)
    for q in range(due.shape[1]):
        source = q if came.shape[1] > 1 else 0
        volume = came[np.minimum(due[:, q], ticks - 1), source]
        out[:, q] = np.searchsorted(
            left[:, source], volume - 1e-6 * np.maximum(volume, 1.0), side="left"
        )
        out[:, q] = np.maximum(out[:, q], due[:, q])
    return out


def _waiting(offered: Floats, departures: Floats) -> Floats:
    """Steps that have come and not left, after each tick."""
    waiting: Floats = np.cumsum(offered.sum(axis=1)) - np.cumsum(departures.sum(axis=1))
    return waiting


def _drained(waiting: Floats, arrivals: Floats, calm_s: float, at: Floats) -> float | None:
    """Seconds from calm until less than two seconds of arrivals wait."""
    behind = (waiting >= 2 * np.maximum(arrivals, 1.0)) & (at >= calm_s)
    if not behind.any():
        return 0.0
    last = int(np.flatnonzero(behind)[-1]) + 1
    return float(at[last] - calm_s) if last < len(at) else None


def _quantiles(delay: Floats, weight: Floats, which: Sequence[float]) -> list[float]:
    """Of the delays, each counted as often as there were steps."""
    order = np.argsort(delay, axis=None)
    total = np.cumsum(weight.ravel()[order])
    places = np.searchsorted(total, np.array(which) * total[-1])
    return [float(delay.ravel()[order[min(i, len(order) - 1)]]) for i in places]
