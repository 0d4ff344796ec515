"""Measure the cost of conversations of 100 turns: changelog a step, and CPU a KB of prompt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from benchmarks.jobs.installation import Installation
from benchmarks.jobs.load import GROUP_SIZE, LONG, Shape, events, write
from benchmarks.jobs.sides import Bench, expect, feed_both
from clawstream.runtime.kafka import Record
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.records import AssemblyDelta, SessionEvent, Step
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.assemble.changelog import ChangelogReader, changes_of, snapshot
from clawstream.stream_jobs.assemble.changelog_writer import SNAPSHOT_LOG_RATIO
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.state.changes import StepAdded
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import STEPS

BATCH = 20
"""Steps of one partition in a batch under load."""
Delta = list[tuple[int, float]]
"""(turn, bytes) of each step that a record of the changelog notes."""


def part_turns(bench: Bench) -> dict[str, Any]:
    """Many long conversations through a worker of assemble, then a few through the fold alone."""
    conversations = 2 if bench.size.check else LONG.together
    load = write(bench.directory, LONG, conversations)
    with bench.installation(load) as here:
        worker = here.job("jobs assemble")
        here.until_logged(worker, "partition_taken_over", here.settings.kafka.partitions)
        before = worker.cpu_s()
        feed_both(here, load)
        used = worker.cpu_s() - before
        written = _written(here)
    deltas = _steps(written)
    expect("steps in the changelog", sum(map(len, deltas)), load.steps)
    fold_us, kilobytes = fold_us_per_kb(LONG, min(conversations, GROUP_SIZE))
    return {
        "state_bytes_per_step_turn100": _bytes_per_step(deltas, lambda t: t > 0.9 * LONG.turns),
        "state_bytes_per_step_turn10": _bytes_per_step(deltas, lambda t: t <= 0.1 * LONG.turns),
        "state_bytes_with_snapshots_per_step": _with_snapshots(written) / load.steps,
        "state_steps_per_delta": load.steps / len(deltas),
        "cpu_us_per_prompt_kb": fold_us,
        "assemble_cpu_us_per_prompt_kb": 1e6 * used / load.trajectories / kilobytes,
    }


Written = list[tuple[Record, AssemblyDelta]]
"""The deltas of a changelog, by partition in order."""


def _written(here: Installation) -> Written:
    found = here.records(here.topics.assembly, AssemblyDelta)
    return sorted(found, key=lambda one: (one[0].partition, one[0].offset))


def _steps(written: Written) -> list[Delta]:
    """Return each delta with steps, its bytes divided among them, those of other changes too."""
    turns, deltas = Counter[tuple[int, int]](), list[Delta]()
    for record, delta in written:
        noted = [
            (record.partition, c.open_seq) for c in changes_of(delta) if isinstance(c, StepAdded)
        ]
        numbers = []
        for key in noted:
            turns[key] += 1
            numbers.append(turns[key])
        if numbers:
            deltas.append([(turn, len(record.value or b"") / len(numbers)) for turn in numbers])
    return deltas


def _with_snapshots(written: Written) -> int:
    """Return the bytes of all deltas and of the snapshots that assemble takes of a large state.

    The log of a benchmark is too short for a snapshot (`jobs.snapshot_min_bytes`), so they are
    created here by `SNAPSHOT_LOG_RATIO`.
    """
    codec, total = Codec(), 0
    for _, records in groupby(written, key=lambda one: one[0].partition):
        log = ChangelogReader()
        for record, delta in records:
            size = len(record.value or b"")
            log.read(record.offset, delta, size)
            total += size
            if (
                not log.state.pending
                and log.bytes_since_snapshot > SNAPSHOT_LOG_RATIO * log.snapshot_bytes
            ):
                chunks = snapshot(delta.epoch, log.seq, log.state)
                log.bytes_since_snapshot = 0
                log.snapshot_bytes = sum(len(codec.encode(chunk)) for chunk in chunks)
                total += log.snapshot_bytes
    return total


def _bytes_per_step(deltas: Sequence[Delta], counts: Callable[[int], bool]) -> float:
    """Return the mean over the steps of some turns."""
    return fmean(size for delta in deltas for turn, size in delta if counts(turn))


def fold_us_per_kb(shape: Shape, trajectories: int) -> tuple[float, float]:
    """Run the fold alone, on decoded records.

    Returns:
        CPU microseconds a KB of prompt ids, and KB of prompt ids a trajectory.
    """
    state = PartitionState()
    fold = AssemblyFold(state, limits_of(Settings()))
    fed: list[Step | SessionEvent] = [e for e in events(shape, trajectories) if not _ends(e)]
    kept, seconds, offset = {}, 0.0, 0
    for first in range(0, len(fed), BATCH):
        began = time.process_time()
        for event in fed[first : first + BATCH]:
            kept[offset] = fold.record(STEPS, offset, offset, event.trajectory_key.encode(), event)
            offset += 1
        fold.finish_batch()
        seconds += time.process_time() - began
    folded = sum(len(t.steps) for t in state.opened.values())
    expect("steps of the fold", folded, trajectories * shape.turns)
    kilobytes = sum(len(e.prompt_token_ids or b"") for e in fed if isinstance(e, Step)) / 1024
    return 1e6 * seconds / kilobytes, kilobytes / trajectories


def _ends(event: Step | SessionEvent) -> bool:
    return isinstance(event, SessionEvent) and event.kind == "completed"
