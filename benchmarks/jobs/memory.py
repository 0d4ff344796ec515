"""Measure the memory of a worker of assemble after 500,000 small steps and after a million."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.jobs.installation import Watch
from benchmarks.jobs.load import GROUP_SIZE, SMALL, write
from benchmarks.jobs.sides import Bench, expect, say
from clawstream.schemas.records import Candidate
from clawstream.schemas.settings import Settings

CLOSED_MAX = 50_000
"""Closed trajectories that are remembered, over all partitions."""
CHUNK, CHUNKS = 3200, 40
"""Trajectories of a chunk, and number of chunks: 1,024,000 steps."""
SAMPLES = 5
"""Chunks before each measurement, of which the median counts."""


def part_memory(bench: Bench) -> dict[str, Any]:
    """Feed chunks with their rewards; measure the memory after each."""
    chunk, chunks = (GROUP_SIZE, 4) if bench.size.check else (CHUNK, CHUNKS)
    rss: list[int] = []
    load = write(bench.directory, SMALL, chunk)
    with bench.installation(load, closed_max=CLOSED_MAX // Settings().kafka.partitions) as here:
        worker = here.job("jobs assemble")
        here.until_logged(worker, "partition_taken_over", here.settings.kafka.partitions)
        watch, wanted = Watch(here, here.topics.candidates, Candidate), 0
        for at in range(chunks):
            load = write(bench.directory, SMALL, chunk, at * chunk)
            for file in (load.steps_file, load.rewards_file):
                here.feed(file)
                wanted += load.trajectories
                here.until(f"{wanted} candidates", partial(watch.counted, wanted))
                file.unlink()
            rss.append(worker.rss())
            if at % 5 == 4:
                say(f"{(at + 1) * load.steps} steps, {rss[-1] >> 20} MB")
        watch.close()
        expect("candidates", watch.count, wanted)
    half = len(rss) // 2
    before, after = statistics.median(rss[:half][-SAMPLES:]), statistics.median(rss[-SAMPLES:])
    return {
        "rss_growth_500k_1m": 100.0 * (after - before) / before,
        "rss_mb": [round(r / 2**20, 1) for r in rss],
        "memory_steps": chunks * chunk * SMALL.turns,
    }  # fmt: skip
