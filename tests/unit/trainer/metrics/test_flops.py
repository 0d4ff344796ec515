"""Model FLOPs counted by hand."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from clawstream.trainer.metrics.flops import TrainingFlops


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights, head = 4 * 8 * 8 + 3 * 8 * 16, 8 * 10  # attention and MLP; not the embedding
    pairs = (3 * 3 + 5 * 5) / 2
    multiplied = weights * 8 + head * 5
    assert TrainingFlops(model).of(8, 5, pairs) == 6 * multiplied + 12 * 8 * pairs
    model.requires_grad_(False)
    assert TrainingFlops(model).of(8, 5, pairs) == 4 * multiplied + 12 * 8 * pairs


def test_a_tied_head_counts_for_trained_tokens_only() -> None:
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    flops = TrainingFlops(LlamaForCausalLM(config))
    assert flops.of(8, 5, 0.0) - flops.of(8, 0, 0.0) == 6 * 8 * 10 * 5
    assert flops.of(8, 0, 0.0) == 6 * (4 * 8 * 8 + 3 * 8 * 16) * 8
