"""Train one batch: minibatches, loss, gradient, optimiser steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from trainer.algorithms.batch import LossBatch
from trainer.algorithms.objective import MinibatchSize, objective
from trainer.algorithms.registry import LoadedAlgorithm
from trainer.data.micro_batch import collate
from trainer.data.minibatches import minibatches
from trainer.data.sequences import TrainingSequence
from trainer.metrics.flops import TrainingFlops, peak_flops
from trainer.metrics.statistics import StepStats, UpdateStats
from trainer.model.measurement import Measurement
from trainer.model.policy import Policy
from trainer.model.scores import logprobs_of
from trainer.parallel.processes import Processes
from trainer.parallel.sharding import whole


def update(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    batch_seq: int,
    algorithm: LoadedAlgorithm,
    lr: float,
    parent_version: str | None,
) -> UpdateStats:
    """Train one batch with one optimiser step for each minibatch.

    A step with a non-finite loss or gradient is skipped: weights and optimiser stay unchanged.

    Args:
        policy: it is changed.
        sequences: of the batch, with advantages.
        batch_seq: number of the batch; the shuffle depends on it.
        algorithm: its loss and settings.
        lr: learning rate.
        parent_version: the version with exactly these weights; None after an update since it.
    """
    began = time.perf_counter()
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    s = policy.settings
    if s.recompute_old_logprobs:
        sequences = with_old_logprobs(policy, sequences)
    steps, flops = list[StepStats](), TrainingFlops(policy.model)
    for part in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
        unchanged = all(step.skipped is not None for step in steps)
        parent = parent_version if unchanged else None
        steps.append(_step(policy, part, algorithm, parent, flops))
    return UpdateStats(
        steps=tuple(steps),
        seconds=time.perf_counter() - began,
        peak_flops=peak_flops(policy.device, s.peak_tflops, policy.processes.size),
    )


def with_old_logprobs(
    policy: Policy, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Return the sequences with the log-probabilities of the policy as it is."""
    columns = logprobs_of(
        sequences,
        policy.logprobs,
        policy.settings,
        policy.device,
        policy.processes,
        packed=policy.scores.packed,
    )
    return [
        replace(sequence, old_logprobs=old)
        for sequence, old in zip(sequences, columns, strict=True)
    ]


def _step(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    algorithm: LoadedAlgorithm,
    parent_version: str | None,
    flops: TrainingFlops,
) -> StepStats:
    """Take one optimiser step; the loss is a mean over all `sequences`.

    If the loss of a sequence without advantage is zero, the sequence counts in that mean, but it
    needs no forward or backward pass.
    """
    s, processes, packed = policy.settings, policy.processes, policy.scores.packed
    size = MinibatchSize(sum(sequence.trained_tokens for sequence in sequences), len(sequences))
    learned = [
        sequence
        for sequence in sequences
        if not algorithm.skips_zero_advantages or np.any(sequence.advantages)
    ]
    total, computed, pairs = 0.0, 0, 0.0
    measurement = Measurement(algorithm, parent_version)
    policy.clear_gradients(zeros=not learned)
    for part, counts in processes.passes(learned, s.micro_batch_tokens, packed=packed):
        batch = collate(part, s.temperature, policy.device, packed=packed)
        if algorithm.settings.entropy_coef:
            logprobs, entropy = policy.logprobs_and_entropy(batch)
        else:
            logprobs, entropy = policy.logprobs(batch), None
        # Minus infinity times a ratio of zero is NaN. Such a token has no usable gradient.
        at_zero = torch.isneginf(logprobs.detach())
        possible = logprobs.masked_fill(at_zero, 0.0)
        view = LossBatch(
            logprobs=possible,
            sampled_logprobs=batch.logprobs,
            old_logprobs=batch.old_logprobs,
            advantages=batch.advantages,
            mask=~at_zero,
            sequence=batch.sequence,
            step=batch.step,
            lengths=batch.lengths,
            ref_logprobs=batch.ref_logprobs,
            teacher_logprobs=batch.teacher_logprobs,
            entropy=entropy,
        )
        mean = objective(view, algorithm.loss, algorithm.settings, size)
        # FSDP averages the gradients of the processes; the loss is a sum of their shares.
        scaled = mean * processes.size if counts else possible.sum() * 0.0
        scaled.backward()  # type: ignore[no-untyped-call]
        if not counts:
            continue
        total += mean.item()
        measurement.add(view, batch)
        computed, pairs = computed + batch.computed_tokens, pairs + batch.attended_pairs
    total, computed, pairs = _of_all(processes, total, computed, pairs)
    measurement.combine(processes)
    norm = whole(torch.nn.utils.clip_grad_norm_(policy.trained, s.max_grad_norm)).item()
    finite = math.isfinite(total) and math.isfinite(norm)
    if finite:
        policy.optimizer.step()
    return StepStats(
        tokens=size.tokens,
        passed_tokens=sum(sequence.trained_tokens for sequence in learned),
        loss=total if finite else None,
        grad_norm=norm if finite else None,
        skipped=None if finite else f"loss {total}, gradient norm {norm}",
        now_at_zero=measurement.now_at_zero,
        sequence_tokens=sum(len(sequence.tokens.ids) for sequence in learned),
        computed_tokens=computed,
        flops=flops.of(computed, pairs),
        measured=measurement.stats() if finite else None,
    )


def _of_all(
    processes: Processes, loss: float, tokens: int, pairs: float
) -> tuple[float, int, float]:
    """Return the sums over all processes."""
    found = processes.gather((loss, tokens, pairs))
    losses, all_tokens, all_pairs = zip(*found, strict=True)
    return sum(losses), sum(all_tokens), sum(all_pairs)
