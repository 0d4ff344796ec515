"""Measure full versions and deltas of one model after optimizer steps. Prints one JSON line.

    make bench-weights                            SmolLM2-135M in bfloat16, and a toy engine
    python -m benchmarks.weights --check          a toy model, no engine: tests the benchmark
    python -m benchmarks.weights MODEL --only deltas

A step is AdamW's on the policy gradient of random tokens, from float32 master weights, with one
thread. After each step the trainer's publisher writes a full version and a delta, and the files of
both are read as a worker reads them; they must be equal. Seconds are CPU seconds of writing and
reading together, without the pass through the model. A figure is the median over the steps.

    delta_bytes_ratio       bytes of a full version's tensors to those of a delta, learning rate
                            1e-6; delta_bytes_ratio_1e5: 1e-5
    delta_seconds           a delta: save, compare, hash, encode; then check, rebuild, hash
    full_seconds            a full version: save, hash; then check
    pause_ms_p50            pause of a vLLM server with calls in flight that loads deltas of the
                            demo's model (`benchmarks.weights.pause`); failed_requests: of its calls
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
import torch

from benchmarks.machine import machine, rounded
from benchmarks.weights.pause import part_pause
from clawstream.demo.model import make_random_model
from clawstream.runtime.weights.files import get_files
from clawstream.schemas.ids import Version
from clawstream.schemas.records import WeightFile
from clawstream.schemas.settings import Settings
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.position import Position
from clawstream.trainer.versions.directory import VersionState
from clawstream.trainer.versions.publish import DELTA, Publisher

RUN, STEPS = "bench", 3
RATES = {"delta_bytes_ratio": 1e-6, "delta_bytes_ratio_1e5": 1e-5}


def part_deltas(directory: Path, model: Path | None) -> dict[str, Any]:
    """Deltas and full versions at both learning rates. model: None for a toy model and one step."""
    count = 1 if model is None else STEPS
    model = model or make_random_model(directory / "model", dtype="bfloat16")
    ratios, seconds, full_bytes = dict[str, float](), dict[str, list[float]](), 0
    for key, lr in RATES.items():
        steps = list(_steps(model, directory / key, lr, count))
        ratios[key] = statistics.median(s["full_bytes"] / s["delta_bytes"] for s in steps)
        for name in ("delta_seconds", "full_seconds"):
            seconds.setdefault(name, []).extend(s[name] for s in steps)
        full_bytes = int(steps[0]["full_bytes"])
    return {
        **ratios,
        **{name: statistics.median(values) for name, values in seconds.items()},
        "full_bytes": full_bytes,
    }


def _steps(model: Path, directory: Path, lr: float, steps: int) -> Sequence[Mapping[str, float]]:
    """Return the sizes and seconds after each step. Equal files are asserted."""
    torch.manual_seed(0)
    policy = Policy(model, _settings(model, directory, "full", lr, 1).trainer)
    sides = {
        name: Publisher(_settings(model, directory, name, lr, every), policy)
        for name, every in (("full", 1), ("delta", steps + 1))
    }
    found = []
    for number in range(steps + 1):
        if number:
            _step(policy)
        measured, digests = dict[str, float](), list[set[str]]()
        for name, publisher in sides.items():
            began = time.process_time()
            files = publisher.export(_state(number)).files
            read = get_files(files, directory / "cache" / name)
            measured[f"{name}_seconds"] = time.process_time() - began
            measured[f"{name}_bytes"] = _own_bytes(files)
            digests.append(set(read.values()))
        if digests[0] != digests[1]:
            raise SystemExit(f"version {number}: the rebuilt files are not those of a full version")
        if number:
            found.append(measured)
    return found


def _step(policy: Policy) -> None:
    """Take an optimizer step with the policy gradient of random tokens and advantages."""
    ids = torch.randint(0, policy.model.config.vocab_size, (2, 96))
    logprobs = policy.model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    sampled = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    policy.clear_gradients(zeros=False)
    (-(torch.randn(2, 1) * sampled).mean()).backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(policy.trained, policy.settings.max_grad_norm)
    policy.optimizer.step()


def _own_bytes(files: Sequence[WeightFile]) -> float:
    """Return the bytes that the last version added: its delta, or its tensor files."""
    if files[-1].url.endswith(DELTA):
        return files[-1].size_bytes
    return sum(file.size_bytes for file in files if file.url.endswith(".safetensors"))


def _settings(model: Path, directory: Path, side: str, lr: float, full_every: int) -> Settings:
    trainer = {"model_path": model, "device": "cpu", "lr": lr, "full_every": full_every}
    values = {"run_id": RUN, "data_dir": directory / side, "trainer": trainer}
    return Settings.model_validate(values)


def _state(number: int) -> VersionState:
    return VersionState(
        version=Version(RUN, number, 0),
        parent_version=str(Version(RUN, number - 1, 0)) if number else None,
        weights_topic_id="",
        position=Position(topic_id="", next_offset=number, next_batch_seq=number),
    )


PARTS: Mapping[str, Callable[[Path, Path | None], dict[str, Any]]] = {
    "deltas": part_deltas,
    "pause": part_pause,
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="directory of a model in bfloat16")
    parser.add_argument("--check", action="store_true", help="a toy model, without an engine")
    parser.add_argument("--only", choices=PARTS, help="run one part")
    asked = parser.parse_args()
    if (asked.model is None) != asked.check:
        parser.error("name a model directory, or --check")
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = [asked.only] if asked.only else ["deltas"] if asked.check else list(PARTS)
    result: dict[str, Any] = {"benchmark": "weights", "check": asked.check}
    for name in parts:
        with tempfile.TemporaryDirectory(prefix="clawstream-bench-") as directory:
            result |= PARTS[name](Path(directory), asked.model)
    print(json.dumps(rounded(result | {"machine": machine()})))
