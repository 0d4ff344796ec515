"""Measure the lake writer with a full window of recent ids beside one whose window never fills."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.jobs.installation import Installation
from benchmarks.jobs.load import GROUP_SIZE, SMALL, Load, write
from benchmarks.jobs.sides import Bench, expect, say
from benchmarks.processes import Process
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.table import dataset, open_table

CHUNKS = 8
"""Number of chunks that fill the window, and number of measured chunks behind it."""
NEVER_FULL = 10**9


def part_window(bench: Bench) -> dict[str, Any]:
    """Feed small steps to two lake writers in turn; measure their CPU behind the window of one."""
    size = 4 * GROUP_SIZE * SMALL.turns if bench.size.check else Settings().lake.dedupe_window
    chunk = -(-size // (CHUNKS * GROUP_SIZE * SMALL.turns)) * GROUP_SIZE
    load, costs = write(bench.directory, SMALL, CHUNKS * chunk), list[tuple[float, float]]()
    with (
        bench.installation(load, lake={"dedupe_window": size}) as full,
        bench.installation(load, lake={"dedupe_window": NEVER_FULL}) as growing,
    ):
        sides = [(here, here.job("lake")) for here in (full, growing)]
        for here, lake in sides:
            _fed(here, lake, load)
        for at in range(CHUNKS):
            load = write(bench.directory, SMALL, chunk, (CHUNKS + at) * chunk)
            ordered = sides if at % 2 == 0 else sides[::-1]
            cost = {here: _fed(here, lake, load) for here, lake in ordered}
            costs.append((cost[full], cost[growing]))
            say(f"window full {costs[-1][0]:.1f} µs a step, never full {costs[-1][1]:.1f} µs")
            load.steps_file.unlink()
        for here, _ in sides:
            rows = dataset(open_table(here.settings.lake_uri, "steps", {}), {}).count_rows()
            expect("rows of table steps", rows, 2 * CHUNKS * load.steps)
    # The least disturbed chunks: what other processes do to the caches is no cost of a window.
    least_full, least_growing = (min(side) for side in zip(*costs, strict=True))
    return {
        "lake_small_step_cpu_us": least_full,
        "lake_window_full_ratio": least_full / least_growing,
        "lake_window_full_ratios": [round(f / g, 3) for f, g in costs],
        "window_steps": size,
    }


def _fed(here: Installation, lake: Process, load: Load) -> float:
    """Feed steps to the lake; return its CPU microseconds a step."""
    steps = here.topics.steps
    here.until_logged(lake, f'"topic": "{steps}"')
    before = lake.cpu_s()
    here.feed(load.steps_file)
    group, ends = f"{here.settings.kafka.topic_prefix}-lake", here.ends([steps])
    here.until("the lake has caught up", partial(here.read_to, group, ends))
    return 1e6 * (lake.cpu_s() - before) / load.steps
