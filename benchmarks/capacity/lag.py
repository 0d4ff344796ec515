"""Simulate the lag of the stream jobs as fluid queues in discrete time. Pure, seeded.

It covers bursts, kills, broker failovers and an outage of the lake. The fluid is steps. A partition
is a queue in front of each job. A worker divides its rate between its partitions in proportion to
their queues; a killed worker serves none until it has recovered. While a partition has no leader,
nothing is appended to it or read from it; gateways hold its steps and append them afterwards. A
step is ready when assemble, then the reward job, then the admission of its run have processed it.
The wait for other steps of a trajectory and other members of a group depends on the agents and is
not included. The lake reads in parallel.
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
    """The workers. admit has one worker a run.

    rate: Steps a second of one worker of each job. skew: Standard deviation of a partition's share.
    floor_s, lake_floor_s: Delay of a step without a queue: batching, round trips, a flush.
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
    """An interval in which one worker of a job, or all (None), serves nothing.

    Job "broker": `share` of the partitions has no leader.
    """

    job: str
    at_s: float
    seconds: float
    worker: int | None = None
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Steps a second over time, and failures.

    The rate is `mean` with a daily wave of relative amplitude `wave`, times `factor` in a burst.
    kills_per_hour: Random kills of every worker of every job, each for kill_s.
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
        """Return the steps a second at each time."""
        rate = self.mean * (1 - self.wave * np.cos(2 * np.pi * at / 86_400))
        for begin, length, factor in self.bursts:
            rate = np.where((at >= begin) & (at < begin + length), rate * factor, rate)
        return rate

    @property
    def calm_from_s(self) -> float:
        """The end of the last burst or outage."""
        bursts = [begin + length for begin, length, _ in self.bursts]
        return max([*bursts, *(o.at_s + o.seconds for o in self.outages)], default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The lag of a scenario. Delays are seconds, over steps. lake_*: Of the lake.

    max_lag: Steps appended or held and not yet processed by assemble. drain_s: From the end of the
    last burst or outage until the queue is shorter than two seconds of arrivals; None: not within
    the scenario.
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
    """Simulate a scenario. dt: Seconds a tick; delays are exact to a tick."""
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
        if scenario.kills_per_hour:
            return None
        return _drained(behind, arrivals, scenario.calm_from_s, at)

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
    """Return by tick whether each partition has a leader."""
    led = np.ones((len(at), fleet.partitions), dtype=np.bool_)
    for outage in (o for o in scenario.outages if o.job == "broker"):
        count = round(outage.share * fleet.partitions)
        led[(at >= outage.at_s) & (at < outage.at_s + outage.seconds), :count] = False
    return led


def _up(fleet: Fleet, scenario: Scenario, job: str, at: Floats, rng: np.random.Generator) -> Flags:
    """Return by tick whether each worker of a job serves."""
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
    """Return the appended steps: those offered or held while there is a leader."""
    held = np.zeros(offered.shape[1])
    out = np.zeros_like(offered)
    for tick in range(len(offered)):
        held += offered[tick]
        out[tick] = np.where(led[tick], held, 0.0)
        held -= out[tick]
    return out


def _served(arrivals: Floats, up: Flags, may: Flags, most: float) -> Floats:
    """Return the steps that leave each queue in each tick.

    most: Steps of one worker in a tick. Queue q belongs to worker q modulo the number of workers.
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
    """Return the tick in which each tick's steps were offered."""
    return np.repeat(np.arange(len(offered))[:, None], offered.shape[1], axis=1)


def _passed(due: NDArray[np.int64], arrivals: Floats, departures: Floats) -> NDArray[np.int64]:
    """Return the tick in which the last step that arrived by `due` leaves, first in first out.

    The number of ticks means that it does not leave within them.
    """
    came, left = np.cumsum(arrivals, axis=0), np.cumsum(departures, axis=0)
    ticks = len(came)
    out = np.empty_like(due)
    for q in range(due.shape[1]):
        source = q if came.shape[1] > 1 else 0
        volume = came[np.minimum(due[:, q], ticks - 1), source]
        nearly = volume - 1e-6 * np.maximum(volume, 1.0)
        out[:, q] = np.maximum(np.searchsorted(left[:, source], nearly, side="left"), due[:, q])
    return out


def _waiting(offered: Floats, departures: Floats) -> Floats:
    """Return the steps that have arrived and not left, after each tick."""
    waiting: Floats = np.cumsum(offered.sum(axis=1)) - np.cumsum(departures.sum(axis=1))
    return waiting


def _drained(waiting: Floats, arrivals: Floats, calm_s: float, at: Floats) -> float | None:
    """Return the seconds from `calm_s` until less than two seconds of arrivals wait."""
    behind = (waiting >= 2 * np.maximum(arrivals, 1.0)) & (at >= calm_s)
    if not behind.any():
        return 0.0
    last = int(np.flatnonzero(behind)[-1]) + 1
    return float(at[last] - calm_s) if last < len(at) else None


def _quantiles(delay: Floats, weight: Floats, which: Sequence[float]) -> list[float]:
    """Return quantiles of the delays, weighted by steps."""
    order = np.argsort(delay, axis=None)
    total = np.cumsum(weight.ravel()[order])
    places = np.searchsorted(total, np.array(which) * total[-1])
    return [float(delay.ravel()[order[min(i, len(order) - 1)]]) for i in places]
