"""Run a trainer of several processes, with a critic, for three batches, up to its clean end.

torchrun --nproc-per-node 2 parallel_run.py MODEL DATA_DIR

DATA_DIR/versions.pickle has the published versions, and the tokens that they were trained on.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.trainer_runs import MemoryWeightLog, fetched, locate, settings

from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.parallel.processes import open_processes
from clawstream.trainer.start import open_run
from clawstream.trainer.step import train_batch
from clawstream.trainer.versions.weight_log import NoWeightLog

BATCHES = 3
CRITIC: dict[str, Any] = {"critic": {"lr": 1e-3, "warmup_versions": 1}}


def batch(seq: int) -> FetchedBatch:
    """Return a batch for PPO."""
    found = fetched(seq)
    return replace(found, batch=replace(found.batch, algorithm="ppo"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = settings(Path(sys.argv[2]), Path(sys.argv[1]), save_every=2, **CRITIC)
    log = MemoryWeightLog()
    with open_processes("cpu") as processes:
        run = open_run(
            given,
            log if processes.leads else NoWeightLog(),
            (),
            frozenset(),
            lambda stored: locate("topic", stored),
            processes,
        )
        for seq in range(BATCHES):
            train_batch(run, processes.broadcast(batch(seq)))
            if run.version_due:
                run.publish()
        run.end()
        if processes.leads:
            (given.data_dir / "versions.pickle").write_bytes(
                pickle.dumps((log.published, log.trained))
            )
