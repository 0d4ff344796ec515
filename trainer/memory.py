"""Memory of the device: its peak, and out-of-memory errors of torch, explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from clawstream.schemas.records import ReadyBatch
from clawstream.schemas.settings import TrainerSettings
from clawstream.trainer.errors import OutOfMemory

_CPU_ALLOCATOR = "can't allocate memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is out of memory. On a CPU torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


def reset_peak(device: torch.device) -> None:
    """Begin to measure what `peak_bytes` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the largest memory of tensors on a device since `reset_peak`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


@contextmanager
def explain_out_of_memory(batch: ReadyBatch, settings: TrainerSettings) -> Iterator[None]:
    """Convert an out-of-memory error to OutOfMemory, naming the batch and settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"batch {batch.batch_seq} of {batch.trainable_tokens} trainable tokens needs more "
            "memory than available. Lower trainer.micro_batch_tokens (it is "
            f"{settings.micro_batch_tokens}; a pass has at least one sequence) or, for single "
            "sequences that are too long, admit.policy.max_trajectory_tokens; "
            f"trainer.dtype=bfloat16 needs less. The error: {error}"
        ) from error
