"""Process one partition of assemble: the protocol around the pure fold. The numbered steps are in
`clawstream.stream_jobs.assemble.main`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from clawstream.runtime.kafka import Record
from clawstream.runtime.kafka.truncation import check_truncation
from clawstream.stream_jobs.assemble.changelog_writer import ChangelogWriter
from clawstream.stream_jobs.assemble.context import PartitionContext
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.outputs import Outputs
from clawstream.stream_jobs.assemble.payload.cache import PayloadCache
from clawstream.stream_jobs.assemble.payload.input_log import InputLog, decode_event
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic
from clawstream.stream_jobs.errors import FencedOut, InputDisorder


class PartitionProcessor:
    """The owner of one partition, from `recovery.take_over` to `release`: one batch at a time. Any
    exception must end the process.
    """

    def __init__(
        self,
        partition: int,
        context: PartitionContext,
        fold: AssemblyFold,
        changelog: ChangelogWriter,
        outputs: Outputs,
        cache: PayloadCache,
        inputs: Sequence[InputLog],
    ) -> None:
        self.partition = partition
        self.lock = asyncio.Lock()
        self.released = False
        self._context, self._fold, self._state = context, fold, fold.state
        self._changelog, self._outputs = changelog, outputs
        self._cache, self._inputs = cache, inputs
        self._last_delivered = [-1, -1]  # the last offset that was delivered, of each input

    @property
    def positions(self) -> dict[tuple[str, int], int]:
        """Return the next offset of each input."""
        applied = self._state.applied
        return {(self._context.input(s), self.partition): applied[s] + 1 for s in (STEPS, REWARDS)}

    @property
    def time(self) -> int:
        """Return the log time of `claw.steps`, ms. It drives all time-outs."""
        return self._state.time[STEPS]

    async def process(self, records: Iterable[tuple[SourceTopic, Record]]) -> None:
        """Fold a batch, make it durable, and send its outputs. Afterwards the batch may be
        acknowledged.

        Schemas are known at this point (`clawstream.stream_jobs.worker.schema_wait`).
        """
        codec, applied = self._context.decoder.codec, self._state.applied
        batch: dict[tuple[SourceTopic, int], Record] = {}
        for source, record in records:
            if not self._last_delivered[source] < record.offset <= applied[source] + 1:
                await self._refuse_disorder(source, record)
            self._last_delivered[source] = record.offset
            batch[source, record.offset] = record
            payload = self._fold.record(
                source, record.offset, record.timestamp_ms, record.key, decode_event(codec, record)
            )
            if payload is not None:
                self._cache.put(record.offset, payload)
        changes = self._fold.finish_batch()
        if changes or self._changelog.delta_due:
            await self._changelog.append_delta(changes)
        await self._outputs.emit(batch)
        await self._outputs.tick_candidates()
        if self._changelog.snapshot_due:
            await self._changelog.append_snapshot()

    async def _refuse_disorder(self, source: SourceTopic, record: Record) -> None:
        """Never fold past an existing offset that was not delivered. (Control records leave gaps.)

        A repeated offset belongs to a recreated topic. Raises InputDisorder or SourceTruncated.
        """
        place = f"{record.topic}-{record.partition}: offset {record.offset}"
        if record.offset <= self._last_delivered[source]:
            raise InputDisorder(f"{place} came behind {self._last_delivered[source]}; restart")
        expected = self._state.applied[source] + 1
        if record.offset <= expected:
            return
        await asyncio.to_thread(
            check_truncation,
            self._context.cluster,
            record.topic,
            self.partition,
            expected,
            record.offset,
        )
        skipped = self._inputs[source].records(range(expected, record.offset))
        if await asyncio.to_thread(any, skipped):
            raise InputDisorder(f"{place} came where {expected} was due; restart")

    async def release(self) -> None:
        """Stop after the current batch. Records acknowledged outputs, so that the next owner does
        not send them again.
        """
        async with self.lock:
            self.released = True
            if self._changelog.unflushed:
                # Fenced out: there is an owner already, and it has sent them again.
                with suppress(FencedOut):
                    await self._changelog.append_delta([])
