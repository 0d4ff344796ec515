"""The update of the trainer on a CUDA device equals the one on a CPU.

It needs torch, transformers, safetensors, numpy, pytest, and pydantic for the settings:

    PYTHONPATH=. python -m pytest -c /dev/null --noconftest tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.critic import Critic
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update, with_old_logprobs

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


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """Fail where flex attention is compiled so often that torch gives up and runs it eagerly."""
    limits = torch._dynamo.config
    before = limits.fail_on_recompile_limit_hit
    torch._dynamo.reset()
    counters.clear()
    limits.fail_on_recompile_limit_hit = True
    yield
    limits.fail_on_recompile_limit_hit = before


def policy_of(directory: Path, device: str, **settings: Any) -> Policy:
    """Return a policy that takes one optimizer step a batch, without clipping."""
    given = {"device": device, "minibatches": 1, "max_grad_norm": 1e9, **settings}
    return Policy(directory, TrainerSettings.model_validate(given))


def train(policy: Policy, batch: list[TrainingSequence], lr: float = 1e-6) -> float:
    """Train a batch; return the loss."""
    (step,) = update(policy, batch, 0, load("cispo", {}, ()), lr, None).steps
    assert step.loss is not None
    return step.loss


def updated(directory: Path, device: str, **settings: Any) -> tuple[float, list[torch.Tensor]]:
    """Return loss and gradients of one optimizer step."""
    policy = policy_of(directory, device, **settings)
    loss = train(policy, sequences(groups=3, members=4, prompt=150, reply=40))
    return loss, [p.grad.float().cpu() for p in policy.trained if p.grad is not None]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], exact: float) -> None:
    """Compare tensors by the norm of their difference."""
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= exact * other.norm()


@pytest.mark.parametrize("packing", ["tree", "rows"])
@pytest.mark.parametrize(("dtype", "exact"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_an_update_equals_that_on_a_cpu(
    tmp_path: Path, packing: str, dtype: str, exact: float
) -> None:
    directory = model(tmp_path / "model")
    loss, gradients = updated(directory, "cuda", packing=packing, dtype=dtype)
    expected, of_cpu = updated(directory, "cpu", packing="rows")
    assert loss == pytest.approx(expected, rel=exact)
    assert_near(gradients, of_cpu, exact)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": True},
        {"lora": {"rank": 4, "alpha": 8.0}},
        {"compile": True},
        {"compile": True, "packing": "rows"},
        {"compile": True, "activation_checkpointing": True, "lora": {"rank": 4, "alpha": 8.0}},
    ],
)
def test_other_ways_to_compute_equal_those_on_a_cpu(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    directory = model(tmp_path / "model")
    loss, gradients = updated(directory, "cuda", **settings)
    expected, of_cpu = updated(directory, "cpu", **settings | {"packing": "rows"})
    assert loss == pytest.approx(expected, rel=1e-3)
    # The first matrix of an adapter has no gradient while the second one is zero.
    assert_near(
        [g for g, c in zip(gradients, of_cpu, strict=True) if c.norm()],
        [c for c in of_cpu if c.norm()],
        1e-3,
    )


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"compile": True}])
def test_rows_of_many_lengths_are_compiled_a_few_times(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    policy = policy_of(model(tmp_path / "model"), "cuda", **settings)
    for length in range(12):
        batch = sequences(groups=2, members=4, prompt=100 + 57 * length, reply=20 + 13 * length)
        train(policy, with_old_logprobs(policy, batch))
    assert 0 < counters["stats"]["unique_graphs"] <= 6


def test_values_of_a_critic_equal_those_on_a_cpu(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    batch, found = sequences(groups=2, members=4, prompt=150, reply=40), []
    for device in ("cuda", "cpu"):
        critic = Critic(directory, TrainerSettings(), torch.device(device), 0)
        with torch.no_grad():
            critic.model.weight.copy_(torch.linspace(-1, 1, len(critic.model.weight)))
        found.append([torch.from_numpy(s.values) for s in critic.score(batch)])
    assert_near(found[0], found[1], 1e-3)


def test_a_resumed_policy_continues_as_without_a_break(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    first, second = (
        sequences(groups=2, members=4, prompt=prompt, reply=40) for prompt in (150, 90)
    )
    whole = policy_of(directory, "cuda")
    train(whole, first, lr=1e-3)
    dcp.save(dict(whole.state), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    train(whole, second, lr=1e-3)
    resumed = policy_of(directory, "cuda")
    dcp.load(dict(resumed.state), checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    train(resumed, second, lr=1e-3)
    for (name, expected), (_, found) in zip(
        whole.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(found, expected), name


def test_a_version_has_the_same_bytes_as_from_a_cpu(tmp_path: Path) -> None:
    directory = model(tmp_path / "model")
    for device in ("cuda", "cpu"):
        policy = policy_of(directory, device)
        policy.save(tmp_path / device, policy.served_dtypes("bfloat16"))
    files = sorted(file.name for file in (tmp_path / "cpu").iterdir())
    assert "model.safetensors" in files
    for name in files:
        assert (tmp_path / "cuda" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes()
