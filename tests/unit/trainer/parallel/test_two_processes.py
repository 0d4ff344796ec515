"""Two processes with sharded weights train as one process does."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from support import parallel_run, parallel_training
from support.parallel_run import CRITIC
from support.parallel_training import VARIANTS, sequences, train
from support.trainer_runs import MemoryWeightLog, begin, ids, settings

from clawstream.demo.model import make_random_model
from clawstream.schemas.tokens import unpack_logprobs
from clawstream.trainer.data.minibatches import micro_batches, shares
from clawstream.trainer.parallel.processes import ONE, Processes
from clawstream.trainer.step import train_batch

ROOT = Path(__file__).parents[4]


def torchrun(script: str | None, *arguments: Path) -> None:
    """Run a script in two processes."""
    python = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [*python, "--standalone", str(script), *map(str, arguments)]
    subprocess.run(command, check=True, env=environment)


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers in lists and dictionaries, each with the last key on its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, key)
    else:
        yield key, value


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    model = make_random_model(tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    torchrun(parallel_training.__file__, model, two)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in VARIANTS:
        train(model, one, name, ONE)
        steps = [json.loads((path / f"{name}.json").read_text()) for path in (one, two)]
        for (key, alone), (of, shared) in zip(*map(leaves, steps), strict=True):
            assert key == of
            if key in ("computed_tokens", "flops") and "packing" not in VARIANTS[name]:
                continue  # sequences of two processes share no prefix
            exact = 1e-5 if key == "loss" else 1e-4
            expected = None if alone is None else pytest.approx(alone, rel=exact, abs=exact)
            assert shared == expected, (name, key)
        file = "adapter_model.safetensors" if "lora" in VARIANTS[name] else "model.safetensors"
        weights, others = (load_file(path / name / file) for path in (one, two))
        assert weights.keys() == others.keys()
        for key, tensor in weights.items():
            assert (tensor - others[key]).abs().max() < 1e-4, (name, key)
    torch.set_num_threads(before)


@pytest.mark.slow
def test_one_process_resumes_the_checkpoint_of_two(tmp_path: Path) -> None:
    model, data_dir = make_random_model(tmp_path / "model"), tmp_path / "two"
    torchrun(parallel_run.__file__, model, data_dir)
    published, trained = pickle.loads((data_dir / "versions.pickle").read_bytes())
    log, plain = MemoryWeightLog(published=published), MemoryWeightLog()
    assert [v.checkpoint_version for v in published] == ["r/0.0", "r/0.0", "r/0.0", "r/2.0"]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    for home, weight_log, first in ((data_dir, log, parallel_run.BATCHES), (tmp_path, plain, 0)):
        run = begin(settings(home, model, **CRITIC), weight_log)
        for seq in range(first, 5):
            train_batch(run, parallel_run.batch(seq))
            if run.version_due:
                run.publish()
        run.end()
    torch.set_num_threads(before)
    assert ids(log) == ["0.0", "1.0", "2.0", "3.0", "4.1", "5.1"]
    alone_by_id = {(t.version_id, t.step_id): t for t in plain.trained}
    assert {t.version_id for t in trained} == {"r/2.0", "r/3.0"}, "the critic warms up before"
    for shared_tokens in trained:
        other = alone_by_id[shared_tokens.version_id, shared_tokens.step_id]
        assert shared_tokens.updates == other.updates
        for name in ("logprobs", "advantages"):
            values, expected = (unpack_logprobs(getattr(t, name)) for t in (shared_tokens, other))
            assert values == pytest.approx(expected, abs=1e-3)
    for name, exact in (("loss", 1e-3), ("value_loss", 1e-4), ("explained_variance", 1e-2)):
        shared, alone = ([v.metrics.get(name) for v in found.published] for found in (log, plain))
        assert None not in shared[2:]
        assert shared == [one and pytest.approx(one, rel=exact, abs=1e-5) for one in alone]


@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
)
def test_every_sequence_has_one_process_and_all_have_as_many_passes(
    lengths: list[int], size: int, groups: int, packed: bool
) -> None:
    rows = [
        replace(sequence, group=i % groups)
        for i, length in enumerate(lengths)
        for sequence in sequences(0, (length,))
    ]
    parts = [[*Processes(rank, size).passes(rows, 80, packed=packed)] for rank in range(size)]
    assert len({len(part) for part in parts}) == 1
    counted = [s for part in parts for sequence, counts in part for s in sequence if counts]
    assert sorted(map(id, counted)) == sorted(map(id, rows))
    shared = shares(rows, size, packed=packed)
    holders = Counter(group for part in shared for group in {s.group for s in part})
    if packed:
        assert set(holders.values()) == {1} or len(holders) < size
        return
    loads = [sum(len(s.tokens.ids) for s in part) for part in shared]
    assert max(loads) - min(loads) <= max(lengths)
    if size == 1:
        assert [p for p, _ in parts[0]] == micro_batches(rows, 80)
