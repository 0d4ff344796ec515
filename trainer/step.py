"""One step of the trainer: a batch changes the weights.

It reads from top to bottom: batch, sequences, advantages; for each minibatch: passes, loss,
backward, optimiser step. `Run` has the state, and publishes the version when it is due.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from clawstream.schemas.records import ReadyBatch
from clawstream.trainer.algorithms.batch import LossBatch
from clawstream.trainer.algorithms.objective import MinibatchSize, objective
from clawstream.trainer.algorithms.registry import LoadedAlgorithm, load_algorithm
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.environments import by_environment
from clawstream.trainer.data.micro_batch import MicroBatch, collate
from clawstream.trainer.data.minibatches import minibatches
from clawstream.trainer.data.sequences import (
    TrainingSequence,
    at_temperature,
    sequences_of_batch,
    tokens_by_version,
    trained_indexes,
    trained_lengths,
)
from clawstream.trainer.data.tokenizer_check import check_tokenizer
from clawstream.trainer.data.untrained import (
    BATCH_SKIPPED,
    CRITIC_WARMS_UP,
    UPDATE_SKIPPED,
    LeftOut,
    step_decisions,
)
from clawstream.trainer.data.view import batch_view, with_advantages, with_returns
from clawstream.trainer.errors import UntrainableBatch
from clawstream.trainer.metrics.flops import TrainingFlops, peak_flops
from clawstream.trainer.metrics.statistics import (
    NO_UPDATE,
    BatchStats,
    DataStats,
    StepStats,
    UpdateStats,
    staleness,
)
from clawstream.trainer.model.measurement import FirstPasses, Measurement
from clawstream.trainer.model.policy import Policy
from clawstream.trainer.model.scores import logprobs_of
from clawstream.trainer.parallel.sharding import whole
from clawstream.trainer.run import Run
from clawstream.trainer.untrained_log import log_skipped_updates, log_untrained
from clawstream.trainer.versions.trained_tokens import is_recorded, trained_steps


class EstimatedSequences(NamedTuple):
    """The sequences of one environment of a batch, with advantages.

    Attributes:
        data: what they are made of.
        left_out: why a step has no token to train, for every such step.
    """

    sequences: tuple[TrainingSequence, ...]
    data: DataStats
    left_out: LeftOut


def train_batch(run: Run, fetched: FetchedBatch) -> None:
    """Train one batch: the critic, then the policy. Advance the position of the run.

    Raises:
        OutOfMemory: the batch needs more memory than available.
        ProcessLost: another process of this trainer ended.
    """
    batch, policy, s = fetched.batch, run.policy, run.settings.trainer
    with run.training(batch):
        algorithm = load_algorithm(run.settings, batch.algorithm)
        trajectories = fetched.trajectories.values()
        check_tokenizer(trajectories, policy.tokenizer_fingerprint, batch.batch_seq)
        batches = by_environment(batch, fetched.trajectories, s.environments)
        try:
            environments = [
                _estimate(run, fetched, batch_of_one, environment, algorithm)
                for environment, batch_of_one in batches.items()
            ]
        except UntrainableBatch as e:
            _skip(run, fetched, str(e))
            return
        sequences = [sequence for one in environments for sequence in one.sequences]
        critic = run.auxiliary.train_critic(sequences, batch.batch_seq)
        needs_critic = algorithm.returns is not None
        waits_for_critic = needs_critic and run.auxiliary.critic_warms_up(run.sync_index)
        updates_before = sum(stats.update.updates for stats in run.unpublished)
        recorded = [one for one in sequences if is_recorded(one.trajectory_id, s.record_tokens)]
        first_passes = FirstPasses(recorded, updates_before)
        stats = NO_UPDATE
        if sequences and not waits_for_critic:
            parent = None if updates_before else run.current_version_id
            stats = update(
                policy, sequences, batch.batch_seq, algorithm, run.lr, parent, first_passes
            )
            log_skipped_updates(batch.batch_seq, stats.steps, sequences)
        # What was done with each step of the batch, for the records of the next version.
        untrained = {
            name: dict(steps) for one in environments for name, steps in one.left_out.items()
        }
        for sequence in sequences:
            if not first_passes.trained(sequence):
                reason = CRITIC_WARMS_UP if waits_for_critic else UPDATE_SKIPPED
                indexes = trained_indexes([sequence])
                untrained[sequence.trajectory_id] |= dict.fromkeys(indexes, reason)
        run.batch_trained(
            BatchStats(
                update=stats,
                data=tuple(one.data for one in environments),
                critic=critic,
                read_seconds=fetched.read_seconds,
            ),
            fetched.position,
            trained_steps(
                first_passes.gathered(policy.processes), fetched.trajectories, batch.batch_seq
            ),
            step_decisions(trajectories, untrained, batch.batch_seq),
        )


def _skip(run: Run, fetched: FetchedBatch, reason: str) -> None:
    """Train nothing on a batch; its version has the weights before. A dead letter names it."""
    run.weight_log.dead_letter(fetched.record, fetched.position.topic_id, "untrainable", reason)
    untrained = {
        name: dict.fromkeys((step.index for step in trajectory.steps), BATCH_SKIPPED)
        for name, trajectory in fetched.trajectories.items()
    }
    run.batch_trained(
        BatchStats(update=NO_UPDATE, data=(), read_seconds=fetched.read_seconds),
        fetched.position,
        (),
        step_decisions(fetched.trajectories.values(), untrained, fetched.batch.batch_seq),
    )


def _estimate(
    run: Run,
    fetched: FetchedBatch,
    batch: ReadyBatch,
    environment: str | None,
    algorithm: LoadedAlgorithm,
) -> EstimatedSequences:
    """Return the sequences of an environment with advantages, and returns for the critic.

    Args:
        run: gives the models of optional columns.
        fetched: the whole batch.
        batch: the groups of the environment.
        environment: a name in `trainer.environments`; None: all others.
        algorithm: of the batch.

    Raises:
        UntrainableBatch: what was recorded cannot be calculated with.
    """
    run_id, sync_index = run.settings.run_id, run.sync_index
    with _calculation(batch.batch_seq):
        data = sequences_of_batch(
            batch,
            fetched.trajectories,
            algorithm.smallest_group,
            algorithm.rewards,
            run.policy.readable,
            environment,
            fetched.images,
        )
    log_untrained(batch.batch_seq, data, fetched.images.unusable, run.policy.readable.vocabulary)
    versions = tokens_by_version(data.sequences)
    run.check_ids(versions.keys(), batch.batch_seq)
    sequences = data.sequences
    if algorithm.temperature is not None:
        sequences = tuple(at_temperature(one, algorithm.temperature) for one in sequences)
    sequences = run.auxiliary.score(sequences, algorithm.needs, sync_index)
    # An error of a user's own estimator ends the trainer: its author has to know of it.
    with nullcontext() if algorithm.own_advantage else _calculation(batch.batch_seq):
        view = batch_view(sequences, data.members, run_id, sync_index)
        sequences = with_advantages(sequences, algorithm.advantage(view, algorithm.settings))
        if algorithm.returns is not None:
            sequences = with_returns(sequences, algorithm.returns(view, algorithm.settings))
    stats = DataStats(
        environment=environment,
        rewards=data.rewards,
        groups=data.groups,
        members=len(data.members),
        sequences=len(sequences),
        tokens=sum(sequence.trained_tokens for sequence in sequences),
        lengths=trained_lengths(sequences),
        turns=sum(len(member.steps) for member in data.members),
        unrewarded=len(data.unrewarded),
        outside_vocabulary=sum(data.outside_vocabulary.values()),
        with_media=sum(data.with_media.values()),
        sampled_at_zero=sum(data.sampled_at_zero.values()),
        staleness=staleness(versions, run_id, sync_index),
    )
    return EstimatedSequences(sequences, stats, data.left_out)


@contextmanager
def _calculation(batch_seq: int) -> Iterator[None]:
    """Raise UntrainableBatch for what a calculation from recorded values raises."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError) as e:
        trace = "".join(traceback.format_exception(e))
        raise UntrainableBatch(f"batch {batch_seq}: {type(e).__name__}: {e}\n{trace}") from e


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
