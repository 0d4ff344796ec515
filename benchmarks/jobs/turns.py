"""What a conversation of 100 turns costs assemble: changelog a step, and CPU a KB of prompt."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from benchmarks.jobs.installation import Installation, Watch
from benchmarks.jobs.load import GROUP_SIZE, LONG, Shape, events, write
from benchmarks.jobs.sides import Bench, expect, feed_both
from runtime.kafka import Record
from schemas.codec.single_object import Codec
from schemas.records import AssemblyDelta, SessionEvent, Step
from schemas.settings import Settings
from stream_jobs.assemble.changelog import ChangelogReader, snapshot, unpack_changes
from stream_jobs.assemble.fold import AssemblyFold
from stream_jobs.assemble.job import limits_of
from stream_jobs.assemble.model import STEPS, ChangeKind
from stream_jobs.assemble.partition import SNAPSHOT_LOG_RATIO
from stream_jobs.assemble.state import PartitionState

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
        "state_bytes_per_step_turn100": _bytes_per_step(
            deltas, lambda turn: turn > 0.9 * LONG.turns
        ),
        "state_bytes_per_step_turn10": _bytes_per_step(
            deltas, lambda turn: turn <= 0.1 * LONG.turns
        ),
        "state_bytes_with_snapshots_per_step": _with_snapshots(written) / load.steps,
        "state_steps_per_delta": load.steps / len(deltas),
        "cpu_us_per_prompt_kb": fold_us,
        "assemble_cpu_us_per_prompt_kb": 1e6 * used / load.trajectories / kilobytes,
    }


Written = list[tuple[Record, AssemblyDelta]]
"""The deltas of a changelog, by partition in order."""


def _written(here: Installation) -> Written:
    log = Watch(here, here.topics.assembly, AssemblyDelta)
    found = sorted(log.new(), key=lambda one: (one[0].partition, one[0].offset))
    log.close()
    return found


def _steps(written: Written) -> list[Delta]:
    """Each delta that notes steps, all of its bytes shared among them: also those that say how a
    trajectory began and ended.
    """
    turns, deltas = Counter[tuple[int, int]](), list[Delta]()
    for record, delta in written:
        noted = [
            (record.partition, e[1]) for e in unpack_changes(delta) if e[0] == ChangeKind.STEP_ADDED
        ]
        numbers = []
        for key in noted:
            turns[key] += 1
            numbers.append(turns[key])
        if numbers:
            deltas.append([(turn, len(record.value or b"") / len(numbers)) for turn in numbers])
    return deltas


def _with_snapshots(written: Written) -> int:
    """Bytes of all deltas, and of snapshots taken as assemble takes them where the state is large:
    `SNAPSHOT_BEHIND`.

    The log of a benchmark is too short for one (`jobs.snapshot_min_bytes`), so they are made here,
    of the state at that place.
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
                pieces = snapshot(delta.epoch, log.seq, log.state)
                log.bytes_since_snapshot, log.snapshot_bytes = (
                    0,
                    sum(len(codec.encode(p)) for p in pieces),
                )
                total += log.snapshot_bytes
    return total


def _bytes_per_step(deltas: Sequence[Delta], counts: Callable[[int], bool]) -> float:
    """The mean over the steps of some turns."""
    return fmean(size for delta in deltas for turn, size in delta if counts(turn))


def fold_us_per_kb(shape: Shape, trajectories: int) -> tuple[float, float]:
    """CPU microseconds of the fold alone a KB of prompt ids, and KB of prompt ids a trajectory.

    Decoding is not in it.
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
    expect(
        "steps of the fold",
        sum(len(t.steps) for t in state.opened.values()),
        trajectories * shape.turns,
    )
    kilobytes = sum(len(e.prompt_token_ids or b"") for e in fed if isinstance(e, Step)) / 1024
    return 1e6 * seconds / kilobytes, kilobytes / trajectories


def _ends(event: Step | SessionEvent) -> bool:
    return isinstance(event, SessionEvent) and event.kind == "completed"
