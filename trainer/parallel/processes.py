"""The processes of one trainer: several under torchrun, otherwise one.

All processes run the same code over the same batches. Rank 0, the leader, alone talks to Kafka and
writes files; it broadcasts what it reads. Each process computes the passes of its share of the
sequences, and FSDP2 keeps a shard of weights, gradients and optimiser on each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from clawstream.trainer.data.minibatches import micro_batches, shares
from clawstream.trainer.errors import ProcessLost
from clawstream.trainer.liveness.watchdog import Watchdog

if TYPE_CHECKING:
    from clawstream.trainer.data.sequences import TrainingSequence

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)
"""Longest wait for another process. One that ended is noticed at once."""
PASS_S = 120.0
"""A pass, or the broadcast of a batch, may take this long at least."""


class Processes:
    """The rank of this process and the number of processes; the default is one process.

    watchdog: of the thread of this process that trains.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, self.watchdog = rank, size, Watchdog()

    @property
    def leads(self) -> bool:
        """Whether this process talks to Kafka and writes files."""
        return self.rank == 0

    def broadcast(self, value: T | None) -> T:
        """Return the leader's value on every process."""
        if self.size > 1:
            values = [value]
            with self.watchdog.work("broadcast", PASS_S):
                dist.broadcast_object_list(values, src=0)
            value = values[0]
        return value  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Convert the error of a collective whose other process ended.

        Raises:
            ProcessLost: instead of that error.
        """
        try:
            yield
        except (dist.DistError, RuntimeError) as e:
            if self.size > 1 and (isinstance(e, dist.DistError) or "gloo" in str(e)):
                raise ProcessLost(
                    f"process {self.rank} of {self.size} lost another process of this trainer: its "
                    f"own message says why; all of them end ({str(e).splitlines()[0][:200]})"
                ) from e
            raise

    def background_group(self) -> dist.ProcessGroup | None:
        """Return a new group for collectives that run during a step; None for one process.

        On the group of the step they would meet the step's own collectives.
        """
        return dist.new_group(backend="gloo") if self.size > 1 else None

    def passes(
        self, sequences: Sequence[TrainingSequence], max_tokens: int, *, packed: bool
    ) -> Iterator[tuple[list[TrainingSequence], bool]]:
        """Yield the forward passes of this process, as many as every other process has.

        A pass gathers the weights from all processes, so all must have the same number. The
        watchdog takes it for one piece of work, which ends when the next pass is asked for.

        Args:
            sequences: each is in one pass of one process, as a whole.
            max_tokens: of a pass.
            packed: the model takes packed rows.

        Yields:
            For each pass its sequences, and whether it counts. One that does not count fills up.
            Those with images come last: only they gather the weights of the vision tower.
        """
        seen = [sequence for sequence in sequences if sequence.images]
        unseen = [sequence for sequence in sequences if not sequence.images]
        for kind in (unseen, seen):
            for found in self._passes(kind, max_tokens, packed=packed) if kind else ():
                with self.watchdog.work("pass", PASS_S):
                    yield found

    def _passes(
        self, sequences: Sequence[TrainingSequence], max_tokens: int, *, packed: bool
    ) -> list[tuple[list[TrainingSequence], bool]]:
        """Return the passes of sequences that are all with images, or all without."""
        parts = [
            micro_batches(part, max_tokens, packed=packed)
            for part in shares(sequences, self.size, packed=packed)
        ]
        own = [(part, True) for part in parts[self.rank]]
        if missing := max(map(len, parts)) - len(own):
            shortest = min(sequences, key=lambda sequence: len(sequence.tokens.ids))
            own += [([shortest], False)] * missing
        return own


ONE = Processes()


@contextmanager
def open_processes(device: str) -> Iterator[Processes]:
    """Join the processes that torchrun started; without torchrun, there is one.

    Args:
        device: `trainer.device`.

    Raises:
        ProcessLost: at the end of the block, when another process ended first.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    else:
        dist.init_process_group("cpu:gloo", timeout=TIMEOUT)
    processes = Processes(dist.get_rank(), size)
    with processes.joined():
        yield processes
    dist.destroy_process_group()
