"""Advantage estimators by the name of the algorithm in the admission policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trainer.algorithms.advantages.grpo import grpo

ADVANTAGES: Mapping[str, Callable[[Sequence[float], float], list[float]]] = {
    "grpo": grpo,
}
"""(rewards of the group, offset added to the standard deviation) -> one advantage for each reward.
"""
