"""The update of the weights: for each minibatch passes, loss, backward and optimiser step.

It needs torch and transformers alone, so that it can be used without the rest of the trainer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

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


def update(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    batch_seq: int,
    algorithm: LoadedAlgorithm,
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
        algorithm: its loss is trained.
        lr: learning rate.
        parent_version: the version with exactly these weights; None after an update since it.
        first_passes: gets the log-probabilities of the tokens.
    """
    began = time.perf_counter()
    for group in policy.optimizer.param_groups:
        group["lr"] = lr
    s = policy.settings
    always = s.recompute_old_logprobs
    if algorithm.recomputes if always is None else always:
        sequences = with_old_logprobs(policy, sequences)
    steps, flops = list[StepStats](), TrainingFlops(policy.model)
    for minibatch in minibatches(sequences, s.minibatches, s.epochs, s.seed, batch_seq):
        unchanged = all(step.skipped is not None for step in steps)
        parent = parent_version if unchanged else None
        steps.append(_train_minibatch(policy, minibatch, algorithm, parent, flops, first_passes))
        if first_passes is not None:
            first_passes.end_step(minibatch, taken=steps[-1].skipped is None)
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


def _train_minibatch(
    policy: Policy,
    sequences: Sequence[TrainingSequence],
    algorithm: LoadedAlgorithm,
    parent_version: str | None,
    flops: TrainingFlops,
    first_passes: FirstPasses | None,
) -> StepStats:
    """Take one optimiser step; the loss is a mean over all `sequences`.

    A step with a loss or a gradient that is not finite is not taken.
    """
    s, processes, packed = policy.settings, policy.processes, policy.scores.packed
    # Every pass divides by the size of the whole minibatch, so the passes add up to its mean.
    size = MinibatchSize(sum(sequence.trained_tokens for sequence in sequences), len(sequences))
    passed = passed_sequences(sequences, algorithm)
    policy.clear_gradients(zeros=not passed)
    measurement = Measurement(algorithm, parent_version)
    loss_here, tokens_here, pairs_here = 0.0, 0, 0.0
    for sequences_of_pass, counts in processes.passes(passed, s.micro_batch_tokens, packed=packed):
        micro_batch = collate(sequences_of_pass, s.temperature, policy.device, packed=packed)
        view = _loss_batch(policy, micro_batch, algorithm)
        own_metrics = dict[str, torch.Tensor]()
        loss_of_pass = objective(view, algorithm.loss, algorithm.settings, size, own_metrics)
        # FSDP averages the gradients of the processes; the loss is a sum of their shares. A pass
        # that does not count is there because other processes have one more.
        scaled = loss_of_pass * processes.size if counts else view.logprobs.sum() * 0.0
        scaled.backward()  # type: ignore[no-untyped-call]
        if not counts:
            continue
        loss_here += loss_of_pass.item()
        tokens_here += micro_batch.computed_tokens
        pairs_here += micro_batch.attended_pairs
        measurement.add(view, micro_batch, own_metrics)
        if first_passes is not None:
            first_passes.add(sequences_of_pass, view)
    measurement.combine(processes)
    losses, tokens, pairs = zip(
        *processes.gather((loss_here, tokens_here, pairs_here)), strict=True
    )
    loss, computed_tokens = sum(losses), sum(tokens)
    norm = whole(torch.nn.utils.clip_grad_norm_(policy.trained, s.max_grad_norm)).item()
    taken = math.isfinite(loss) and math.isfinite(norm)
    if taken:
        policy.optimizer.step()
    passed_tokens = sum(sequence.trained_tokens for sequence in passed)
    return StepStats(
        tokens=size.tokens,
        passed_tokens=passed_tokens,
        loss=loss if taken else None,
        grad_norm=norm if taken else None,
        skipped=None if taken else f"loss {loss}, gradient norm {norm}",
        now_at_zero=measurement.now_at_zero,
        sequence_tokens=sum(len(sequence.tokens.ids) for sequence in passed),
        computed_tokens=computed_tokens,
        flops=flops.of(computed_tokens, passed_tokens, sum(pairs)),
        measured=measurement.stats() if taken else None,
    )


def passed_sequences(
    sequences: Sequence[TrainingSequence], algorithm: LoadedAlgorithm
) -> list[TrainingSequence]:
    """Return the sequences that need a forward and backward pass.

    If the loss of a sequence without advantage is zero, the sequence counts in the mean only.
    """
    return [
        sequence
        for sequence in sequences
        if not algorithm.skips_zero_advantages or np.any(sequence.advantages)
    ]


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
