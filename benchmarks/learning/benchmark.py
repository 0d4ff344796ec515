"""`python -m benchmarks.learning OUT.jsonl`: all runs, one JSON line each.

`python -m benchmarks.learning OUT.jsonl --report`: the tables and charts of docs/learning-runs.md
from such a file. The tables are printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import structlog
import torch

from benchmarks.learning.experiments import ALGORITHMS, SEEDS, STALENESS
from benchmarks.learning.report import (
    algorithm_table,
    draw_algorithms,
    draw_staleness,
    read_results,
    staleness_table,
)
from benchmarks.learning.run import Experiment, Result, learn
from benchmarks.learning.task import make_model

IMAGES = Path("docs/images")


def main() -> None:
    """Run all experiments, or report them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("out", type=Path, help="file of results, one JSON object a line")
    parser.add_argument("--report", action="store_true", help="print the tables, draw the charts")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    given = parser.parse_args()
    if given.report:
        results = read_results(given.out)
        draw_algorithms(results, IMAGES / "learning-algorithms.png")
        draw_staleness(results, IMAGES / "learning-staleness.png")
        print(algorithm_table(results), staleness_table(results), sep="\n\n")
        return
    _prepare()
    work: list[tuple[Experiment, int]] = [(experiment, 0) for experiment in ALGORITHMS]
    work += [(experiment, seed) for seed in SEEDS for experiment in STALENESS]
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(given.processes, get_context("spawn"), _prepare) as pool,
        given.out.open("w") as out,
    ):
        model = make_model(Path(directory) / "model")
        runs = [
            pool.submit(learn, experiment, seed, model, Path(directory) / str(number))
            for number, (experiment, seed) in enumerate(work)
        ]
        for run in runs:
            result: Result = run.result()
            out.write(json.dumps(result.as_json()) + "\n")
            out.flush()
            print(f"{result.name}, seed {result.seed}: {result.score:.3f}", flush=True)


def _prepare() -> None:
    """Use one thread, and log warnings only."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
