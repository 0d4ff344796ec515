"""Log-probabilities in chunks against plain torch, and which heads they are used for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, CohereForCausalLM, LlamaConfig, LlamaForCausalLM

from clawstream.trainer.model import chunked_scores as module
from clawstream.trainer.model.chunked_scores import chunked_scores
from clawstream.trainer.model.scores import head_is_plain

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
}


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> list[Tensor]:
    logprobs = torch.log_softmax(hidden @ weight.T / temperatures[:, None], -1)
    return [logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_give_values_and_gradients_of_all_logits_at_once(
    monkeypatch: pytest.MonkeyPatch, chunk: int, with_entropy: bool
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": 23 * chunk})
    torch.manual_seed(chunk)
    hidden, weight = torch.randn(7, 5), torch.randn(23, 5)
    targets, temperatures = torch.randint(23, (7,)), torch.rand(7) + 0.3
    of = torch.randn(2, 7) if with_entropy else torch.stack([torch.randn(7), torch.zeros(7)])
    found = []
    for compute in (plain, chunked_scores):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        more = {} if compute is plain else {"dtype": torch.float32, "with_entropy": with_entropy}
        values = compute(h, w, targets, temperatures, **more)
        gradients = torch.autograd.grad((torch.stack(list(values)) * of).sum(), (h, w))
        found.append([*values[: 1 + with_entropy], *gradients])
    for expected, got in zip(*found, strict=True):
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_head_and_bfloat16_products() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    weight, targets, one = torch.randn(11, 8), torch.tensor([0, 4, 10]), torch.ones(3)
    exact = plain(hidden, weight, targets, one)[0]
    narrow, _ = chunked_scores(hidden, weight, targets, one, torch.bfloat16, with_entropy=False)
    assert torch.allclose(narrow, exact, atol=0.1) and not torch.equal(narrow, exact)
    (got,) = torch.autograd.grad(narrow.sum(), hidden)
    assert torch.allclose(got, torch.autograd.grad(exact.sum(), hidden)[0], atol=0.1)


def test_only_a_head_that_is_a_plain_matrix_is_computed_in_chunks() -> None:
    tied = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
    assert head_is_plain(tied)
    assert not head_is_plain(CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)))
    tied.lm_head.bias = torch.nn.Parameter(torch.zeros(40))
    assert not head_is_plain(tied)
