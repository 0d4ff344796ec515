"""Errors that end a trainer. The class decides the exit code (`clawstream.runtime.exit_codes`)."""

from __future__ import annotations

from clawstream.runtime.errors import SourceTruncated
from clawstream.schemas.errors import ForeseenError


class TrainerError(ForeseenError):
    """Root of all errors of `trainer`. A restart resumes from the last published version."""


class BatchGap(TrainerError, SourceTruncated):
    """The next batch is not the one after the last trained one.

    Batches are never skipped: an operator must act.
    """

    def __init__(self, topic: str, offset: int, found: int, expected: int) -> None:
        super().__init__(
            f"{topic} has batch_seq {found} at offset {offset}, expected {expected}: a batch is "
            "missing or was written twice, and none is skipped; run clawstream status --positions"
        )


class PayloadUnreadable(TrainerError, SourceTruncated):
    """The payload of a batch is no longer on the trajectories topic, or contradicts the batch.

    An operator must act.
    """


class CheckpointLost(TrainerError, SourceTruncated):
    """The run has published versions, but no complete checkpoint: training would start a second
    chain of versions.
    """


class TopicReplaced(TrainerError):
    """The ready-batches topic was deleted while it was read.

    The restart compares the new topic with its checkpoint.
    """


class CheckpointFailed(TrainerError):
    """The shards of a checkpoint could not be written or read; the message has the cause.

    A restart resumes from the checkpoint before.
    """


class StorageFailed(TrainerError):
    """The file system of versions or checkpoints failed, for example during an upload.

    A restart resumes from the last checkpoint.
    """


class InvalidCheckpoint(TrainerError):
    """A checkpoint directory is incomplete or altered. The trainer uses an older one."""


class OutOfMemory(TrainerError, MemoryError):
    """The device or the machine has too little memory for a pass. A restart retries the batch."""


class BatchesReplaced(TrainerError, SourceTruncated):
    """The ready-batches topic was recreated, but weights were trained from the old one: the numbers
    of its batches do not continue.
    """


class UntrainableBatch(TrainerError):
    """Nothing can be calculated from a batch, or its tokens must not be trained.

    It ends no trainer: the batch is skipped, and a dead letter names it.
    """


class ProcessLost(TrainerError):
    """Another process of this trainer ended, so this one cannot go on.

    The restart of all processes resumes from the last checkpoint.
    """
