"""One step of the trainer: a batch changes the weights.

It reads from top to bottom: batch, sequences, advantages, the update of the weights
(`clawstream.trainer.model.update`), and what was done with each step of the batch. `Run` has the
state, and publishes the version when it is due.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from clawstream.schemas.records import ReadyBatch
from clawstream.trainer.algorithms.registry import LoadedAlgorithm, load_algorithm
from clawstream.trainer.data.batches import FetchedBatch
from clawstream.trainer.data.environments import by_environment
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
from clawstream.trainer.metrics.statistics import (
    NO_UPDATE,
    BatchStats,
    DataStats,
    staleness,
)
from clawstream.trainer.model.measurement import FirstPasses
from clawstream.trainer.model.update import update
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
