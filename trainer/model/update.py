"""Train one batch: minibatches, loss, gradient, optimiser steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.data.micro_batch import collate
from trainer.data.minibatches import micro_batches, minibatches
from trainer.data.sequences import TrainingSequence
from trainer.metrics import StepStats, UpdateStats
from trainer.model.policy import Policy

Loss = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""See `trainer.algorithms.losses`."""


def update(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    batch_seq: int,
    loss: Loss,
    lr: float,
    parent_version: str | None,
) -> UpdateStats:
    """Train one batch with one optimiser step for each minibatch.

    A step with a non-finite loss or gradient is skipped: weights and optimiser stay unchanged.

    Args:
        policy: it is changed.
        sequences: of the batch.
        batch_seq: number of the batch; the shuffle depends on it.
        loss: the policy loss of the algorithm.
        lr: learning rate.
        parent_version: the version with exactly these weights; None after an update since it.
    """
    began = time.perf_counter()
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    s = policy.settings
    steps: list[StepStats] = []
    for part in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
        unchanged = all(step.skipped is not None for step in steps)
        steps.append(_step(policy, part, loss, parent_version if unchanged else None))
    return UpdateStats(steps=tuple(steps), seconds=time.perf_counter() - began)


def _step(
    policy: Policy, sequences: Sequence[TrainingSequence], loss: Loss, parent_version: str | None
) -> StepStats:
    """Take one optimiser step; the loss is the mean over the trained tokens of `sequences`.

    Sequences with advantage 0 count in that mean but add nothing to loss or gradient, so they need
    no forward or backward pass.
    """
    s = policy.settings
    tokens = sum(sequence.trained_tokens for sequence in sequences)
    learned = [sequence for sequence in sequences if sequence.advantage != 0.0]
    total, truncated, now_at_zero = 0.0, 0, 0
    differences: list[float] = []
    same_version: list[float] = []
    policy.clear_gradients(zeros=not learned)
    for part in micro_batches(learned, s.micro_batch_tokens):
        batch = collate(part, s.temperature, policy.device)
        logprobs = policy.logprobs(batch)
        # Minus infinity times a ratio of zero is NaN. Such a token has no usable gradient.
        at_zero = torch.isneginf(logprobs.detach())
        possible = logprobs.masked_fill(at_zero, 0.0)
        losses = loss(possible, batch.logprobs, batch.advantages, s.is_truncation)
        mean = losses.masked_fill(at_zero, 0.0).sum() / tokens
        mean.backward()  # type: ignore[no-untyped-call]
        total += mean.item()
        difference = (logprobs.detach() - batch.logprobs).masked_fill(at_zero, 0.0)
        truncated += int((difference > math.log(s.is_truncation)).sum())
        now_at_zero += int(at_zero.sum())
        if parent_version is not None:
            size = difference.abs()
            differences.append(size.max().item())
            same = torch.from_numpy(batch.versions == parent_version).to(size.device)
            if bool(same.any()):
                same_version.append(size[same].max().item())
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), s.max_grad_norm).item()
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        policy.optimizer.step()
    return StepStats(
        tokens=tokens,
        passed_tokens=sum(sequence.trained_tokens for sequence in learned),
        loss=total if finite else None,
        grad_norm=norm if finite else None,
        skipped=None if finite else f"loss {total}, gradient norm {norm}",
        truncated_tokens=truncated,
        now_at_zero=now_at_zero,
        logp_diff=max(differences, default=None) if finite else None,
        logp_diff_same_version=max(same_version, default=None) if finite else None,
    )
