"""Policy losses by the name of the algorithm in the admission policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.algorithms.losses.truncated_is import truncated_is

LOSSES: Mapping[str, Callable[[Tensor, Tensor, Tensor, float], Tensor]] = {
    "grpo": truncated_is,
}
"""(log-probabilities now, at sampling time, advantages, bound of the ratio) -> loss of each token;
all of shape (tokens,).
"""
