"""The sides of `benchmarks.jobs`: all jobs as processes, assemble alone, the same fold in a bare
loop, a dictionary.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.jobs.dict_pool import Pool
from benchmarks.jobs.feeder import read
from benchmarks.jobs.installation import Installation, Process, Watch
from benchmarks.jobs.load import GROUP_SIZE, RUN, STANDARD, Load, Shape, events, rewards
from schemas.records import AssemblyMarker, Candidate, ReadyBatch, Refused, Trajectory
from schemas.topics import partition_of
from stream_jobs.lake.main import dataset, open_table

JOBS = ("assemble", "reward", "admit", "lake")
SETTLED_S = 2.0
"""So long nobody takes a partition over before the workers are counted as settled."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. steps: of a round; a whole number of groups comes of it."""

    steps: int
    rounds: int
    check: bool
    shape: Shape = STANDARD

    @property
    def trajectories(self) -> int:
        """Of a round."""
        return max(1, round(self.steps / self.shape.turns / GROUP_SIZE)) * GROUP_SIZE


@dataclass(frozen=True, slots=True)
class Bench:
    """Where everything runs."""

    directory: Path
    servers: str
    size: Size

    def installation(self, load: Load, **jobs: Any) -> Installation:
        """A new one, on topics of its own."""
        return Installation(self.directory, self.servers, f"b{uuid4().hex[:10]}", load, **jobs)


def say(text: str) -> None:
    """Progress, for who waits."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def expect(what: str, found: object, wanted: object) -> None:
    """Ends the benchmark when they differ: a figure for wrong work is none."""
    if found != wanted:
        raise SystemExit(f"{what}: {found}, not {wanted}")


def pipeline(bench: Bench, load: Load) -> dict[str, float]:
    """All jobs as processes.

    Returns CPU microseconds a step by job, and seconds of wall clock (`wall`).
    """
    with bench.installation(load) as here:
        processes = {
            "assemble": here.job("jobs assemble"),
            "reward": here.job("jobs reward"),
            "admit": here.job("admit"),
            "lake": here.job("lake"),
        }
        here.until_logged(
            processes["assemble"], "partition_taken_over", here.settings.kafka.partitions
        )
        here.until_logged(processes["reward"], "partitions_assigned")
        here.until_logged(processes["admit"], "admission_starts", len(here.settings.admit.channels))
        ready = here.topics.ready_batches(RUN, "train")
        read_by_lake = (
            here.topics.steps,
            here.topics.rewards,
            here.topics.trajectories,
            here.topics.candidates,
            ready,
        )
        for topic in read_by_lake:
            here.until_logged(processes["lake"], f'"topic": "{topic}"')
        watch, admitted = Watch(here, ready, ReadyBatch, Refused), list[ReadyBatch]()

        def all_admitted() -> bool:
            admitted.extend(e for _, e in watch.new())
            return (
                sum(len(b.groups) if isinstance(b, ReadyBatch) else 1 for b in admitted)
                >= load.groups
            )

        before, began = _cpu(processes), time.monotonic()
        here.feed(load.steps_file)
        here.until("all groups are admitted", all_admitted)
        after, wall = _cpu(processes), time.monotonic() - began
        ends = here.ends(read_by_lake)
        here.until(
            "the lake has caught up",
            lambda: here.read_to(f"{here.settings.kafka.topic_prefix}-lake", ends),
        )
        after["lake"] = processes["lake"].cpu_s()
        watch.close()
        _check_batches(here, load, admitted)
        _check_lake(here, load)
    return {name: 1e6 * (after[name] - before[name]) / load.steps for name in JOBS} | {"wall": wall}


def _cpu(processes: Mapping[str, Process]) -> dict[str, float]:
    return {name: process.cpu_s() for name, process in processes.items()}


def _check_batches(here: Installation, load: Load, admitted: Sequence[Any]) -> None:
    """Every group is in exactly one batch, with all its members and their rewards."""
    expect("refused", [b for b in admitted if not isinstance(b, ReadyBatch)], [])
    groups = [g for b in admitted for g in b.groups]
    expect("ready batches", len(admitted), load.groups // here.settings.admit.policy.batch_groups)
    expect("groups that were admitted", len({g.group_id for g in groups}), load.groups)
    expect("groups in batches", len(groups), load.groups)
    expect("members of groups", {len(g.members) for g in groups}, {GROUP_SIZE})
    expect(
        "rewards of members",
        {tuple(r.value for r in m.rewards) for g in groups for m in g.members},
        {(0.0,), (1.0,)},
    )


def _check_lake(here: Installation, load: Load) -> None:
    """Each record is in its table once."""
    batches = load.groups // here.settings.admit.policy.batch_groups
    candidates = Watch(here, here.topics.candidates, Candidate)
    candidates.new()
    candidates.close()
    for table, wanted in (
        ("steps", load.steps), ("trajectories", load.trajectories), ("rewards", load.trajectories),
        ("candidates", candidates.count), ("batches", batches), ("groups", load.groups),
        ("session_events", 2 * load.trajectories), ("dead_letters", 0),
    ):  # fmt: skip
        rows = dataset(open_table(here.settings.lake_uri, table, {}), {}).count_rows()
        expect(f"rows of table {table}", rows, wanted)


def bare_loop(bench: Bench, load: Load) -> float:
    """The same fold, inputs, changelog and outputs in a plain loop.

    Returns CPU microseconds a step.

    Rewards come once all trajectories are closed, so that it puts out two revisions of each, as the
    jobs do.
    """
    with bench.installation(load) as here:
        loop = here.start("bare-loop", "benchmarks.jobs.bare_loop")
        here.until_logged(loop, "ready")
        before = loop.cpu_s()
        feed_both(here, load)
        return 1e6 * (loop.cpu_s() - before) / load.steps


def assemble_alone(bench: Bench, load: Load, workers: int) -> tuple[float, float]:
    """Workers of assemble, rewards fed as to the bare loop.

    Returns CPU microseconds a step, and the first worker's percent of the steps.
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
    work = Counter(
        takers[partition_of(key, len(takers))][0] for _, key, _ in read(load.rewards_file)
    )
    return 1e6 * used / load.steps, 100.0 * work["0"] / load.trajectories


def _settled(here: Installation, workers: int) -> dict[int, tuple[str, int]]:
    """Who has taken each partition over, once each worker has some and nothing moves any more."""
    takers, quiet_since = _takers(here), time.monotonic()

    def settled() -> bool:
        nonlocal takers, quiet_since
        now = _takers(here)
        if now != takers:
            takers, quiet_since = now, time.monotonic()
        whole = (
            len(takers) == here.settings.kafka.partitions
            and len({w for w, _ in takers.values()}) == workers
        )
        return whole and time.monotonic() - quiet_since > SETTLED_S

    here.until("the workers have shared the partitions", settled)
    return takers


def _takers(here: Installation) -> dict[int, tuple[str, int]]:
    """Partition to the worker that has taken it over last, and the marker's offset."""
    markers = Watch(here, here.topics.assembly, AssemblyMarker)
    takers = {record.partition: (marker.worker, record.offset) for record, marker in markers.new()}
    markers.close()
    return takers


def feed_both(here: Installation, load: Load) -> None:
    """Steps, then rewards; until all is put out, and what was put out is right."""
    watch, last = Watch(here, here.topics.candidates, Candidate), dict[str, Candidate]()
    for file, count in (
        (load.steps_file, load.trajectories),
        (load.rewards_file, 2 * load.trajectories),
    ):
        here.feed(file)

        def all_out(count: int = count) -> bool:
            last.update((c.trajectory_id, c) for _, c in watch.new())
            return watch.count >= count

        here.until(f"{count} candidates", all_out)
    watch.close()
    expect("candidates", watch.count, 2 * load.trajectories)
    expect("trajectories with candidates", len(last), load.trajectories)
    expect(
        "revisions",
        {(c.revision, len(c.rewards), c.trainable) for c in last.values()},
        {(1, 1, True)},
    )
    trajectories = Watch(here, here.topics.trajectories, Trajectory)
    found = [t for _, t in trajectories.new()]
    trajectories.close()
    expect("steps of trajectories", sum(len(t.steps) for t in found), load.steps)


def dict_pool(size: Size) -> float:
    """Steps a CPU second of the dictionary, which is given records that are decoded already."""
    fed = [*events(size.shape, size.trajectories), *rewards(size.trajectories)]
    pool, began = Pool(), time.process_time()
    served = [group for event in fed for group in pool.take(event)]
    seconds = time.process_time() - began
    expect("groups of the pool", len(served), size.trajectories // GROUP_SIZE)
    return size.trajectories * size.shape.turns / seconds
