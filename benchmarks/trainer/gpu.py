"""Measure updates of a model of half a billion parameters on a CUDA device.

Prints one JSON line.

    python -m benchmarks.trainer.gpu            four groups of the workload of `benchmarks.trainer`
    python -m benchmarks.trainer.gpu --check    a small model and workload, on the CPU if need be

The sizes are those of Qwen2.5-0.5B with random weights, passes in bfloat16. Each round computes one
optimizer step in each way, in alternating order, after one that is not measured; a figure is the
median over the rounds.

    packed, chats, plain   as in `benchmarks.trainer`; the plain loop is transformers alone
    tokens_per_s           tokens of all paths, each with its shared prefixes, by the time of a step
    computed_per_s         tokens that the way computes
    mfu                    model FLOPs by the time and the peak of the device; the head counts for
                           trained tokens only, of the plain loop, too
    peak_gb                highest allocation during a step, weights and optimizer included
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

from benchmarks.machine import machine, rounded
from benchmarks.trainer.benchmark import Sides, timed
from benchmarks.trainer.workload import (
    CHECK,
    FULL,
    HALF_BILLION,
    TWO_LAYERS,
    paths,
    write_model,
)
from clawstream.trainer.metrics.flops import peak_flops

WAYS = ("packed", "chats", "plain")


def run(
    directory: Path, *, check: bool, compiled: bool, groups: int, rounds: int
) -> dict[str, Any]:
    """Return all figures."""
    shape = CHECK if check else FULL
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
    write_model(directory, shape, TWO_LAYERS if check else HALF_BILLION)
    sequences = [path for seed in range(groups) for path in paths(shape, seed)]
    sides = Sides(directory, sequences, device, "bfloat16", compiled=compiled)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    peaks = dict.fromkeys(WAYS, 0)
    for at in range(-1, rounds):
        for name in WAYS if at % 2 == 0 else reversed(WAYS):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            wall = timed(sides.all[name]).wall
            print(f"round {at}: {name} {wall:.3f} s", file=sys.stderr)
            if at >= 0:
                seconds[name].append(wall)
                if device == "cuda":
                    peaks[name] = torch.cuda.max_memory_allocated()
    # The plain loop computes what rows of paths do.
    sides.tokens["plain"], sides.flops["plain"] = sides.tokens["chats"], sides.flops["chats"]
    tokens = sum(len(sequence.tokens.ids) for sequence in sequences)
    peak = peak_flops(torch.device(device), None)
    found = {}
    for name in WAYS:
        s = median(seconds[name])
        found[name] = {
            "seconds": s,
            "tokens_per_s": round(tokens / s),
            "computed_per_s": round(sides.tokens[name] / s),
            "mfu": None if peak is None else sides.flops[name] / s / peak,
            "peak_gb": peaks[name] / 1e9,
        }
    return {
        "benchmark": "trainer-gpu",
        "check": check,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": compiled,
        "groups": groups,
        "rounds": rounds,
        "tokens": tokens,
        "computed_tokens": sides.tokens,
        **rounded(found),
        "grad_max_rel_error": float(f"{sides.gradient_error:.2g}"),
        "machine": machine(),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="a small workload, one round")
    parser.add_argument("--compile", action="store_true", help="trainer.compile=true")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
        found = run(
            Path(directory),
            check=asked.check,
            compiled=asked.compile,
            groups=asked.groups,
            rounds=1 if asked.check else asked.rounds,
        )
        print(json.dumps(found))


if __name__ == "__main__":
    main()
