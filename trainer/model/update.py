"""Train one batch: minibatches, loss, gradient, optimiser steps."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.objective import MinibatchSize, objective
from clawstream.trainer.algorithms.registry import LoadedAlgorithm
from clawstream.trainer.data.micro_batch import MicroBatch, collate
from clawstream.trainer.data.minibatches import minibatches
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.metrics.flops import TrainingFlops, peak_flops
from clawstream.trainer.metrics.statistics import StepStats, UpdateStats
from clawstream.trainer.model.measurement import FirstPasses, Measurement
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.scores import logprobs_of
from clawstream.trainer.parallel.sharding import whole

Algorithms = Mapping[str | None, LoadedAlgorithm]
"""Name of an environment to its algorithm; None: all others."""


def update(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    batch_seq: int,
    algorithms: Algorithms,
    lr: float,
    parent_version: str | None,
    first_passes: FirstPasses | None = None,
) -> UpdateStats:
    """Train one batch with one optimiser step for each minibatch.

    A step with a non-finite loss or gradient is skipped: weights and optimiser stay unchanged.

    Args:
        policy: it is changed.
        sequences: of the batch, with advantages.
        batch_seq: number of the batch; the shuffle depends on it.
        algorithms: of each environment that sequences name; None: of the other sequences.
        lr: learning rate.
        parent_version: the version with exactly these weights; None after an update since it.
        first_passes: gets the log-probabilities of the tokens.
    """
    began = time.perf_counter()
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    s = policy.settings
    always = s.recompute_old_logprobs
    recomputed = {
        environment
        for environment, algorithm in algorithms.items()
        if (algorithm.recomputes if always is None else always)
    }
    sequences = with_old_logprobs(policy, sequences, recomputed)
    steps, flops = list[StepStats](), TrainingFlops(policy.model)
    for part in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
        unchanged = all(step.skipped is not None for step in steps)
        parent = parent_version if unchanged else None
        steps.append(_step(policy, part, algorithms, parent, flops, first_passes))
        if first_passes is not None:
            first_passes.end_step(part, taken=steps[-1].skipped is None)
    return UpdateStats(
        steps=tuple(steps),
        seconds=time.perf_counter() - began,
        peak_flops=peak_flops(policy.device, s.peak_tflops, policy.processes.size),
    )


def with_old_logprobs(
    policy: Policy, sequences: Sequence[TrainingSequence], environments: Collection[str | None]
) -> list[TrainingSequence]:
    """Return the sequences, those of some environments with the log-probabilities of the policy
    as it is.
    """
    scored = [sequence for sequence in sequences if sequence.environment in environments]
    if not scored:
        return list(sequences)
    columns = logprobs_of(
        scored,
        policy.logprobs,
        policy.settings,
        policy.device,
        policy.processes,
        packed=policy.scores.packed,
    )
    old = iter(columns)
    return [
        replace(sequence, old_logprobs=next(old))
        if sequence.environment in environments
        else sequence
        for sequence in sequences
    ]


def _step(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    algorithms: Algorithms,
    parent_version: str | None,
    flops: TrainingFlops,
    first_passes: FirstPasses | None,
) -> StepStats:
    """Take one optimiser step; the loss is a mean over all `sequences`.

    Each algorithm has passes of its own. All divide by the tokens or sequences of the whole
    minibatch, so an algorithm weighs as much as its data.
    """
    size = MinibatchSize(sum(sequence.trained_tokens for sequence in sequences), len(sequences))
    learned = {
        environment: found
        for environment, algorithm in algorithms.items()
        if (found := _learned(sequences, environment, algorithm))
    }
    policy.clear_gradients(zeros=not learned)
    parts = {
        environment: _backward(
            policy, found, algorithms[environment], size, parent_version, first_passes
        )
        for environment, found in learned.items()
    }
    loss = sum(part.loss for part in parts.values())
    norm, taken = _optimizer_step(policy, loss)
    computed = sum(part.computed_tokens for part in parts.values())
    passed = [sequence for found in learned.values() for sequence in found]
    trained = sum(sequence.trained_tokens for sequence in passed)
    stats = [part.measurement.stats() for part in parts.values()] if taken else []
    return StepStats(
        tokens=size.tokens,
        passed_tokens=trained,
        loss=loss if taken else None,
        grad_norm=norm if taken else None,
        skipped=None if taken else f"loss {loss}, gradient norm {norm}",
        now_at_zero=sum(part.measurement.now_at_zero for part in parts.values()),
        sequence_tokens=sum(len(sequence.tokens.ids) for sequence in passed),
        computed_tokens=computed,
        flops=flops.of(computed, trained, sum(part.attended_pairs for part in parts.values())),
        measured=tuple(found for found in stats if found is not None),
        environment_losses={name: part.loss for name, part in parts.items() if name is not None},
    )


def _optimizer_step(policy: Policy, loss: float) -> tuple[float, bool]:
    """Clip the gradient and step, unless the loss or the gradient is not finite.

    Returns:
        The norm of the gradient before clipping, and whether the step was taken.
    """
    norm = whole(
        torch.nn.utils.clip_grad_norm_(policy.trained, policy.settings.max_grad_norm)
    ).item()
    taken = math.isfinite(loss) and math.isfinite(norm)
    if taken:
        policy.optimizer.step()
    return norm, taken


def _learned(
    sequences: Sequence[TrainingSequence], environment: str | None, algorithm: LoadedAlgorithm
) -> list[TrainingSequence]:
    """Return the sequences of an environment that need a forward and backward pass.

    If the loss of a sequence without advantage is zero, the sequence counts in the mean only.
    """
    return [
        sequence
        for sequence in sequences
        if sequence.environment == environment
        and (not algorithm.skips_zero_advantages or np.any(sequence.advantages))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passes:
    """The passes of one algorithm in a step, in all processes.

    Attributes:
        loss: share in the loss of the minibatch.
        computed_tokens, attended_pairs: see `MicroBatch`.
        measurement: of the tokens.
    """

    loss: float
    computed_tokens: int
    attended_pairs: float
    measurement: Measurement


def _backward(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    algorithm: LoadedAlgorithm,
    size: MinibatchSize,
    parent_version: str | None,
    first_passes: FirstPasses | None,
) -> _Passes:
    """Add the gradient of the sequences of one algorithm.

    Args:
        policy: gets the gradient.
        sequences: at least one.
        algorithm: of all of them.
        size: of the whole minibatch.
        parent_version, first_passes: see `update`.
    """
    s, processes, packed = policy.settings, policy.processes, policy.scores.packed
    total, computed, pairs = 0.0, 0, 0.0
    measurement = Measurement(algorithm, parent_version)
    for part, counts in processes.passes(sequences, s.micro_batch_tokens, packed=packed):
        batch = collate(part, s.temperature, policy.device, packed=packed)
        view = _loss_batch(policy, batch, algorithm)
        own = dict[str, torch.Tensor]()
        mean = objective(
            view, algorithm.loss, algorithm.settings, size, sequences[0].environment, own
        )
        # FSDP averages the gradients of the processes; the loss is a sum of their shares.
        scaled = mean * processes.size if counts else view.logprobs.sum() * 0.0
        scaled.backward()  # type: ignore[no-untyped-call]
        if not counts:
            continue
        total += mean.item()
        measurement.add(view, batch, own)
        if first_passes is not None:
            first_passes.add(part, view)
        computed, pairs = computed + batch.computed_tokens, pairs + batch.attended_pairs
    measurement.combine(processes)
    losses, tokens, attended = zip(*processes.gather((total, computed, pairs)), strict=True)
    return _Passes(
        loss=sum(losses),
        computed_tokens=sum(tokens),
        attended_pairs=sum(attended),
        measurement=measurement,
    )


def _loss_batch(policy: Policy, batch: MicroBatch, algorithm: LoadedAlgorithm) -> LossBatch:
    """Return what the loss sees of a pass, with gradient."""
    if algorithm.settings.entropy_coef:
        logprobs, entropy = policy.logprobs_and_entropy(batch)
    else:
        logprobs, entropy = policy.logprobs(batch), None
    # Minus infinity times a ratio of zero is NaN. Such a token has no usable gradient.
    at_zero = torch.isneginf(logprobs.detach())
    return LossBatch(
        logprobs=logprobs.masked_fill(at_zero, 0.0),
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
