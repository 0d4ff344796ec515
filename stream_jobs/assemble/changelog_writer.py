"""Append to one partition of the changelog as its owner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from clawstream.runtime.logs import logger
from clawstream.stream_jobs.assemble import changelog
from clawstream.stream_jobs.assemble.changelog import ChangelogReader, accepts, decode_record
from clawstream.stream_jobs.assemble.context import PartitionContext
from clawstream.stream_jobs.assemble.state.changes import Change
from clawstream.stream_jobs.assemble.state.trajectories import STEPS
from clawstream.stream_jobs.errors import FencedOut

DELTA_AT_LEAST_EVERY_MS = 60_000
"""Ticks alone need no delta; this bounds how many of them are read again."""
SNAPSHOT_LOG_RATIO = 2
"""A snapshot is due when the changelog after the last one has this many times its size. Snapshots
then add half to the bytes written, and a new owner reads at most three times the state (6 to 8
µs per step).
"""


class ChangelogWriter:
    """The changelog of an owner, from its marker on. Every append raises FencedOut if another
    worker owns the partition.

    Attributes:
        unflushed: State changes from acknowledged outputs; written with the next delta.
    """

    def __init__(
        self, partition: int, context: PartitionContext, epoch: int, read: ChangelogReader
    ) -> None:
        self.unflushed: list[Change] = []
        self._partition, self._context, self._epoch = partition, context, epoch
        self._state, self._seq = read.state, read.seq
        self._bytes_since_snapshot = read.bytes_since_snapshot
        self._snapshot_bytes = read.snapshot_bytes
        self._last = epoch
        self._delta_at = 0

    @property
    def delta_due(self) -> bool:
        """Whether a batch without changes needs a delta."""
        waited = self._state.time[STEPS] - self._delta_at
        return bool(self.unflushed) or waited > DELTA_AT_LEAST_EVERY_MS

    @property
    def snapshot_due(self) -> bool:
        """Whether the changelog has grown enough for a snapshot."""
        return self._bytes_since_snapshot > max(
            self._context.snapshot_min_bytes, SNAPSHOT_LOG_RATIO * self._snapshot_bytes
        )

    async def append_delta(self, changes: Sequence[Change]) -> None:
        """Make changes durable, and those of acknowledged outputs before them."""
        changes, self.unflushed = [*self.unflushed, *changes], []
        self._seq += 1
        delta = changelog.delta(self._epoch, self._seq, self._state, changes)
        value = self._context.decoder.codec.encode(delta)
        await self._append([value])
        self._bytes_since_snapshot += len(value)
        self._delta_at = self._state.time[STEPS]

    async def append_snapshot(self) -> None:
        """Append the whole state, and trim the changelog up to it. Requires that no output is
        pending.
        """
        context, topic = self._context, self._context.topics.assembly
        chunks = changelog.snapshot(self._epoch, self._seq, self._state)
        values = [context.decoder.codec.encode(chunk) for chunk in chunks]
        first = await self._append(values)
        self.unflushed = []  # the snapshot has them
        self._bytes_since_snapshot, self._snapshot_bytes = 0, sum(map(len, values))
        await asyncio.to_thread(context.cluster.delete_records, topic, self._partition, first)
        logger().info(
            "snapshot", partition=self._partition, bytes=self._snapshot_bytes, chunks=len(values)
        )

    async def _append(self, values: Sequence[bytes]) -> int:
        """Append to the changelog and return the first offset.

        Only records of fenced workers, which no reader accepts, may lie between our records. In
        a recreated changelog our record lands before our last one. Raises FencedOut unless each
        record directly follows our last one.
        """
        topic, send = self._context.topics.assembly, self._context.producer.send_soon
        acks = await asyncio.gather(
            *[send(topic, None, value, partition=self._partition) for value in values]
        )
        for ack in acks:
            due = self._last + 1
            if ack.offset < due or (
                ack.offset > due
                and not await asyncio.to_thread(self._all_fenced, due, ack.offset - 1)
            ):
                raise FencedOut(
                    f"{topic}-{self._partition}: our record got offset {ack.offset}, "
                    f"not to {due}: another worker owns the partition, or the topic was recreated"
                )
            self._last = ack.offset
        return acks[0].offset

    def _all_fenced(self, first: int, last: int) -> bool:
        """Return whether no reader accepts the changelog records in an offset range (blocking)."""
        context = self._context
        records = context.cluster.read_range(context.topics.assembly, self._partition, first, last)
        return not any(
            accepts(r.offset, decode_record(context.decoder, r), self._epoch) for r in records
        )
