"""Model FLOPs counted by hand."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM

from trainer.metrics.flops import TrainingFlops


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    config = LlamaConfig(
        vocab_size=10, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    weights = 4 * 8 * 8 + 3 * 8 * 16 + 8 * 10  # attention, MLP, head; not the embedding
    attention = 12 * 8 * (3 * 3 + 5 * 5) / 2
    assert TrainingFlops(model).of(8, (3 * 3 + 5 * 5) / 2) == 6 * weights * 8 + attention
    model.requires_grad_(False)
    assert TrainingFlops(model).of(8, (3 * 3 + 5 * 5) / 2) == 4 * weights * 8 + attention
