"""Measure the cost of a step in the stream jobs, in a bare loop and in dictionaries.

Prints one JSON line.

    make bench-jobs                                                   everything, about 10 minutes
    python -m benchmarks.jobs --check                                 few steps: tests the benchmark
    python -m benchmarks.jobs --only pipeline --steps 8192 --rounds 1

All sides use one real Kafka, started here, with the default number of partitions. Steps have 2,048
prompt tokens on average, 256 response tokens and their log-probabilities; trajectories have 8
steps, groups 8 trajectories, and the reward job gives each trajectory one rule reward. Records are
encoded before, and fed by another process as fast as Kafka takes them. Each round has topics of its
own, and the rounds alternate the sides; a figure is the median over the rounds. CPU is that of the
side's processes, user and system, all threads, from the assignment of partitions on (without
start-up): of the jobs up to the last ready batch, of the lake until it has caught up. It excludes
Kafka, the feeder and this process. The benchmark fails when a batch, a group or a row of the lake
is missing or too many.

    steps_per_s_per_core            a second of CPU of all jobs: assemble, reward, admit, lake
    cpu_us_per_step                 all jobs, microseconds; <job>_cpu_us_per_step: one of them
    bare_loop_cpu_us_per_step       the same fold, changelog and outputs in a plain loop on
                                    confluent-kafka (`jobs_bare_loop`)
    ratio_to_bare_loop              all jobs to the bare loop, of a round
    dict_pool_steps_per_s           the same grouping in dictionaries, given decoded records;
                                    nothing outlives its process
    cpu_ratio_2_workers             assemble alone: CPU a step of two workers to that of one
    split_2_workers                 percent of the trajectories that the first of two workers had
    state_bytes_per_step_turn100    bytes of changelog a step, turns 91 to 100 of conversations of
                                    100; turn10: the first ten. Deltas only
    state_bytes_with_snapshots_per_step
                                    deltas of all turns, and snapshots as often as in a large state
    cpu_us_per_prompt_kb            fold alone, a KB of prompt ids of such a conversation;
                                    assemble_...: the whole worker
    rss_growth_500k_1m              percent by which a worker of assemble grows from step 500,000 to
                                    a million, 50,000 closed remembered
    lake_window_full_ratio          CPU of the lake writer alone, a small step, once its window of
                                    recent ids (`lake.dedupe_window`) is full, to that of a writer
                                    whose window never fills; the least of eight chunks each
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.jobs.load import STANDARD, write
from benchmarks.jobs.memory import part_memory
from benchmarks.jobs.sides import (
    JOBS,
    Bench,
    Size,
    assemble_alone,
    bare_loop,
    dict_pool,
    pipeline,
    say,
)
from benchmarks.jobs.turns import part_turns
from benchmarks.jobs.window import part_window
from benchmarks.machine import loop_ns, machine, rounded
from benchmarks.processes import free_port
from clawstream.runtime.broker.embedded import EmbeddedBroker
from clawstream.schemas.settings import Settings


def part_pipeline(bench: Bench) -> dict[str, Any]:
    """The jobs, the bare loop and the dictionary, in rounds."""
    load = write(bench.directory, bench.size.shape, bench.size.trajectories)
    ours: list[dict[str, float]] = []
    bare: list[float] = []
    for at in range(bench.size.rounds):
        sides: list[Callable[[], None]] = [
            lambda: ours.append(pipeline(bench, load)), lambda: bare.append(bare_loop(bench, load))
        ]  # fmt: skip
        for side in sides if at % 2 == 0 else reversed(sides):
            side()
        say(f"round {at}: {rounded(ours[-1])}, bare loop {bare[-1]:.1f} µs")
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


def part_workers(bench: Bench) -> dict[str, Any]:
    """Assemble alone, with one worker and with two, in rounds."""
    load = write(bench.directory, bench.size.shape, bench.size.trajectories)
    counts = (
        (2,) if bench.size.check else (1, 2)
    )  # a check has one worker alone in `turns`, and little time
    found: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    for at in range(bench.size.rounds):
        for workers in counts if at % 2 == 0 else reversed(counts):
            found[workers].append(assemble_alone(bench, load, workers))
            say(
                f"round {at}: {workers} of assemble, {found[workers][-1][0]:.1f} µs, "
                f"{found[workers][-1][1]:.1f} % by the first"
            )
    ratios = [two / one for (one, _), (two, _) in zip(found[1], found[2], strict=False)]
    return {
        "assemble_alone_cpu_us_per_step": statistics.median(cpu for cpu, _ in found[1])
        if found[1]
        else None,
        "cpu_ratio_2_workers": statistics.median(ratios) if ratios else None,
        "split_2_workers": statistics.median(share for _, share in found[2]),
        "ratios_2_workers": [round(r, 3) for r in ratios],
    }


PARTS: Mapping[str, Callable[[Bench], dict[str, Any]]] = {
    "pipeline": part_pipeline, "workers": part_workers, "turns": part_turns, "memory": part_memory,
    "window": part_window,
}  # fmt: skip


def run(directory: Path, port: int, size: Size, only: Sequence[str]) -> dict[str, Any]:
    """The parts, on one Kafka."""
    before = machine()
    result: dict[str, Any] = {
        "benchmark": "jobs",
        "check": size.check,
        "partitions": Settings().kafka.partitions,
        "rounds": size.rounds,
    }
    with EmbeddedBroker(directory / "kafka", port) as broker:
        for name in only:
            say(name)
            result |= PARTS[name](Bench(directory, broker.bootstrap_servers, size))
    return rounded(result | {"machine": before | {"empty_loop_ns_after": loop_ns()}})  # type: ignore[no-any-return]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="few steps, one round")
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="run one part; may be given several times"
    )
    parser.add_argument("--steps", type=int, help="steps a round")
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--text",
        action="store_true",
        help="steps have as much text as tokens, four bytes each; default: little",
    )
    parser.add_argument("--port", type=int, help="of Kafka; default: one that is free")
    asked = parser.parse_args()
    steps, rounds = (512, 1) if asked.check else (16384, 3)
    shape = replace(STANDARD, text=asked.text)
    size = Size(asked.steps or steps, asked.rounds or rounds, asked.check, shape)
    parts = asked.only or [name for name in PARTS if not asked.check or name != "memory"]
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        print(json.dumps(run(Path(directory), asked.port or free_port(), size, parts)))


if __name__ == "__main__":
    main()
