"""Log-probabilities of chosen tokens from hidden states; the logits exist in chunks only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 12 * 2**20, "cuda": 128 * 2**20}
"""Logits of a chunk by device.

CPU: 48 MiB in float32, 82 tokens at a vocabulary of 152,000. Below 32 MiB the process grows by
more: the C library keeps such blocks when they are freed. CUDA: 512 MiB, 883 tokens. The backward
pass adds each chunk's gradient to that of the whole head, so small chunks wait for memory.
"""


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    dtype: torch.dtype,
    *,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target, and the entropy of its distribution.

    The distribution is softmax(hidden @ weight.T / temperature). The backward pass computes the
    logits again, chunk by chunk, so neither pass holds more than `CHUNK_ELEMENTS` of them.

    Args:
        hidden: (tokens, width).
        weight: (vocabulary, width).
        targets: (tokens,), int64.
        temperatures: (tokens,), float32.
        dtype: of the matrix products; everything else is float32.
        with_entropy: False spares the entropy, which is 0 then.

    Returns:
        Both of shape (tokens,), float32, with gradient to hidden and weight; the entropy in nats.
    """
    logprobs, entropy = ChunkedScores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperatures, dtype, with_entropy
    )
    return logprobs, entropy


class ChunkedScores(torch.autograd.Function):
    """With p = softmax(s), H its entropy, y the target and gradients g of log p[y] and e of H:
    ds = g (onehot(y) - p) - e p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        dtype: torch.dtype,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, normalizers = torch.empty_like(temperatures), torch.empty_like(temperatures)
        entropy = torch.zeros_like(temperatures)
        narrow = weight.to(dtype)
        for part in _chunks(targets, weight):
            scores = _scores(hidden[part], narrow, temperatures[part])
            normalizers[part] = scores.logsumexp(-1)
            chosen = scores.gather(-1, targets[part, None]).squeeze(-1)
            logprobs[part] = chosen - normalizers[part]
            if with_entropy:
                p = scores.sub_(normalizers[part, None]).exp_()
                entropy[part] = -torch.special.xlogy(p, p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperatures, normalizers, entropy)
        ctx.dtype, ctx.with_entropy = dtype, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, normalizers, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = gradients
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        narrow = weight.to(ctx.dtype)
        for part in _chunks(targets, weight):
            scale = (of_logprobs[part] / temperatures[part]).unsqueeze(-1)
            p = _scores(hidden[part], narrow, temperatures[part])
            p.sub_(normalizers[part, None]).exp_()
            if ctx.with_entropy:
                slope = (of_entropy[part] / temperatures[part]).unsqueeze(-1)
                d = torch.special.xlogy(p, p).mul_(-slope)
                d.addcmul_(p, -(scale + slope * entropy[part, None]))
            else:
                d = p.mul_(-scale)
            d = d.scatter_add_(-1, targets[part, None], scale).to(ctx.dtype)
            if d_hidden is not None:
                d_hidden[part] = d @ narrow
            if d_weight is not None:
                inputs = hidden[part].to(ctx.dtype)
                if d.dtype == d_weight.dtype:
                    d_weight.addmm_(d.T, inputs)
                else:
                    d_weight += d.T @ inputs
        return d_hidden, d_weight, None, None, None, None


def _chunks(targets: Tensor, weight: Tensor) -> Iterator[slice]:
    tokens, size = len(targets), max(1, CHUNK_ELEMENTS[weight.device.type] // len(weight))
    return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))


def _scores(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """Return logits / temperature, float32."""
    scores = (hidden.to(weight.dtype) @ weight.T).float()
    return scores.div_(temperatures.unsqueeze(-1))
