"""The sides of `benchmarks.jobs`: all jobs, assemble alone, its fold in a loop, a dictionary."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from benchmarks.jobs.dict_pool import Pool
from benchmarks.jobs.feeder import read
from benchmarks.jobs.installation import Installation, Watch
from benchmarks.jobs.load import GROUP_SIZE, RUN, STANDARD, Load, Shape, events, rewards
from benchmarks.processes import Process
from clawstream.schemas.records import AssemblyMarker, Candidate, ReadyBatch, Refused, Trajectory
from clawstream.schemas.topics import partition_of
from clawstream.stream_jobs.lake.delta.table import dataset, open_table

JOBS = ("assemble", "reward", "admit", "lake")
SETTLED_S = 2.0
"""Workers are settled when no partition was taken over for this long."""


@dataclass(frozen=True, slots=True)
class Size:
    """The amount of work. steps: Of a round, rounded to a whole number of groups."""

    steps: int
    rounds: int
    check: bool
    shape: Shape = STANDARD

    @property
    def trajectories(self) -> int:
        """Trajectories of a round."""
        return max(1, round(self.steps / self.shape.turns / GROUP_SIZE)) * GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Bench:
    """The directory, the Kafka and the amount of work of a benchmark."""

    directory: Path
    servers: str
    size: Size

    def installation(
        self, load: Load, lake: Mapping[str, Any] = MappingProxyType({}), **jobs: Any
    ) -> Installation:
        """Create an installation with its own topics. lake, jobs: settings of these sections."""
        prefix = f"b{uuid4().hex[:10]}"
        return Installation(self.directory, self.servers, prefix, load, lake, **jobs)


def say(text: str) -> None:
    """Report progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def expect(what: str, found: object, wanted: object) -> None:
    """End the benchmark when the values differ: the cost of wrong work is meaningless."""
    if found != wanted:
        raise SystemExit(f"{what}: {found}, not {wanted}")


def pipeline(bench: Bench, load: Load) -> dict[str, float]:
    """Run all jobs as processes.

    Returns:
        CPU microseconds a step by job, and seconds of wall clock (`wall`).
    """
    with bench.installation(load) as here:
        commands = {"assemble": "jobs assemble", "reward": "jobs reward"}
        processes = {name: here.job(commands.get(name, name)) for name in JOBS}
        topics, lake = here.topics, processes["lake"]
        taken, channels = here.settings.kafka.partitions, len(here.settings.admit.channels)
        here.until_logged(processes["assemble"], "partition_taken_over", taken)
        here.until_logged(processes["reward"], "partitions_assigned")
        here.until_logged(processes["admit"], "admission_starts", channels)
        ready = topics.ready_batches(RUN, "train")
        inputs = (topics.steps, topics.rewards, topics.trajectories, topics.candidates)
        read_by_lake = (*inputs, ready)
        for topic in read_by_lake:
            here.until_logged(lake, f'"topic": "{topic}"')
        watch, admitted = Watch(here, ready, ReadyBatch, Refused), list[ReadyBatch]()

        def all_admitted() -> bool:
            admitted.extend(e for _, e in watch.new())
            groups = (len(b.groups) if isinstance(b, ReadyBatch) else 1 for b in admitted)
            return sum(groups) >= load.groups

        before, began = _cpu(processes), time.monotonic()
        here.feed(load.steps_file)
        here.until("all groups are admitted", all_admitted)
        after, wall = _cpu(processes), time.monotonic() - began
        ends, group = here.ends(read_by_lake), f"{here.settings.kafka.topic_prefix}-lake"
        here.until("the lake has caught up", lambda: here.read_to(group, ends))
        after["lake"] = lake.cpu_s()
        watch.close()
        _check_batches(here, load, admitted)
        _check_lake(here, load)
    return {name: 1e6 * (after[name] - before[name]) / load.steps for name in JOBS} | {"wall": wall}


def _cpu(processes: Mapping[str, Process]) -> dict[str, float]:
    return {name: process.cpu_s() for name, process in processes.items()}


def _check_batches(here: Installation, load: Load, admitted: Sequence[Any]) -> None:
    """Check that every group is in exactly one batch, with all members and their rewards."""
    expect("refused", [b for b in admitted if not isinstance(b, ReadyBatch)], [])
    groups = [g for b in admitted for g in b.groups]
    expect("ready batches", len(admitted), load.groups // here.settings.admit.policy.batch_groups)
    expect("groups that were admitted", len({g.group_id for g in groups}), load.groups)
    expect("groups in batches", len(groups), load.groups)
    expect("members of groups", {len(g.members) for g in groups}, {GROUP_SIZE})
    rewards = {tuple(r.value for r in m.rewards) for g in groups for m in g.members}
    expect("rewards of members", rewards, {(0.0,), (1.0,)})


def _check_lake(here: Installation, load: Load) -> None:
    """Check that each record is in its table once."""
    batches = load.groups // here.settings.admit.policy.batch_groups
    candidates = len(here.records(here.topics.candidates, Candidate))
    for table, wanted in (
        ("steps", load.steps), ("trajectories", load.trajectories), ("rewards", load.trajectories),
        ("candidates", candidates), ("batches", batches), ("groups", load.groups),
        ("session_events", 2 * load.trajectories), ("dead_letters", 0),
    ):  # fmt: skip
        rows = dataset(open_table(here.settings.lake_uri, table, {}), {}).count_rows()
        expect(f"rows of table {table}", rows, wanted)


def bare_loop(bench: Bench, load: Load) -> float:
    """Run the same fold, inputs, changelog and outputs in a plain loop.

    Rewards come once all trajectories are closed, so that it writes two revisions of each, as the
    jobs do.

    Returns:
        CPU microseconds a step.
    """
    with bench.installation(load) as here:
        loop = here.start("bare-loop", "benchmarks.jobs.bare_loop")
        here.until_logged(loop, "ready")
        before = loop.cpu_s()
        feed_both(here, load)
        return 1e6 * (loop.cpu_s() - before) / load.steps


def assemble_alone(bench: Bench, load: Load, workers: int) -> tuple[float, float]:
    """Run workers of assemble, rewards fed as to the bare loop.

    Returns:
        CPU microseconds a step, and the first worker's percent of the steps.
    """
    with bench.installation(load) as here:
        processes = list[Process]()
        # One after the other: a worker that takes over while another one joins is fenced and dies.
        for worker in range(workers):
            processes.append(here.job("jobs assemble", str(worker)))
            alone = here.settings.kafka.partitions if worker == 0 else 1
            here.until_logged(processes[-1], "partition_taken_over", alone)
        takers = _settled(here, workers)
        before = sum(p.cpu_s() for p in processes)
        feed_both(here, load)
        used = sum(p.cpu_s() for p in processes) - before
        expect("takers of partitions after the round", _takers(here), takers)
    keys = (key for _, key, _ in read(load.rewards_file))
    work = Counter(takers[partition_of(key, len(takers))][0] for key in keys)
    return 1e6 * used / load.steps, 100.0 * work["0"] / load.trajectories


def _settled(here: Installation, workers: int) -> dict[int, tuple[str, int]]:
    """Return `_takers` once each worker owns partitions and none moves any more."""
    takers, quiet_since = _takers(here), time.monotonic()

    def settled() -> bool:
        nonlocal takers, quiet_since
        now = _takers(here)
        if now != takers:
            takers, quiet_since = now, time.monotonic()
        owners = {worker for worker, _ in takers.values()}
        whole = len(takers) == here.settings.kafka.partitions and len(owners) == workers
        return whole and time.monotonic() - quiet_since > SETTLED_S

    here.until("the workers have shared the partitions", settled)
    return takers


def _takers(here: Installation) -> dict[int, tuple[str, int]]:
    """Return partition to the worker that took it over last, and the offset of its marker."""
    markers = here.records(here.topics.assembly, AssemblyMarker)
    return {record.partition: (marker.worker, record.offset) for record, marker in markers}


def feed_both(here: Installation, load: Load) -> None:
    """Feed steps, then rewards; wait for all outputs, and check them."""
    watch, last = Watch(here, here.topics.candidates, Candidate), dict[str, Candidate]()
    files = {load.steps_file: load.trajectories, load.rewards_file: 2 * load.trajectories}
    for file, count in files.items():
        here.feed(file)

        def all_out(count: int = count) -> bool:
            last.update((c.trajectory_id, c) for _, c in watch.new())
            return watch.count >= count

        here.until(f"{count} candidates", all_out)
    watch.close()
    expect("candidates", watch.count, 2 * load.trajectories)
    expect("trajectories with candidates", len(last), load.trajectories)
    revisions = {(c.revision, len(c.rewards), c.trainable) for c in last.values()}
    expect("revisions", revisions, {(1, 1, True)})
    found = here.records(here.topics.trajectories, Trajectory)
    expect("steps of trajectories", sum(len(t.steps) for _, t in found), load.steps)


def dict_pool(size: Size) -> float:
    """Return steps a CPU second of the dictionary, which gets decoded records."""
    fed = [*events(size.shape, size.trajectories), *rewards(size.trajectories)]
    pool, began = Pool(), time.process_time()
    served = [group for event in fed for group in pool.take(event)]
    seconds = time.process_time() - began
    expect("groups of the pool", len(served), size.trajectories // GROUP_SIZE)
    return size.trajectories * size.shape.turns / seconds
