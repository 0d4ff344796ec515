"""Packed rows against one padded row for each sequence, and the models that take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.algorithms.registry import load
from clawstream.trainer.data.packing import pack
from clawstream.trainer.data.sequences import Tokens, TrainingSequence
from clawstream.trainer.model.measurement import FirstPasses
from clawstream.trainer.model.packed_attention import (
    block_mask,
    not_packable,
    structure_of,
    use_packing,
)
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.update import update
from clawstream.trainer.parallel.processes import ONE

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).save_pretrained(directory)
    return directory


def group(index: int, rng: np.random.Generator) -> list[TrainingSequence]:
    """A linear conversation, one that continues it, and two forks, at several temperatures."""
    ids = rng.integers(2, 60, 40).astype(np.int32)
    other = rng.integers(2, 60, 12).astype(np.int32)
    paths = [ids[:25], ids[:38], [*ids[:20], *other[:7]], [*ids[:9], *other]]
    return [sequence(np.array(path, np.int32), index, rng) for path in paths]


def sequence(ids: np.ndarray[Any, Any], index: int, rng: np.random.Generator) -> TrainingSequence:
    n = len(ids)
    tokens = Tokens(
        ids,
        (np.arange(n) > 4) & (rng.random(n) < 0.6) | (np.arange(n) == n - 1),
        rng.normal(-3.0, 0.5, n).astype(np.float32),
        rng.choice(np.array([0.7, 1.0, np.nan], np.float32), n),
        np.array([f"r/{v}.0" for v in rng.integers(0, 3, n)], object),
        np.zeros(n, np.int32),
    )
    advantages = rng.normal(size=int(tokens.mask.sum())).astype(np.float32)
    return TrainingSequence("t", tokens, advantages, group=index)


def settings(**more: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"device": "cpu", "minibatches": 1, **more})


def assert_equal_gradients(got: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a is not None and b is not None
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize("budget", [50, 16384])
@pytest.mark.parametrize("name", ["cispo", "gspo"])
def test_the_gradient_is_that_of_plain_rows(model_dir: Path, name: str, budget: int) -> None:
    rng = np.random.default_rng(budget)
    sequences = [s for index in range(3) for s in group(index, rng)]
    algorithm = load(name, {"entropy_coef": 0.1, "clip_low": 0.9, "clip_high": 9.0}, ())
    found, seen = [], []
    for packing in ("rows", "tree"):
        policy = Policy(model_dir, settings(packing=packing, micro_batch_tokens=budget))
        passes = FirstPasses(sequences, 0)
        (step,) = update(policy, sequences, 0, algorithm, 1e-6, "r/2.0", passes).steps
        found.append((step, [p.grad for p in policy.model.parameters()]))
        seen.append([p.logprobs.tolist() for _, p in passes.gathered(ONE) if p is not None])
    (rows, expected), (tree, got) = found
    assert [len(values) for values in seen[0]] == [s.trained_tokens for s in sequences]
    assert seen[1] == [pytest.approx(values, abs=1e-4) for values in seen[0]]
    assert tree.loss == pytest.approx(rows.loss, rel=1e-4)
    assert rows.computed_tokens == tree.sequence_tokens > 1.3 * tree.computed_tokens
    assert_equal_gradients(got, expected)


@pytest.mark.parametrize("more", [{"lora": {"rank": 4}}, {"activation_checkpointing": True}])
def test_the_gradient_is_that_of_plain_rows_with(model_dir: Path, more: dict[str, Any]) -> None:
    sequences = group(0, np.random.default_rng(5))
    found = []
    for packing in ("rows", "tree"):
        policy = Policy(model_dir, settings(packing=packing, **more))
        assert policy.scores.packed == (packing == "tree")
        update(policy, sequences, 0, load("cispo", {}, ()), 1e-2, None)
        update(policy, sequences, 1, load("cispo", {}, ()), 1e-2, None)
        found.append([p.grad for p in policy.trained])
    assert_equal_gradients(found[1], found[0])


def test_bfloat16_passes_of_packed_rows_are_as_near_as_those_of_plain_rows(model_dir: Path) -> None:
    sequences = group(0, np.random.default_rng(1))
    norms = [
        update(
            Policy(model_dir, settings(**more)),
            sequences,
            0,
            load("cispo", {}, ()),
            1e-6,
            None,
        )
        .steps[0]
        .grad_norm
        for more in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "packing": "rows"})
    ]
    assert norms[1:] == [pytest.approx(norms[0], rel=0.05)] * 2


def test_an_update_is_repeated_bit_for_bit(model_dir: Path) -> None:
    sequences = group(0, np.random.default_rng(2)) + group(1, np.random.default_rng(3))
    weights = []
    for _ in range(2):
        policy = Policy(model_dir, settings(lr=1e-3, micro_batch_tokens=60))
        update(policy, sequences, 0, load("cispo", {}, ()), 1e-3, None)
        weights.append(list(policy.model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_models_whose_layers_do_not_see_the_whole_prefix_get_rows(tmp_path: Path) -> None:
    packable = LlamaForCausalLM(LlamaConfig(**SHAPE))
    window = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))
    mixed = Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    )
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=60, hidden_size=8, num_hidden_layers=1))
    assert not_packable(packable) is None
    assert "sliding" in str(not_packable(window)) and "sliding" in str(not_packable(mixed))
    assert not_packable(recurrent) is not None
    window.save_pretrained(tmp_path)
    policy = Policy(tmp_path, settings())
    assert not policy.scores.packed
    sequences = group(0, np.random.default_rng(4))
    (step,) = update(policy, sequences, 0, load("cispo", {}, ()), 1e-6, None).steps
    assert step.computed_tokens == step.sequence_tokens


def test_a_model_that_loses_the_structure_of_a_row_gets_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    forward = LlamaAttention.forward

    def without(self: LlamaAttention, *, structure: object = None, **known: Any) -> Any:
        return forward(self, **known)

    with monkeypatch.context() as patched:
        patched.setattr(LlamaAttention, "forward", without)
        assert not use_packing(model, settings())
        assert model.config._attn_implementation == "sdpa"
    assert use_packing(model, settings())


@examples(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=4))
def test_the_tiles_of_a_row_are_those_that_torch_finds_pair_by_pair(
    forks: list[tuple[int, int]],
) -> None:
    """forks: tokens shared with the first sequence, and tokens behind them."""
    first = np.full(400, 2, np.int32)
    sequences = [
        np.concatenate([first[:shared], np.full(added, 3 + i, np.int32)])
        for i, (shared, added) in enumerate(forks)
    ]
    ends = pack([first, *sequences]).ends
    size, end_of = len(ends), torch.from_numpy(ends)
    expected = create_block_mask(
        lambda _b, _h, query, key: (key <= query) & (query < end_of[key]),
        *(None, None, size, size),
        device="cpu",
    )
    got = block_mask(ends, torch.device("cpu"))
    assert got.shape == expected.shape and got.BLOCK_SIZE == expected.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(tiles(got, kind), tiles(expected, kind)), kind


def tiles(mask: Any, kind: str) -> Tensor:
    """Return for each row of tiles the indexes that count, -1 behind them."""
    number, indexes = getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices")
    assert number.dtype == indexes.dtype == torch.int32
    return torch.where(torch.arange(indexes.shape[-1]) < number.unsqueeze(-1), indexes, -1)


def test_a_row_of_one_branch_has_no_structure() -> None:
    ids = np.arange(300, dtype=np.int32)
    for device in ("cpu", "cuda"):
        assert structure_of(pack([ids, ids[:200]]), torch.device(device)) is None
    assert structure_of(pack([ids, ids[1:]]), torch.device("cpu")) is not None
