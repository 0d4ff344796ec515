"""What the trainer saw of each trained token, as records beside the version. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from clawstream.schemas.records import TrainedTokens, Trajectory
from clawstream.trainer.data.sequences import TrainingSequence
from clawstream.trainer.model.measurement import FirstPass


class TrainedStep(NamedTuple):
    """The fields of `TrainedTokens` that are known before the version is published."""

    run_id: str
    trajectory_key: str
    trajectory_id: str
    step_id: str
    batch_seq: int
    updates: int | None
    logprobs: bytes | None
    advantages: bytes

    def record(self, version_id: str) -> TrainedTokens:
        """Return the record. version_id: the version that was trained on the tokens."""
        return TrainedTokens(version_id=version_id, **self._asdict())


def is_recorded(trajectory_id: str, share: float) -> bool:
    """Return whether a trajectory is in a share of all trajectories, the same one in each run."""
    return crc32(trajectory_id.encode()) < share * 2**32


def trained_steps(
    trained: Iterable[tuple[TrainingSequence, FirstPass | None]],
    trajectories: Mapping[str, Trajectory],
    batch_seq: int,
) -> Iterator[TrainedStep]:
    """Yield the steps of sequences that have a trained token.

    The tokens of a step are adjacent in its sequence, from its first response token on.

    Args:
        trained: sequences of a batch, with advantages, and their passes; None: none was needed.
        trajectories: of the batch, by id.
        batch_seq: number of the batch.
    """
    for sequence, found in trained:
        trajectory = trajectories[sequence.trajectory_id]
        step_ids = {step.index: step.step_id for step in trajectory.steps}
        tokens = sequence.tokens
        logprobs = None if found is None else _spread(found.logprobs, tokens.mask)
        advantages = _spread(sequence.advantages, tokens.mask)
        edges = (np.flatnonzero(np.diff(tokens.steps)) + 1).tolist()
        for start, end in pairwise([0, *edges, len(tokens.steps)]):
            if tokens.mask[start:end].any():
                yield TrainedStep(
                    run_id=trajectory.run_id,
                    trajectory_key=trajectory.trajectory_key,
                    trajectory_id=trajectory.trajectory_id,
                    step_id=step_ids[int(tokens.steps[start])],
                    batch_seq=batch_seq,
                    updates=None if found is None else found.updates,
                    logprobs=None if logprobs is None else logprobs[start:end].tobytes(),
                    advantages=advantages[start:end].tobytes(),
                )


def _spread(values: NDArray[np.float32] | None, mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return one little-endian value for each token: NaN where it is not trained."""
    assert values is not None, "advantages are estimated before training"
    found = np.full(len(mask), np.nan, "<f4")
    found[mask] = values
    return found
