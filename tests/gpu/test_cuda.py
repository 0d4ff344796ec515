"""The update of the trainer on a CUDA device equals the one on a CPU.

It needs torch, transformers, safetensors, numpy, pytest, and pydantic for the settings:

    PYTHONPATH=. python -m pytest -c /dev/null --noconftest tests/gpu
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from schemas.settings import TrainerSettings
from trainer.algorithms.registry import load
from trainer.data.sequences import Tokens, TrainingSequence
from trainer.model.policy import Policy
from trainer.model.update import update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
VOCABULARY = 500


def model(directory: Path) -> Path:
    """Write a Qwen3 of two layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, initializer_range=0.1,
        eos_token_id=1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def sequences(groups: int, members: int, prompt: int, reply: int) -> list[TrainingSequence]:
    """Return replies to the prompts of groups; the second half of a group shares a first turn."""
    rng, found = np.random.default_rng(0), []
    for group in range(groups):
        shared, turn = (rng.integers(2, VOCABULARY, n) for n in (prompt, reply))
        for member in range(members):
            parts = [shared, *([turn] if member >= members // 2 else [])]
            ids = np.concatenate([*parts, rng.integers(2, VOCABULARY, reply)]).astype(np.int32)
            n = len(ids)
            tokens = Tokens(
                ids,
                np.arange(n) >= n - reply,
                rng.normal(-6.0, 0.3, n).astype(np.float32),
                np.full(n, 0.8, np.float32),
                np.full(n, "r/0.0", object),
                np.zeros(n, np.int32),
            )
            advantages = np.full(reply, rng.normal(), np.float32)
            found.append(TrainingSequence(f"t{group}-{member}", tokens, advantages, group=group))
    return found


def updated(directory: Path, device: str, **settings: str) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of one optimizer step without clipping."""
    given = {"device": device, "minibatches": 1, "max_grad_norm": 1e9, **settings}
    policy = Policy(directory, TrainerSettings.model_validate(given))
    batch = sequences(groups=3, members=4, prompt=150, reply=40)
    (step,) = update(policy, batch, 0, {None: load("cispo", {}, ())}, 1e-6, None).steps
    assert step.loss is not None
    return step.loss, [p.grad.float().cpu() for p in policy.trained if p.grad is not None]


@pytest.mark.parametrize("packing", ["tree", "rows"])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_an_update_equals_that_on_a_cpu(
    tmp_path: Path, packing: str, dtype: str, exact: float
) -> None:
    directory = model(tmp_path / "model")
    loss, gradients = updated(directory, "cuda", packing=packing, dtype=dtype)
    expected, of_cpu = updated(directory, "cpu", packing="rows")
    assert loss == pytest.approx(expected, rel=exact)
    for found, gradient in zip(gradients, of_cpu, strict=True):
        assert (found - gradient).norm() <= exact * gradient.norm()
