"""Plan the capacity for a number of steps a day; simulate its lag in bursts and failures.

    python -m benchmarks.capacity                           10^9 steps a day, as in docs/capacity.md
    python -m benchmarks.capacity steps_per_day=1e8 runs=1  any field of Assumptions
    python -m benchmarks.capacity vcpu_hour=0.03            other costs and prices

Prints one JSON line. Starts no process. The unit costs are results of `make bench-jobs` and `make
bench-gateway`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from benchmarks.capacity.lag import Fleet, Lag, Outage, Scenario, simulate

DAY_S = 86_400
MONTH_DAYS = 30.4
GB, TB = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """The inputs of the plan.

    Bytes are per step unless stated otherwise, as stored: lz4 in Kafka, ZSTD in the lake.
    """

    # load
    steps_per_day: float = 1e9
    peak_factor: float = 2.0
    """The busiest hour against the mean."""
    spike_factor: float = 10.0
    spike_s: float = 60.0
    steps_per_trajectory: float = 8.0
    candidates_per_trajectory: float = 2.0
    """Revisions: one when it closes, one with its reward."""
    runs: int = 8
    """Concurrent runs of equal size."""
    # CPU, microseconds a step
    gateway_us: float = 752.0
    assemble_us: float = 251.0
    reward_us: float = 57.0
    admit_us: float = 38.0
    lake_us: float = 158.0
    broker_us: float = 110.0
    """Of each replica: 0.11 core at 1,000 records of 10 KB a second."""
    # bytes a step
    steps_bytes: float = 7250.0
    trajectories_bytes: float = 2400.0
    candidates_bytes: float = 77.0
    rewards_bytes: float = 19.0
    assembly_bytes: float = 78.0
    """Deltas of the changelog; snapshots need as much again."""
    ready_bytes: float = 8.0
    lake_bytes: float = 2890.0
    # memory, bytes
    admit_memory_per_trajectory: float = 55.0
    """With its share of a group id, at a million trajectories; 42 from three million on."""
    closed_memory_per_trajectory: float = 1000.0
    """754 packed, and its key."""
    # operation
    partitions: int = 96
    lake_writers: int = 0
    """0: as many as the rate needs (setting lake.writers)."""
    replicas: int = 3
    retention_days: float = 3.0
    """Of claw.steps and claw.trajectories: at least twice the longest trajectory."""
    run_days: float = 14.0
    """Duration of a run: its rewards, candidates and ready batches are kept as long."""
    lake_retention_days: float = 365.0
    target_use: float = 0.6
    """Share of a core that is used in the busiest hour."""
    broker_mb_s: float = 150.0
    """Write rate of one broker, replication included."""
    broker_disk_tb: float = 8.0
    disk_fill: float = 0.7
    recovery_s: float = 15.0
    """From the kill of a worker to its first output."""
    failover_s: float = 10.0
    floor_s: float = 0.6
    flush_s: float = 2.0
    lake_tables: int = 8
    """Tables that get rows at each flush."""
    skew: float = 0.1
    """Standard deviation of a partition's share."""
    # prices, dollars
    vcpu_hour: float = 0.045
    ssd_gb_month: float = 0.08
    object_gb_month: float = 0.023
    object_put_1000: float = 0.005
    cross_zone_gb: float = 0.02
    zones: int = 3

    @property
    def mean(self) -> float:
        """Steps a second."""
        return self.steps_per_day / DAY_S

    @property
    def peak(self) -> float:
        """Steps a second in the busiest hour."""
        return self.mean * self.peak_factor


def plan(a: Assumptions) -> dict[str, Any]:
    """Return workers, partitions, Kafka, lake, memory, limits and monthly costs."""
    workers = {
        job: math.ceil(a.peak * getattr(a, f"{job}_us") / 1e6 / a.target_use)
        for job in ("gateway", "assemble", "reward", "lake")
    }
    written = {
        "steps": a.steps_bytes,
        "trajectories": a.trajectories_bytes,
        "candidates": a.candidates_bytes,
        "rewards": a.rewards_bytes,
        "assembly": 2 * a.assembly_bytes,
        "ready_batches": a.ready_bytes,
    }
    # assemble and lake read steps; the lake, the reward job and a trainer read trajectories; the
    # lake and two channels candidates.
    twice = a.steps_bytes + a.rewards_bytes + a.ready_bytes
    read = 2 * twice + 3 * (a.trajectories_bytes + a.candidates_bytes)
    ingress = sum(written.values())
    long_kept = a.steps_bytes + a.trajectories_bytes
    while_it_runs = a.candidates_bytes + a.rewards_bytes + a.ready_bytes
    stored = (
        a.replicas * a.steps_per_day * (long_kept * a.retention_days + while_it_runs * a.run_days)
    )
    brokers = max(
        a.replicas,
        math.ceil(a.peak * ingress * a.replicas / (a.broker_mb_s * 1e6)),
        math.ceil(stored / (a.broker_disk_tb * TB * a.disk_fill)),
    )
    broker_cores = math.ceil(a.peak * a.broker_us * a.replicas / 1e6 / a.target_use)
    admits = a.runs * math.ceil(a.peak / a.runs * a.admit_us / 1e6 / a.target_use)
    vcpus = sum(workers.values()) + broker_cores + admits
    return {
        "steps_per_s": {"mean": round(a.mean), "peak": round(a.peak)},
        "workers": {**workers, "admit": a.runs},
        "vcpus": vcpus,
        "partitions": {
            "count": a.partitions,
            "peak_steps_per_s_each": round(a.peak / a.partitions),
            "workers_at_most": a.partitions,
            "room": round(a.partitions / workers["assemble"], 1),
        },
        "kafka": {
            "brokers": brokers,
            "broker_vcpus": broker_cores,
            "bytes_per_step": {name: round(b) for name, b in written.items()},
            "in_mb_s": {n: round(getattr(a, n) * ingress / 1e6) for n in ("mean", "peak")},
            "replicated_mb_s_peak": round(a.peak * ingress * a.replicas / 1e6),
            "out_mb_s_peak": round(a.peak * read / 1e6),
            "stored_tb": round(stored / TB, 1),
        },
        "lake": {
            "tb_per_day": round(a.steps_per_day * a.lake_bytes / TB, 2),
            "tb_at_retention": round(a.steps_per_day * a.lake_bytes * a.lake_retention_days / TB),
            "writers_needed": workers["lake"],
            "rows_per_s_of_a_writer": round(1e6 / a.lake_us),
        },
        "memory": _memory(a),
        "limits": _limits(a),
        "dollars_per_month": _costs(a, vcpus, stored, ingress, read, workers["lake"]),
    }


def _memory(a: Assumptions) -> dict[str, float]:
    trajectories = a.steps_per_day / a.steps_per_trajectory
    of_partition, admit_bytes = trajectories / a.partitions, a.admit_memory_per_trajectory
    return {
        "admit_gb_per_day_of_a_run": round(trajectories / a.runs * admit_bytes / GB, 2),
        "closed_per_partition_hour": round(of_partition / 24),
        "closed_gb_per_partition_day": round(of_partition * a.closed_memory_per_trajectory / GB, 2),
        "closed_max_for_a_day": round(of_partition),
    }


def _limits(a: Assumptions) -> dict[str, float]:
    """Return the steps a second at which a part that does not scale out needs a whole core."""
    fold = 46.0 * a.candidates_per_trajectory / a.steps_per_trajectory
    return {
        "admit_of_one_run": round(1e6 / a.admit_us),
        "admit_of_one_run_fold_and_decode_alone": round(1e6 / fold),
        "one_lake_writer": round(1e6 / a.lake_us),
        "one_partition": round(1e6 / a.assemble_us),
        "all_partitions": round(a.partitions * 1e6 / a.assemble_us),
    }


def _costs(
    a: Assumptions, vcpus: int, stored: float, ingress: float, read: float, writers: int
) -> dict[str, float]:
    other_zones = (a.zones - 1) / a.zones
    crossing_bytes = ingress * (a.replicas - 1 + other_zones) + read * other_zones
    steps_per_month = a.steps_per_day * MONTH_DAYS
    lake_gb = a.steps_per_day * a.lake_bytes * a.lake_retention_days / GB
    puts = 2 * a.lake_tables * writers * DAY_S * MONTH_DAYS / a.flush_s
    costs = {
        "cpu": vcpus * a.vcpu_hour * 24 * MONTH_DAYS,
        "kafka_disks": stored / a.disk_fill / GB * a.ssd_gb_month,
        "between_zones": steps_per_month * crossing_bytes / GB * a.cross_zone_gb,
        "lake_at_retention": lake_gb * a.object_gb_month,
        "lake_writes": puts / 1000 * a.object_put_1000,
    }
    rounded = {name: float(round(value)) for name, value in costs.items()}
    total = sum(costs.values())
    return {
        **rounded,
        "total": float(round(total)),
        "per_million_steps": round(total / (steps_per_month / 1e6), 3),
    }


def fleet(a: Assumptions) -> Fleet:
    """Return the workers of the plan for the simulation, at 90 % of the rate of their unit cost."""
    workers = plan(a)["workers"]
    workers["lake"] = a.lake_writers or workers["lake"]
    rate = {job: 0.9e6 / getattr(a, f"{job}_us") for job in ("assemble", "reward", "admit", "lake")}
    return Fleet(
        partitions=a.partitions,
        runs=a.runs,
        workers=workers,
        rate=rate,
        skew=a.skew,
        floor_s=a.floor_s,
        lake_floor_s=a.flush_s + a.floor_s,
    )


def scenarios(a: Assumptions) -> list[Scenario]:
    """Return the scenarios; failures happen at the rate of the busiest hour."""
    at, hour = 600.0, 3600.0

    def lost(
        name: str, job: str, seconds: float, hours: float = 1.0, worker: int | None = None
    ) -> Scenario:
        outage = Outage(job=job, at_s=at, seconds=seconds, worker=worker)
        return Scenario(name=name, seconds=hours * hour, mean=a.peak, outages=(outage,))

    def spike(name: str, mean: float) -> Scenario:
        burst = (at, a.spike_s, a.spike_factor * a.mean / mean)
        return Scenario(name=name, seconds=hour, mean=mean, bursts=(burst,))

    every_worker = [Outage(job=job, at_s=at, seconds=30.0) for job in ("assemble", "reward")]
    failover = Outage(job="broker", at_s=at, seconds=a.failover_s, share=1 / a.replicas)
    return [
        Scenario(name="mean", seconds=hour, mean=a.mean),
        Scenario(name="day", seconds=DAY_S, mean=a.mean, wave=a.peak_factor - 1),
        spike("spike", a.mean),
        spike("spike_at_peak", a.peak),
        lost("kill_one_assemble", "assemble", a.recovery_s, worker=0),
        Scenario(name="rebalance_of_all", seconds=hour, mean=a.peak, outages=every_worker),
        lost("kill_admit", "admit", a.recovery_s, worker=0),
        Scenario(
            name="kills_all_the_time",
            seconds=hour,
            mean=a.peak,
            kills_per_hour=2.0,
            kill_s=a.recovery_s,
        ),
        Scenario(name="broker_failover", seconds=hour, mean=a.peak, outages=(failover,)),
        lost("lake_away_10_min", "lake", 600.0, hours=2),
        lost("assemble_away_10_min", "assemble", 600.0, hours=2),
    ]


def run(a: Assumptions, seed: int = 0) -> dict[str, Any]:
    """Return the plan and the lag of each scenario.

    A tick is ten seconds in a scenario of a day, otherwise half a second.
    """
    served = fleet(a)
    lags: dict[str, Lag] = {
        s.name: simulate(served, s, seed, 10.0 if s.seconds >= DAY_S else 0.5) for s in scenarios(a)
    }
    return {
        "benchmark": "capacity", "seed": seed, "plan": plan(a),
        "scenarios": {name: _rounded(lag) for name, lag in lags.items()},
        "assumptions": asdict(a),
    }  # fmt: skip


def _rounded(lag: Lag) -> dict[str, Any]:
    return {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in asdict(lag).items()
    }


def parsed(words: Sequence[str]) -> Assumptions:
    """Parse assumptions from `name=value` words.

    Raises ValueError for an unknown name or a value that is no number.
    """
    kinds = {f.name: int if f.type == "int" else float for f in fields(Assumptions)}
    given: dict[str, Any] = {}
    for word in words:
        name, sep, value = word.partition("=")
        if not sep or name not in kinds:
            raise ValueError(f"{word!r}: must be name=value, with a name of {', '.join(kinds)}")
        given[name] = kinds[name](float(value))
    return Assumptions(**given)


def main() -> None:
    """Print the plan for the assumptions on the command line."""
    try:
        print(json.dumps(run(parsed(sys.argv[1:]))))
    except ValueError as error:
        sys.exit(str(error))
