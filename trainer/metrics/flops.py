"""Model FLOPs of training, and the peak of the device. Approximations for dense models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

PEAK_TFLOPS: Mapping[str, float] = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "A10": 125,
    "L4": 121,
    "V100": 125,
}
"""Dense tensor-core peak in bfloat16 (V100: float16) by a part of the device's name, from NVIDIA's
data sheets. The first match counts."""


class TrainingFlops:
    """FLOPs of the forward and backward passes of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Read the sizes of the model."""
        # The lookup of an embedding multiplies nothing; a tied one counts as the head.
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        outside = [module.weight for module in (embedding, head) if module is not None]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        inside = [p for p in matrices if all(p is not weight for weight in outside)]
        self._layer_flops = sum(map(_flops_a_token, inside))
        self._head_flops = 0.0 if head is None else _flops_a_token(head.weight)
        config = model.config.get_text_config()
        heads = getattr(config, "num_attention_heads", 0)
        size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // max(
            heads, 1
        )
        layers = getattr(config, "num_hidden_layers", 0)
        self._attention_flops: float = 12.0 * layers * heads * size

    def of(self, tokens: int, trained: int, pairs: float) -> float:
        """Return the FLOPs of passes.

        6 for each weight of a matrix and each token: 2 forward, 2 for the gradient of its input,
        and 2 for its own gradient, which a frozen weight does not have. The head counts for trained
        tokens only: no other token needs logits. Attention: two products over heads x head size for
        each pair in each layer, times 2 forward and 4 backward. Source: Chowdhery et al., "PaLM",
        arXiv 2204.02311, appendix B, with the pairs that are attended.

        Args:
            tokens: computed tokens.
            trained: trained tokens.
            pairs: of query and key in a layer, length^2 / 2 for a causal sequence.
        """
        return (
            self._layer_flops * tokens + self._head_flops * trained + self._attention_flops * pairs
        )


def _flops_a_token(weight: Tensor) -> float:
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()


def peak_flops(device: torch.device, tflops: float | None, devices: int = 1) -> float | None:
    """Return the peak of all devices together, FLOPs a second; None if it is unknown.

    Args:
        device: one that trains.
        tflops: the user's own value for one, which takes precedence.
        devices: as many as train.
    """
    if tflops is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        tflops = next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)
    return None if tflops is None else tflops * 1e12 * devices
