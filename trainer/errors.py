"""What can end a trainer.

The class decides the exit code (`runtime.exit_codes`), the message says what to do.
"""

from __future__ import annotations

from runtime.kafka import SourceTruncated
from schemas.errors import ForeseenError, SettingsError


class TrainerError(ForeseenError):
    """Root of all errors of `trainer`. A restart resumes from the last published version."""


class BatchGap(TrainerError, SourceTruncated):
    """The next batch is not the one after the last trained one.

    Batches are never skipped: an operator must look.
    """

    def __init__(self, topic: str, offset: int, found: int, expected: int) -> None:
        super().__init__(
            f"{topic} has batch_seq {found} at offset {offset}, expected {expected}: a batch is "
            "missing or was written "
            "twice, and none is skipped; run clawstream doctor"
        )


class PayloadUnreadable(TrainerError, SourceTruncated):
    """The trajectories topic no longer has what a batch refers to, or it is not what the batch
    says.

    An operator must look.
    """


class CheckpointLost(TrainerError, SourceTruncated):
    """The run has published versions, but no checkpoint of them is whole: training on would begin a
    second chain.
    """


class TopicReplaced(TrainerError):
    """The ready-batches topic was deleted while it was read.

    The restart holds the new one against its checkpoint.
    """


class InvalidCheckpoint(TrainerError):
    """A checkpoint directory is incomplete, or a file of it is not the one that was written.

    An older one is taken.
    """


class OutOfMemory(TrainerError, MemoryError):
    """The device or the machine has no memory for a pass.

    A restart begins the batch again, a few times.
    """


class BatchNeverEnds(TrainerError, SettingsError):
    """The training of one batch ended the process again and again, by memory or a kill.

    A setting has to change.
    """


class BatchesReplaced(TrainerError, SourceTruncated):
    """The ready batches were recreated, but weights were trained from the old ones: their numbers
    would not fit.
    """


class TooFewMembers(TrainerError, SettingsError):
    """The advantage of a group of one is always zero: the algorithm needs at least two rewards."""
