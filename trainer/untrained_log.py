"""Log what of a batch is not trained, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clawstream.runtime.logs import logger
from clawstream.trainer.data.sequences import BatchSequences, TrainingSequence
from clawstream.trainer.data.untrained import NO_MEDIA
from clawstream.trainer.metrics.statistics import StepStats

LOGGED = 20
"""Trajectories that one log event names at most."""


def log_untrained(
    batch_seq: int, data: BatchSequences, unusable: Mapping[str, str], vocabulary: int
) -> None:
    """Log the members and tokens of a batch that are left out.

    Args:
        batch_seq: number of the batch.
        data: its sequences.
        unusable: id of a trajectory to why its images cannot be passed.
        vocabulary: number of ids that the model has.
    """
    if data.unrewarded:
        logger().warning(
            "members_not_trained", batch_seq=batch_seq, trajectories=data.unrewarded[:LOGGED]
        )
    if data.outside_vocabulary:
        logger().error(
            "tokens_outside_vocabulary",
            batch_seq=batch_seq,
            vocabulary=vocabulary,
            tokens=sum(data.outside_vocabulary.values()),
            trajectories=list(data.outside_vocabulary)[:LOGGED],
            action="not trained from there on; the engine serves another model than "
            "trainer.model_path, or an agent submitted such ids",
        )
    if data.with_media:
        logger().error(
            "media_not_trained",
            batch_seq=batch_seq,
            tokens=sum(data.with_media.values()),
            trajectories=list(data.with_media)[:LOGGED],
            reasons=sorted({unusable.get(name, NO_MEDIA) for name in data.with_media})[:5],
            action="not trained from there on (see trainer.md, Images)",
        )
    if data.sampled_at_zero:
        logger().warning(
            "tokens_sampled_at_zero",
            batch_seq=batch_seq,
            tokens=sum(data.sampled_at_zero.values()),
            trajectories=list(data.sampled_at_zero)[:LOGGED],
            action="not trained; the engine gave them an infinite log-probability",
        )


def log_skipped_updates(
    batch_seq: int, steps: Sequence[StepStats], sequences: Sequence[TrainingSequence]
) -> None:
    """Log the optimiser steps that were not taken. sequences: of the batch."""
    trajectories = list(dict.fromkeys(sequence.trajectory_id for sequence in sequences))
    for number, step in enumerate(steps):
        if step.skipped is not None:
            logger().error(
                "update_skipped",
                batch_seq=batch_seq,
                minibatch=number,
                reason=step.skipped,
                trajectories=trajectories[:LOGGED],
                action="weights and optimiser stay as before it; look at its log-probabilities,"
                " lower trainer.lr",
            )
