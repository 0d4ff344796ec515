"""The batch as an advantage estimator sees it, and its answer as a column of the sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clawstream.schemas.errors import SettingsError
from clawstream.schemas.ids import parse_version
from clawstream.trainer.algorithms.batch import BatchView, Floats
from clawstream.trainer.algorithms.registry import setting_of
from clawstream.trainer.data.sequences import TrainedMember, TrainingSequence


def batch_view(
    sequences: Sequence[TrainingSequence],
    members: Sequence[TrainedMember],
    run_id: str,
    sync_index: int,
) -> BatchView:
    """Return the trained tokens of a batch with their indexes and rewards.

    Args:
        sequences: of the members; those of a member are adjacent.
        members: also those without a sequence: they count in their group.
        run_id: of the trainer; the staleness of tokens of another run is unknown.
        sync_index: of the version that training starts from.
    """
    trajectory = {member.trajectory_id: i for i, member in enumerate(members)}
    step_row = {
        (i, index): row
        for row, (i, index) in enumerate(
            (i, index) for i, member in enumerate(members) for index in member.steps
        )
    }
    parts = [sequence.tokens.trained() for sequence in sequences]
    names = {name for part in parts for name in part.versions.tolist()}
    stale = {name: _staleness(name, run_id, sync_index) for name in names}
    of_sequence = np.array([trajectory[s.trajectory_id] for s in sequences], np.int64)
    return BatchView(
        sampled_logprobs=_joined([part.logprobs for part in parts]).astype(np.float64),
        sequence=np.repeat(np.arange(len(parts)), [len(part.ids) for part in parts]),
        step=np.array(
            [
                step_row[int(owner), index]
                for owner, part in zip(of_sequence, parts, strict=True)
                for index in part.steps.tolist()
            ],
            np.int64,
        ),
        position=_joined([np.flatnonzero(s.tokens.mask) for s in sequences]).astype(np.int64),
        staleness=np.array(
            [stale[name] for part in parts for name in part.versions.tolist()], np.float64
        ),
        sequence_trajectory=of_sequence,
        cut=np.array(
            [
                sequence.last_step in members[owner].cut_steps
                for sequence, owner in zip(sequences, of_sequence.tolist(), strict=True)
            ],
            bool,
        ),
        step_trajectory=np.array([i for i, _ in step_row], np.int64),
        turn=np.array([turn for member in members for turn in range(len(member.steps))], np.int64),
        step_rewards=np.array(
            [members[i].step_rewards.get(index, np.nan) for i, index in step_row], np.float64
        ),
        group=np.array([member.group for member in members], np.int64),
        rewards=np.array(
            [np.nan if member.reward is None else member.reward for member in members], np.float64
        ),
        ref_logprobs=_optional([s.ref_logprobs for s in sequences]),
        teacher_logprobs=_optional([s.teacher_logprobs for s in sequences]),
        values=_optional([s.values for s in sequences]),
    )


def with_advantages(
    sequences: Sequence[TrainingSequence], advantages: Floats
) -> tuple[TrainingSequence, ...]:
    """Return the sequences with their share of the advantages of a batch.

    Args:
        sequences: those of the view, in its order.
        advantages: shape (trained tokens of all sequences,).

    Raises:
        SettingsError: the estimator returned another shape.
    """
    tokens = sum(sequence.trained_tokens for sequence in sequences)
    if np.shape(advantages) != (tokens,):
        setting = setting_of("advantage")
        raise SettingsError(
            f"setting {setting}: it returned shape {np.shape(advantages)} for {tokens} tokens; one "
            "advantage for each trained token is needed"
        )
    return tuple(
        replace(sequence, advantages=share)
        for sequence, share in zip(sequences, _shares(sequences, advantages), strict=True)
    )


def with_returns(
    sequences: Sequence[TrainingSequence], returns: Floats
) -> tuple[TrainingSequence, ...]:
    """Return the sequences with their share of the returns of a batch, as `with_advantages`."""
    return tuple(
        replace(sequence, returns=share)
        for sequence, share in zip(sequences, _shares(sequences, returns), strict=True)
    )


def _shares(sequences: Sequence[TrainingSequence], column: Floats) -> list[NDArray[np.float32]]:
    """Split a column of a batch into those of its sequences."""
    ends = np.cumsum([sequence.trained_tokens for sequence in sequences], dtype=np.int64)
    return np.split(np.asarray(column, np.float32), ends[:-1]) if len(ends) else []


def _staleness(version_id: str | None, run_id: str, sync_index: int) -> float:
    version = None if version_id is None else parse_version(version_id)
    if version is None or version.run_id != run_id:
        return np.nan
    return sync_index - version.sync_index


def _optional(parts: Sequence[NDArray[np.float32] | None]) -> Floats | None:
    known = [part for part in parts if part is not None]
    return _joined(known).astype(np.float64) if len(known) == len(parts) else None


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)
