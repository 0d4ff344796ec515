"""Policy gradient with token-level truncated importance sampling."""

from __future__ import annotations

from torch import Tensor


def truncated_is(logprobs: Tensor, sampled: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """-min(exp(logprobs - sampled), bound) * advantages * logprobs; the ratio is a weight: no
    gradient flows through it.

    All arguments and the result have shape (tokens,). sampled: recorded log-probabilities, of
    whatever version sampled each token, so stale and mixed-version sequences need no other
    correction. The bound limits variance at the price of bias. Source: Ionides, Truncated
    Importance Sampling, 2008; here one ratio for each token.
    """
    ratio = (logprobs.detach() - sampled).exp().clamp(max=bound)
    return -(ratio * advantages * logprobs)
