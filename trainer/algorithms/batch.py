"""What advantage estimators and losses see of a batch.

Both views are flat: one value for each trained token, without padding. The tokens of a sequence are
adjacent and in order, and so are the sequences of a trajectory. Prompt, environment and untrainable
tokens are not in the views; they only are context of the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clawstream.schemas.algorithms import AlgorithmSettings

Floats = NDArray[np.float64]
Indexes = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchView:
    """A whole batch, for an advantage estimator. T tokens, Q sequences, S steps, M trajectories.

    An optional column is None if the trainer has no model for it.

    Attributes:
        sampled_logprobs: (T,), of the version that sampled the token.
        sequence: (T,), index of the token's sequence, ascending from 0.
        step: (T,), index of the token's step.
        position: (T,), index of the token within its sequence, context included.
        staleness: (T,), versions between the trained and the sampling one; NaN if unknown.
        ref_logprobs: (T,), of a frozen reference policy.
        teacher_logprobs: (T,), of a teacher.
        values: (T,), a critic's estimate of the return before the token is sampled.
        sequence_trajectory: (Q,), index of the trajectory.
        cut: (Q,), bool; whether its last reply ended at the limit of tokens.
        step_trajectory: (S,), index of the trajectory. The steps of a trajectory are adjacent and
            in order; steps without a trained token are included.
        turn: (S,), index of the step within its trajectory, from 0.
        step_rewards: (S,), NaN where a step has none.
        group: (M,), index of the trajectory's group.
        rewards: (M,), training reward of the trajectory; NaN if it has none.
    """

    sampled_logprobs: Floats
    sequence: Indexes
    step: Indexes
    position: Indexes
    staleness: Floats
    sequence_trajectory: Indexes
    cut: NDArray[np.bool_]
    step_trajectory: Indexes
    turn: Indexes
    step_rewards: Floats
    group: Indexes
    rewards: Floats
    ref_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    values: Floats | None = None

    @property
    def trajectory(self) -> Indexes:
        """Index of each token's trajectory, shape (T,)."""
        return self.sequence_trajectory[self.sequence]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossBatch:
    """Whole sequences of a minibatch, for a loss. T tokens, Q sequences.

    Attributes:
        logprobs: (T,), of the trained policy, with gradient.
        sampled_logprobs: (T,), of the version that sampled the token.
        old_logprobs: (T,), of the policy before the first optimiser step on the batch; the sampled
            ones unless the trainer recomputes them.
        advantages: (T,).
        mask: (T,), bool; False for a token without a usable gradient. It stays in the denominator
            of each mean over the tokens of the minibatch.
        sequence: (T,), int64, index of the token's sequence.
        step: (T,), int64, index of the token's step in its trajectory.
        lengths: (Q,), trained tokens of each sequence, masked ones included.
        ref_logprobs, teacher_logprobs: (T,), or None without that model.
        entropy: (T,), of the policy's distribution, in nats, with gradient; None if not asked for.
    """

    logprobs: Tensor
    sampled_logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    sequence: Tensor
    step: Tensor
    lengths: Tensor
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the unmasked tokens of each sequence: (T,) to (Q,)."""
        zeros = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.sequence, values.masked_fill(~self.mask, 0.0))

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the unmasked tokens of each sequence: (T,) to (Q,).

        It is 0 for a sequence without one.
        """
        counts = self.sequence_sum(torch.ones_like(values))
        return self.sequence_sum(values) / counts.clamp(min=1.0)


LossFunction = Callable[
    [LossBatch, AlgorithmSettings], Tensor | tuple[Tensor, Mapping[str, Tensor]]
]
"""(whole sequences, settings) -> loss of each token, shape (tokens,).

A user's own may return a pair: also metrics, with a value for each token.
"""
