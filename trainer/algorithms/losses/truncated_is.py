"""Policy gradient with token-level truncated importance sampling."""

from __future__ import annotations

from torch import Tensor


def truncated_is(logprobs: Tensor, sampled: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Return -min(exp(logprobs - sampled), bound) * advantages * logprobs, with a detached ratio.

    `sampled` are the recorded log-probabilities of the version that sampled each token, so stale
    and mixed-version sequences need no other correction. The bound limits variance and adds bias.
    Source: Ionides, Truncated Importance Sampling, 2008; here with one ratio for each token.

    Args:
        logprobs: of the trained policy, shape (tokens,), with gradient.
        sampled, advantages: shape (tokens,).
        bound: upper bound of the ratio.

    Returns:
        Shape (tokens,).
    """
    ratio = (logprobs.detach() - sampled).exp().clamp(max=bound)
    return -(ratio * advantages * logprobs)
