"""Read the images of a batch from the blob store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from clawstream.runtime.blob_store import BlobMissing, BlobStore
from clawstream.schemas.records import ReadyBatch, Trajectory
from clawstream.trainer.data.sequences import (
    BatchImages,
    ReadableIds,
    TrainingSequence,
    sequences_of,
)

Misfit = Callable[[Sequence[bytes], NDArray[np.int32]], str | None]
"""Returns why images are not those of a prompt with these token ids; None if they can be."""


class ImageReader:
    """Reads the images whose placeholders a batch has.

    The request of a sequence's last step has all images of the sequence. Of a trajectory with an
    image that cannot be passed, no image is.
    """

    def __init__(self, store: BlobStore, readable: ReadableIds, misfit: Misfit) -> None:
        """readable: of the model that takes the images."""
        self._store, self._readable, self._misfit = store, readable, misfit

    def read(self, batch: ReadyBatch, trajectories: Mapping[str, Trajectory]) -> BatchImages:
        """Return the images of a batch; equal ones are in memory once.

        Args:
            batch: its members.
            trajectories: trajectory id to trajectory, for every member.

        Raises:
            BlobStoreAway: the store cannot be reached.
        """
        get = cache(self._store.get)
        of_step: dict[tuple[str, int], tuple[bytes, ...]] = {}
        unusable: dict[str, str] = {}
        for member in (member for group in batch.groups for member in group.members):
            name = member.trajectory_id
            trajectory = trajectories[name]
            recorded = {step.index: step.images for step in trajectory.steps}
            for sequence in self._with_images(trajectory, member.untrainable_steps):
                try:
                    images = tuple(map(get, recorded[sequence.last_step]))
                    reason = self._misfit(images, sequence.tokens.ids)
                except BlobMissing as error:
                    reason = str(error)
                if reason is not None:
                    unusable[name] = reason
                    break
                of_step[name, sequence.last_step] = images
        return BatchImages(of_step, unusable)

    def _with_images(
        self, trajectory: Trajectory, untrainable_steps: Sequence[str]
    ) -> list[TrainingSequence]:
        placeholders = np.array(sorted(self._readable.images), np.int32)
        return [
            sequence
            for sequence in sequences_of(trajectory, untrainable_steps, self._readable)
            if np.isin(sequence.tokens.ids, placeholders).any()
        ]
