"""Train three small batches in one process, or in several under torchrun.

torchrun --nproc-per-node 2 parallel_training.py MODEL OUT

For each of VARIANTS: OUT/NAME/ has the trained weights, OUT/NAME.json what was measured.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.files import TensorDtypes
from clawstream.trainer.model.measurement import FirstPasses
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update
from clawstream.trainer.parallel.processes import Processes, open_processes

VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"recompute_old_logprobs": True},
    "checkpointed": {"activation_checkpointing": True, "packing": "rows"},
    "lora": {"lora": {"rank": 4}, "lr": 1e-2},
}


LENGTHS = (40, 3, 5, 4, 17, 9, 6, 30, 3)
"""Very different, so that processes have unequal numbers of passes."""


def sequences(seed: int, lengths: Sequence[int] = LENGTHS) -> list[TrainingSequence]:
    """Return sequences of random tokens with these lengths."""
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        mask = rng.random(length) < 0.6
        mask[0], mask[-1] = False, True
        tokens = Tokens(
            rng.integers(8, 30, length).astype(np.int32),
            mask,
            np.where(mask, -3.0, 0.0).astype(np.float32),
            np.full(length, math.nan, np.float32),
            np.full(length, "r/0.0", object),
            np.zeros(length, np.int32),
        )
        advantages = np.full(int(mask.sum()), rng.normal(), np.float32)
        found.append(TrainingSequence(f"t{length}", tokens, advantages))
    return found


def train(model: Path, out: Path, name: str, processes: Processes) -> None:
    settings = TrainerSettings.model_validate(
        {"device": "cpu", "lr": 1e-3, "minibatches": 2, "micro_batch_tokens": 40, "seed": 5}
        | VARIANTS[name]
    )
    policy = Policy(model, settings, processes=processes)
    algorithm, lr = load("cispo", {}, ()), settings.lr
    steps: list[dict[str, Any]] = []
    for seq in range(3):
        parent, given = "r/0.0" if seq == 0 else None, sequences(seq)
        passes = FirstPasses(given, 0)
        stats = update(policy, given, seq, algorithm, lr, parent, passes)
        steps += [asdict(step) for step in stats.steps]
        found = [values for _, values in passes.gathered(processes) if values is not None]
        steps += [{"logprobs": v.logprobs.tolist(), "updates": v.updates} for v in found]
    policy.save(out / name, TensorDtypes(torch.float32, {}))
    if processes.leads:
        (out / f"{name}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with open_processes("cpu") as joined:
        for variant in VARIANTS:
            train(Path(sys.argv[1]), Path(sys.argv[2]), variant, joined)
