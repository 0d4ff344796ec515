"""What the stream jobs cost a step, side by side with the same fold in a bare loop and with a dictionary. Prints one JSON line.

    make bench-jobs                                              everything, about ten minutes, then one of small steps
    python -m benchmarks.jobs --check                            few steps: whether the benchmark itself still works
    python -m benchmarks.jobs --only pipeline --steps 8192 --rounds 1

All on one real Kafka, started here, at the default number of partitions. Steps have 2,048 prompt tokens on average, 256 response tokens and
their log-probabilities; trajectories have 8 steps, groups 8 trajectories, and the reward job gives each trajectory one rule reward. Records are
encoded before, and fed by another process as fast as Kafka takes them. Each round has topics of its own, and the rounds alternate the
sides; a figure is the median over the rounds. CPU is that of the side's processes, user and system, all threads, from when they have their
partitions (start-up is not in it): of the jobs up to the last ready batch, of the lake until it has caught up with that. Kafka's, the
feeder's and this process's are not in it. The benchmark fails when a batch, a group or a row of the lake is missing or too many.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.gateway import machine
from benchmarks.jobs_dict_pool import Pool
from benchmarks.jobs_installation import Installation, Process, Watch, free_port
from benchmarks.jobs_load import GROUP_SIZE, RUN, STANDARD, Load, events, rewards, write
from runtime.broker import EmbeddedBroker
from schemas.events import Candidate, ReadyBatch, Refused, Trajectory
from schemas.settings import Settings
from stream_jobs.lake import dataset, open_table

JOBS = ("assemble", "reward", "admit", "lake")


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything. steps: of a round; a whole number of groups comes of it."""

    steps: int
    rounds: int
    check: bool

    @property
    def trajectories(self) -> int:
        """Of 8 steps."""
        return max(1, round(self.steps / STANDARD.turns / GROUP_SIZE)) * GROUP_SIZE


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


# -- the sides


def pipeline(bench: Bench, load: Load) -> dict[str, float]:
    """All jobs as processes. Returns CPU microseconds a step by job, and seconds of wall clock (`wall`)."""
    with bench.installation(load) as here:
        partitions = here.settings.kafka.partitions
        assemble = here.job("jobs assemble")
        here.until_logged(assemble, "partition_taken_over", partitions)
        reward, admit, lake = here.job("jobs reward"), here.job("admit"), here.job("lake")
        here.until_logged(reward, "partitions_taken_over")
        here.until_logged(admit, "admission_starts", len(here.settings.admit.channels))
        kept = (here.topics.steps, here.topics.rewards, here.topics.trajectories, here.topics.candidates)
        ready = here.topics.ready_batches(RUN, "train")
        for topic in (*kept, ready):
            here.until_logged(lake, f'"topic": "{topic}"')
        watch, admitted = Watch(here, ready, ReadyBatch, Refused), list[ReadyBatch]()

        def all_admitted() -> bool:
            admitted.extend(e for _, e in watch.new())
            return sum(len(b.groups) if isinstance(b, ReadyBatch) else 1 for b in admitted) >= load.groups

        processes = dict(zip(JOBS, (assemble, reward, admit, lake), strict=True))
        before, began = _cpu(processes), time.monotonic()
        here.feed(load.steps_file)
        here.until("all groups are admitted", all_admitted)
        after, wall = _cpu(processes), time.monotonic() - began
        ends = here.ends((*kept, ready))
        here.until("the lake has caught up", lambda: here.read_to(f"{here.settings.kafka.topic_prefix}-lake", ends))
        after["lake"] = lake.cpu_s()
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
        "rewards of members", {tuple(r.value for r in m.rewards) for g in groups for m in g.members}, {(0.0,), (1.0,)}
    )


def _check_lake(here: Installation, load: Load) -> None:
    """Each record is in its table once."""
    batches = load.groups // here.settings.admit.policy.batch_groups
    for table, wanted in (
        ("steps", load.steps), ("trajectories", load.trajectories), ("rewards", load.trajectories),
        ("candidates", 2 * load.trajectories), ("batches", batches), ("groups", load.groups),
        ("session_events", 2 * load.trajectories), ("dead_letters", 0),
    ):  # fmt: skip
        rows = dataset(open_table(here.settings.lake_uri, table, {}), {}).count_rows()
        expect(f"rows of table {table}", rows, wanted)


def bare_loop(bench: Bench, load: Load) -> float:
    """The same fold, inputs, state log and outputs in a plain loop. Returns CPU microseconds a step.

    Rewards come once all trajectories are closed, so that it puts out two revisions of each, as the jobs do.
    """
    with bench.installation(load) as here:
        loop = here.start("bare-loop", "benchmarks.jobs_bare_loop")
        here.until_logged(loop, "ready")
        before = loop.cpu_s()
        _feed_both(here, load)
        return 1e6 * (loop.cpu_s() - before) / load.steps


def _feed_both(here: Installation, load: Load) -> None:
    """Steps, then rewards; until all is put out, and what was put out is right."""
    watch, last = Watch(here, here.topics.candidates, Candidate), dict[str, Candidate]()
    for file, count in ((load.steps_file, load.trajectories), (load.rewards_file, 2 * load.trajectories)):
        here.feed(file)

        def all_out(count: int = count) -> bool:
            last.update((c.trajectory_id, c) for _, c in watch.new())
            return watch.count >= count

        here.until(f"{count} candidates", all_out)
    watch.close()
    expect("candidates", watch.count, 2 * load.trajectories)
    expect("trajectories with candidates", len(last), load.trajectories)
    expect("revisions", {(c.revision, len(c.rewards), c.trainable) for c in last.values()}, {(1, 1, True)})
    trajectories = Watch(here, here.topics.trajectories, Trajectory)
    found = [t for _, t in trajectories.new()]
    trajectories.close()
    expect("steps of trajectories", sum(len(t.steps) for t in found), load.steps)


def dict_pool(size: Size) -> float:
    """Steps a CPU second of the dictionary, which is given records that are decoded already."""
    fed = [*events(STANDARD, size.trajectories), *rewards(size.trajectories)]
    pool, began = Pool(), time.process_time()
    served = [group for event in fed for group in pool.take(event)]
    seconds = time.process_time() - began
    expect("groups of the pool", len(served), size.trajectories // GROUP_SIZE)
    return size.trajectories * STANDARD.turns / seconds


# -- the parts


def part_pipeline(bench: Bench) -> dict[str, Any]:
    """The jobs, the bare loop and the dictionary, in rounds."""
    load = write(bench.directory, STANDARD, bench.size.trajectories)
    ours: list[dict[str, float]] = []
    bare: list[float] = []
    for at in range(bench.size.rounds):
        sides: list[Callable[[], None]] = [
            lambda: ours.append(pipeline(bench, load)), lambda: bare.append(bare_loop(bench, load))
        ]  # fmt: skip
        for side in sides if at % 2 == 0 else reversed(sides):
            side()
        say(f"round {at}: {_rounded(ours[-1])}, bare loop {bare[-1]:.1f} µs")
    whole = [sum(o[name] for name in JOBS) for o in ours]
    cpu = statistics.median(whole)
    return {
        "steps_per_s_per_core": 1e6 / cpu,
        "cpu_us_per_step": cpu,
        "bare_loop_cpu_us_per_step": statistics.median(bare),
        "ratio_to_bare_loop": statistics.median(w / b for w, b in zip(whole, bare, strict=True)),
        **{f"{name}_cpu_us_per_step": statistics.median(o[name] for o in ours) for name in JOBS},
        "steps_per_s": load.steps / statistics.median(o["wall"] for o in ours),
        "dict_pool_steps_per_s": dict_pool(bench.size),
        "ratios_to_bare_loop": [round(w / b, 2) for w, b in zip(whole, bare, strict=True)],
        "steps": load.steps, "step_bytes": load.steps_file.stat().st_size // load.steps,
    }  # fmt: skip


PARTS: Mapping[str, Callable[[Bench], dict[str, Any]]] = {"pipeline": part_pipeline}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def run(directory: Path, port: int, size: Size, only: Sequence[str]) -> dict[str, Any]:
    """The parts, on one Kafka."""
    before = machine()
    result: dict[str, Any] = {
        "benchmark": "jobs", "check": size.check, "partitions": Settings().kafka.partitions, "rounds": size.rounds
    }  # fmt: skip
    with EmbeddedBroker(directory / "kafka", port) as broker:
        for name in only:
            say(name)
            result |= PARTS[name](Bench(directory, broker.bootstrap_servers, size))
    return _rounded(result | {"machine": before})  # type: ignore[no-any-return]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="few steps, one round")
    parser.add_argument("--only", action="append", choices=PARTS, help="run one part; may be given several times")
    parser.add_argument("--steps", type=int, help="steps a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--port", type=int, help="of Kafka; default: one that is free")
    asked = parser.parse_args()
    size = Size(asked.steps or (512 if asked.check else 16384), asked.rounds or (1 if asked.check else 3), asked.check)
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        print(json.dumps(run(Path(directory), asked.port or free_port(), size, asked.only or list(PARTS))))


if __name__ == "__main__":
    main()
