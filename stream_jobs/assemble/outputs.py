"""Send the outputs of one partition: payload, marks, dead letters, candidates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from clawstream.runtime.kafka import Ack, Record
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import dead_letter
from clawstream.schemas.ids import key_of_trajectory
from clawstream.schemas.records import Tick
from clawstream.schemas.topics import CANDIDATE_PARTITIONS
from clawstream.stream_jobs.assemble.changelog_writer import ChangelogWriter
from clawstream.stream_jobs.assemble.context import PartitionContext
from clawstream.stream_jobs.assemble.output_records import (
    assembled,
    candidate,
    payload_headers,
    slices,
    starts_of,
    step_mark,
)
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, PayloadCache
from clawstream.stream_jobs.assemble.payload.input_log import InputLog
from clawstream.stream_jobs.assemble.state.changes import (
    OutputsAcknowledged,
    PayloadLost,
    PayloadWritten,
)
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    DeadLetterDecision,
    OpenTrajectory,
    RunTrajectory,
    SourceTopic,
)

PROCESS = "assemble"
SLICE_RECORDS = 500
CANDIDATE_TICK_S = 1.0
Batch = Mapping[tuple[SourceTopic, int], Record]
"""The records of a batch by input and offset."""


class Outputs:
    """Sends what is decided and not acknowledged.

    inputs: the partition of each input, to read again what is no longer in memory. topic_ids: as in
    `TopicSnapshot`.
    """

    def __init__(
        self,
        partition: int,
        context: PartitionContext,
        state: PartitionState,
        changelog: ChangelogWriter,
        cache: PayloadCache,
        inputs: Sequence[InputLog],
        topic_ids: Mapping[str, str],
    ) -> None:
        self._partition, self._context, self._state = partition, context, state
        self._changelog, self._cache, self._inputs = changelog, cache, inputs
        self._topic_ids = topic_ids
        self._encode, self._send = context.decoder.codec.encode, context.producer.send_soon
        self._last_tick: tuple[int, float] = (-1, 0.0)

    async def emit(self, batch: Batch) -> None:
        """Send all unacknowledged outputs and wait for their acknowledgement. batch: the records
        in memory.
        """
        pending, topics = self._state.pending, self._context.topics
        if not pending:
            return
        written: list[PayloadWritten] = []
        for closings in slices(
            pending.closings.items(), lambda one: one[1].steps.size, self._context.slice_bytes
        ):
            written += await self._send_closings(dict(closings))
        await asyncio.gather(
            *[
                self._send(
                    topics.trajectories,
                    key_of_trajectory(mark.key[1]).encode(),
                    self._encode(step_mark(mark)),
                )
                for mark in pending.marks
            ]
        )
        for first in range(0, len(pending.dead_letters), SLICE_RECORDS):
            await self._send_dead_letters(
                pending.dead_letters[first : first + SLICE_RECORDS], batch
            )
        await self._send_candidates(pending.revised)
        acknowledged = OutputsAcknowledged()
        acknowledged.apply(self._state)
        self._changelog.unflushed = [acknowledged, *written]

    async def tick_candidates(self) -> None:
        """Send the event time to admission, after its outputs, about once a second."""
        event_time, (last, at) = self._state.event_time, self._last_tick
        if event_time <= last or time.monotonic() - at < CANDIDATE_TICK_S:
            return
        self._last_tick = (event_time, time.monotonic())
        value = self._encode(Tick(partition=self._partition, event_time=event_time))
        topic = self._context.topics.candidates
        await asyncio.gather(
            *[self._send(topic, None, value, partition=p) for p in range(CANDIDATE_PARTITIONS)]
        )

    # -- closed trajectories

    async def _send_closings(
        self, closings: Mapping[RunTrajectory, OpenTrajectory]
    ) -> list[PayloadWritten]:
        """Send closed trajectories; return the changes with the location of their payload."""
        topic, state = self._context.topics.trajectories, self._state
        payload = await self._payload(closings)
        sent = []
        for key, trajectory in closings.items():
            done = assembled(key, trajectory, state.closed[key], payload)
            name = key_of_trajectory(key[1]).encode()
            acks = [self._send(topic, name, self._encode(part)) for part in done.parts]
            sent.append((key, done.prompt_tokens, done.order, acks))
        written: list[PayloadWritten] = []
        for key, prompt_tokens, order, futures in sent:
            acks_of_parts = await asyncio.gather(*futures)
            first, last = acks_of_parts[0], acks_of_parts[-1]
            place = (self._topic_ids[topic], first.partition, first.offset, last.offset)
            written.append(PayloadWritten(key, prompt_tokens, order, place))
            written[-1].apply(state)
        for trajectory in closings.values():
            for offset in starts_of(trajectory):
                self._cache.drop(offset)
        return written

    async def _payload(
        self, closings: Mapping[RunTrajectory, OpenTrajectory]
    ) -> dict[int, CachedPayload]:
        """Return the payload of closing trajectories from the cache or the log. Marks as `lost`
        those whose records are gone.
        """
        closed = self._state.closed
        needed = {k: starts_of(t) for k, t in closings.items() if closed[k].outcome != "lost"}
        found, missing = self._cache.split(
            {offset: start for starts in needed.values() for offset, start in starts.items()}
        )
        if missing:
            found.update(
                await asyncio.to_thread(lambda: list(self._inputs[STEPS].payload(missing)))
            )
        why = "payload lost to retention"
        lost = [
            PayloadLost(k, why) for k, starts in needed.items() if not starts.keys() <= found.keys()
        ]
        if lost:
            logger().error("payload_lost", partition=self._partition, trajectories=len(lost))
            for change in lost:
                change.apply(self._state)
            await self._changelog.append_delta(lost)
        return found

    # -- candidates and dead letters

    async def _send_candidates(self, keys: Iterable[RunTrajectory]) -> None:
        """Send candidates in slices: one of 5,000 steps has a megabyte."""
        topic, codec = self._context.topics.candidates, self._context.decoder.codec
        sent, size = list[asyncio.Future[Ack]](), 0
        for key in keys:
            closed = self._state.closed[key]
            _, value = candidate(key, closed, codec)
            sent.append(self._send(topic, key[0].encode(), value, payload_headers(key, closed)))
            size += len(value)
            if size >= self._context.slice_bytes:
                await asyncio.gather(*sent)
                sent, size = [], 0
        await asyncio.gather(*sent)

    async def _send_dead_letters(
        self, dead_letters: Sequence[DeadLetterDecision], batch: Batch
    ) -> None:
        """Send dead letters. Reads records of earlier batches from their topic."""
        records = dict(batch)
        for source in (STEPS, REWARDS):
            offsets = {d.offset for d in dead_letters if d.source == source}
            missing = sorted(o for o in offsets if (source, o) not in records)
            again = self._inputs[source].records(missing)
            records.update({(source, r.offset): r for r in await asyncio.to_thread(list, again)})
        sent = []
        for decision in dead_letters:
            topic, offset, reason = (
                self._context.input(decision.source),
                decision.offset,
                decision.reason,
            )
            record = records.get((decision.source, offset)) or Record(
                topic, self._partition, offset, 0, None, None, {}
            )
            letter = dead_letter(record, self._topic_ids[topic], PROCESS, reason, decision.detail)
            # Not the clock: a dead letter that is sent again has the same bytes.
            letter = replace(letter, created_at=record.timestamp_ms * 1000)
            sent.append(
                self._send(self._context.topics.dead_letters, letter.key, self._encode(letter))
            )
            logger().warning(
                "dead_letter", topic=topic, partition=self._partition, offset=offset, reason=reason
            )
        await asyncio.gather(*sent)
