"""Measure what packing saves in an update of the trainer.

Prints one JSON line.

    make bench-trainer                       everything, six minutes of CPU
    python -m benchmarks.trainer --check     a small workload: tests the benchmark

The workload is one group: 8 rollouts of a prompt of 2,048 tokens, 10 turns of 64 tokens each, two
of them forked in the middle turn; a Qwen3 of two layers in float32, one thread. Each round computes
one optimizer step on the same tokens and weights in four ways, in alternating order; a ratio is the
median over the rounds.

    packed        `trainer.packing=tree`: each shared prefix once
    chats         `trainer.packing=rows`: one padded row for each path
    steps         the same with one row for each step
    plain         a loop over the paths with transformers alone, all logits of a path at once

    token_ratio               tokens of the rows of steps to those of the packed row
    token_ratio_vs_linear     tokens of the rows of chats to those of the packed row
    wall_ratio                time of steps to that of packed; _vs_linear: of chats; _vs_plain
    cpu_ratio                 the same in CPU time, which other work on the machine changes less
    grad_max_rel_error        largest difference of the gradients of packed and plain, in units of
                              the largest gradient of the same tensor
    pack_share_of_step        CPU time of the packing to that of the step of packed
    peak_memory_ratio         growth of a process that computes log-probabilities of 687 trained of
                              2,048 tokens in chunks of logits, at a vocabulary of 151,936, to that
                              with the logits of all tokens
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.machine import loop_ns, machine, rounded
from benchmarks.trainer import memory
from benchmarks.trainer.workload import CHECK, FULL, TEMPERATURE, paths, steps, write_model
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.micro_batch import collate
from clawstream.trainer.data.minibatches import micro_batches
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update

ALGORITHM = load("rloo", {"correction": "none"}, ())
"""The policy gradient alone, which the plain loop writes in one line."""
UNCHANGED = 1e-30
"""A learning rate at which no weight changes."""


class Time(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float


def timed(side: Callable[[], object]) -> Time:
    """Return how long a call takes, the work that it left to a GPU included."""
    wall, cpu = time.perf_counter(), time.process_time()
    side()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Time(time.perf_counter() - wall, time.process_time() - cpu)


class Sides:
    """The four ways on one workload, each with its gradient.

    Attributes:
        tokens, flops: of the last update of each way but the plain loop.
    """

    def __init__(
        self,
        directory: Path,
        sequences: list[TrainingSequence],
        device: Literal["cpu", "cuda"] = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
        *,
        compiled: bool = False,
    ) -> None:
        """directory: of the model. sequences: paths of groups. compiled: `trainer.compile`."""
        self._paths = sequences
        self._steps = steps(self._paths)
        self._tree, self._rows = (
            Policy(
                directory,
                TrainerSettings(
                    device=device,
                    dtype=dtype,
                    compile=compiled,
                    minibatches=1,
                    lr=UNCHANGED,
                    max_grad_norm=1e9,
                    packing=packing,
                ),
            )
            for packing in ("tree", "rows")
        )
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory).float()
        self._model.to(self._tree.device)  # type: ignore[arg-type]
        self.tokens: dict[str, int] = {}
        self.flops: dict[str, float] = {}
        self.all: Mapping[str, Callable[[], object]] = {
            "packed": lambda: self._update("packed", self._tree, self._paths),
            "chats": lambda: self._update("chats", self._rows, self._paths),
            "steps": lambda: self._update("steps", self._rows, self._steps),
            "plain": self._plain,
        }

    def _update(self, name: str, policy: Policy, sequences: list[TrainingSequence]) -> None:
        (step,) = update(policy, sequences, 0, ALGORITHM, UNCHANGED, None).steps
        self.tokens[name], self.flops[name] = step.computed_tokens, step.flops

    def _plain(self) -> None:
        self._model.zero_grad()
        device, narrow = self._tree.device, self._tree.settings.dtype == "bfloat16"
        total = sum(sequence.trained_tokens for sequence in self._paths)
        for sequence in self._paths:
            ids = torch.from_numpy(sequence.tokens.ids).long().to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
                logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            scores = logits.float() / TEMPERATURE
            logprobs = scores.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
            trained = logprobs[torch.from_numpy(sequence.tokens.mask)[1:].to(device)]
            assert sequence.advantages is not None
            advantages = torch.from_numpy(sequence.advantages).to(device)
            loss = -(trained * advantages).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]

    def pack(self) -> None:
        """Pack the paths as the step does."""
        s = self._tree.settings
        for part in micro_batches(self._paths, s.micro_batch_tokens, packed=True):
            collate(part, s.temperature, self._tree.device, packed=True)

    @property
    def gradient_error(self) -> float:
        """Largest difference of the gradients of packed and plain, relative to each tensor."""
        expected = {name: p.grad for name, p in self._model.named_parameters()}
        found = {name: p.grad for name, p in self._tree.model.named_parameters()}
        assert found.keys() == expected.keys()
        return max(_error(found[name], gradient) for name, gradient in expected.items())


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None and expected is not None
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run(directory: Path, *, check: bool, rounds: int) -> dict[str, Any]:
    """Return all figures."""
    before = machine()
    torch.set_num_threads(1)
    everything, chunks = memory.peaks(memory.CHECK if check else memory.FULL)
    shape = CHECK if check else FULL
    sides = Sides(write_model(directory, shape), paths(shape))
    times: dict[str, list[Time]] = {name: [] for name in (*sides.all, "pack")}
    for at in range(rounds):
        for name in sides.all if at % 2 == 0 else reversed(sides.all):
            times[name].append(timed(sides.all[name]))
            print(f"round {at}: {name} {rounded(times[name][-1]._asdict())}", file=sys.stderr)
        times["pack"].append(timed(sides.pack))

    def ratio(name: str, unit: str) -> float:
        pairs = zip(times[name], times["packed"], strict=True)
        return median(getattr(one, unit) / getattr(packed, unit) for one, packed in pairs)

    packed = sides.tokens["packed"]
    found = {
        "token_ratio": sides.tokens["steps"] / packed,
        "token_ratio_vs_linear": sides.tokens["chats"] / packed,
        **{
            f"{unit}_ratio{suffix}": ratio(name, unit)
            for unit in ("wall", "cpu")
            for name, suffix in (("steps", ""), ("chats", "_vs_linear"), ("plain", "_vs_plain"))
        },
        "peak_memory_ratio": chunks / everything,
    }
    return {
        "benchmark": "trainer",
        "check": check,
        "rounds": rounds,
        **rounded(found),
        "pack_share_of_step": float(f"{ratio('pack', 'cpu'):.2g}"),
        "grad_max_rel_error": float(f"{sides.gradient_error:.2g}"),
        "packed_tokens": packed,
        "packed_cpu_s": round(median(t.cpu for t in times["packed"]), 3),
        "peak_mb": [round(everything / 1e6), round(chunks / 1e6)],
        "machine": before | {"empty_loop_ns_after": loop_ns()},
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="a small workload, one round")
    parser.add_argument("--rounds", type=int)
    asked = parser.parse_args()
    rounds = asked.rounds or (1 if asked.check else 3)
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        print(json.dumps(run(Path(directory), check=asked.check, rounds=rounds)))
