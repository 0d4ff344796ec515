"""Process one partition of assemble: the protocol around the pure fold. The numbered steps are in
`stream_jobs.assemble.main`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from runtime.kafka import BEGINNING, Ack, Cluster, Producer, Record, SourceTruncated
from runtime.kafka.truncation import check_truncation
from runtime.logs import logger
from runtime.topics.records import Decoder, dead_letter, now_micros
from schemas.ids import key_of_trajectory
from schemas.records import AssemblyMarker, Tick
from schemas.topics import CANDIDATE_PARTITIONS, Topics
from stream_jobs.assemble import changelog
from stream_jobs.assemble.changelog import ChangelogReader, accepts, decode_record
from stream_jobs.assemble.fold import AssemblyFold
from stream_jobs.assemble.handlers import Limits
from stream_jobs.assemble.model import (
    REWARDS,
    STEPS,
    ChangeKind,
    DeadLetterDecision,
    OpenTrajectory,
    RunTrajectory,
    SourceTopic,
    StateChange,
)
from stream_jobs.assemble.output_records import (
    assembled,
    candidate,
    payload_bytes,
    slices,
    starts_of,
    step_mark,
)
from stream_jobs.assemble.payload.cache import CachedPayload, PayloadCache
from stream_jobs.assemble.payload.input_log import InputLog, decode_event
from stream_jobs.errors import FencedOut, InputDisorder, UnreadableChangelog

PROCESS = "assemble"
COLD_AFTER_MS = 600_000
"""A new owner does not cache older steps; it reads them when the trajectory closes."""
DELTA_AT_LEAST_EVERY_MS = 60_000
"""Ticks alone need no delta; this bounds how many of them are read again."""
SNAPSHOT_LOG_RATIO = 2
"""A snapshot is due when the changelog after the last one has this many times its size. Snapshots
then add half to the bytes written, and a new owner reads at most three times the state (6 to 8
µs per step).
"""
CANDIDATE_TICK_S = 1.0
SLICE_BYTES = 32 << 20
"""Payload and candidates in memory at once, bytes. A single trajectory is never split."""
SLICE_RECORDS = 500
READ_LOG_TRIES = 3


@dataclass(frozen=True, slots=True)
class PartitionContext:
    """Dependencies shared by the partitions of a worker. cache_bytes: per partition. slice_bytes:
    see `SLICE_BYTES`.
    """

    cluster: Cluster
    producer: Producer
    decoder: Decoder
    topics: Topics
    limits: Limits
    worker: str
    cache_bytes: int
    snapshot_min_bytes: int
    slice_bytes: int = SLICE_BYTES

    def input(self, source: SourceTopic) -> str:
        return self.topics.steps if source == STEPS else self.topics.rewards


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """The topics at the start of an owner: ids by name, and (first, end) offsets of the partition
    by topic name.
    """

    topic_ids: Mapping[str, str]
    watermarks: Mapping[str, tuple[int, int]]


class PartitionProcessor:
    """Processes one partition from `take_over` to `release`, one batch at a time. Any exception
    must end the process.
    """

    def __init__(self, partition: int, shared: PartitionContext, situation: TopicSnapshot) -> None:
        self.partition = partition
        self.lock = asyncio.Lock()
        self.released = False
        self._shared = shared
        self._topics_at_start = situation
        self._encode = shared.decoder.codec.encode
        inputs = (shared.topics.steps, shared.topics.rewards)
        self._inputs = tuple(
            InputLog(shared.cluster, shared.decoder, topic, partition) for topic in inputs
        )
        self._cache = PayloadCache(shared.cache_bytes)
        self._log = ChangelogReader()
        self._fold = AssemblyFold(self._log.state, shared.limits)
        self._epoch = self._last = -1
        self._unflushed_changes: list[
            StateChange
        ] = []  # what the acknowledged outputs changed: rides in the next delta
        self._delta_at = 0
        self._batch: dict[tuple[SourceTopic, int], Record] = {}
        self._last_delivered = [-1, -1]  # the last offset that was delivered, of each input
        self._last_tick: tuple[int, float] = (-1, 0.0)

    @property
    def positions(self) -> dict[tuple[str, int], int]:
        """Return the next offset of each input."""
        applied = self._log.state.applied
        return {(self._shared.input(s), self.partition): applied[s] + 1 for s in (STEPS, REWARDS)}

    @property
    def time(self) -> int:
        """Return the log time of `claw.steps`, ms. It drives all time-outs."""
        return self._log.state.time[STEPS]

    # -- 1: taking over

    async def take_over(self) -> None:
        """Become the owner: append the marker, restore state and payload, send unacknowledged
        outputs.

        Raises:
            SourceTruncated, UnreadableChangelog, FencedOut: See `stream_jobs.errors`.
        """
        begun = time.monotonic()
        shared, ids = self._shared, self._topics_at_start.topic_ids
        marker = AssemblyMarker(
            worker=shared.worker,
            steps_topic_id=ids[shared.topics.steps],
            rewards_topic_id=ids[shared.topics.rewards],
            created_at=now_micros(),
        )
        ack = await shared.producer.send(
            shared.topics.assembly, None, self._encode(marker), partition=self.partition
        )
        self._epoch = self._last = ack.offset
        await asyncio.to_thread(self._read_log)
        self._fold = AssemblyFold(self._log.state, shared.limits)
        for source in (STEPS, REWARDS):
            await self._check_position(source)
        await asyncio.to_thread(self._refill)
        if entries := self._fold.finish_batch():
            await self._append_delta(entries)
        again = len(self._log.state.pending.closings) + len(self._log.state.pending.revised)
        await self._emit()
        state = self._log.state
        logger().info(
            "partition_taken_over",
            partition=self.partition,
            epoch=self._epoch,
            open=len(state.opened),
            closed=len(state.closed),
            waiting=sum(map(len, state.waiting)),
            cached=len(self._cache),
            sent_again=again,
            seconds=round(time.monotonic() - begun, 2),
        )

    def _read_log(self) -> None:
        """Read the changelog up to the own marker (blocking). A fenced owner may be trimming its
        start meanwhile.
        """
        topic, left = self._shared.topics.assembly, READ_LOG_TRIES
        while left:
            left -= 1
            self._log = ChangelogReader()
            try:
                for record in self._shared.cluster.read_range(
                    topic, self.partition, BEGINNING, self._epoch
                ):
                    self._log.read(
                        record.offset,
                        decode_record(self._shared.decoder, record),
                        len(record.value or b""),
                    )
                return
            except SourceTruncated as e:
                if isinstance(e, UnreadableChangelog) or not left:
                    raise

    async def _check_position(self, source: SourceTopic) -> None:
        """Check a position against the topic: a new topic id restarts the input; the same id must
        still hold the offset.
        """
        topic, state = self._shared.input(source), self._log.state
        today = self._topics_at_start.topic_ids[topic]
        low, high = self._topics_at_start.watermarks[topic]
        if state.topic_ids[source] == today and state.applied[source] + 1 > high:
            # The previous owner may have written until our marker: compare with a later end offset.
            ends = await asyncio.to_thread(self._shared.cluster.watermarks, topic, [self.partition])
            low, high = ends[self.partition]
        if state.topic_ids[source] != today:
            if self._log.known:
                logger().warning(
                    "source_replaced", topic=topic, partition=self.partition, open=len(state.opened)
                )
            self._fold.replace_source(source, today, low)
        elif not low <= state.applied[source] + 1 <= high:
            raise SourceTruncated(
                f"source truncated: {topic}-{self.partition} holds offsets {low} to {high - 1}, "
                f"position {state.applied[source] + 1}; run clawstream doctor"
            )

    def _refill(self) -> None:
        """Load the payload of the open trajectories, except cold steps (blocking)."""
        state, starts = self._log.state, dict[int, int]()
        since = state.time[STEPS] - COLD_AFTER_MS
        for trajectory in state.opened.values():
            cold = {s.offset for s in trajectory.steps if s.at < since}
            if trajectory.meta is not None and trajectory.opened_at < since:
                cold.add(trajectory.meta)
            starts.update((o, start) for o, start in starts_of(trajectory).items() if o not in cold)
        for offset, kept in self._inputs[STEPS].payload(starts):
            self._cache.put(offset, kept)

    async def release(self) -> None:
        """Stop after the current batch. Records acknowledged outputs, so that the next owner does
        not send them again.
        """
        async with self.lock:
            self.released = True
            if self._unflushed_changes:
                with suppress(
                    FencedOut
                ):  # then there is an owner already, and it has sent it again
                    await self._append_delta([])

    # -- 2 to 5: a batch

    async def process(self, records: Iterable[tuple[SourceTopic, Record]]) -> None:
        """Fold a batch, make it durable, and send its outputs. Afterwards the batch may be
        acknowledged.

        Schemas are known at this point (`stream_jobs.worker.schema_wait`).
        """
        codec = self._shared.decoder.codec
        for source, record in records:
            if (
                not self._last_delivered[source]
                < record.offset
                <= self._log.state.applied[source] + 1
            ):
                await self._refuse_disorder(source, record)
            self._last_delivered[source] = record.offset
            self._batch[source, record.offset] = record
            kept = self._fold.record(
                source, record.offset, record.timestamp_ms, record.key, decode_event(codec, record)
            )
            if kept is not None:
                self._cache.put(record.offset, kept)
        entries = self._fold.finish_batch()
        if (
            entries
            or self._unflushed_changes
            or self._log.state.time[STEPS] - self._delta_at > DELTA_AT_LEAST_EVERY_MS
        ):
            await self._append_delta(entries)
        await self._emit()
        self._batch.clear()
        await self._tick_candidates()
        if self._log.bytes_since_snapshot > max(
            self._shared.snapshot_min_bytes, SNAPSHOT_LOG_RATIO * self._log.snapshot_bytes
        ):
            await self._append_snapshot()

    async def _refuse_disorder(self, source: SourceTopic, record: Record) -> None:
        """Never fold past an existing offset that was not delivered. (Control records leave gaps.)

        A repeated offset belongs to a recreated topic. Raises InputDisorder or SourceTruncated.
        """
        if record.offset <= self._last_delivered[source]:
            raise InputDisorder(
                f"{record.topic}-{record.partition}: offset {record.offset} came behind "
                f"{self._last_delivered[source]}; restart"
            )
        expected = self._log.state.applied[source] + 1
        if record.offset <= expected:
            return
        await asyncio.to_thread(
            check_truncation,
            self._shared.cluster,
            record.topic,
            self.partition,
            expected,
            record.offset,
        )
        if await asyncio.to_thread(
            lambda: any(self._inputs[source].records(range(expected, record.offset)))
        ):
            raise InputDisorder(
                f"{record.topic}-{record.partition}: offset {record.offset} came where {expected} "
                "was due; restart"
            )

    async def _append_delta(self, entries: list[StateChange]) -> None:
        entries, self._unflushed_changes = [*self._unflushed_changes, *entries], []
        log = self._log
        log.seq += 1
        log.known = True
        value = self._encode(changelog.delta(self._epoch, log.seq, log.state, entries))
        await self._append([value])
        log.bytes_since_snapshot += len(value)
        self._delta_at = log.state.time[STEPS]

    async def _append_snapshot(self) -> None:
        chunks = [
            self._encode(p) for p in changelog.snapshot(self._epoch, self._log.seq, self._log.state)
        ]
        first = await self._append(chunks)
        self._unflushed_changes = []  # the snapshot has it
        self._log.bytes_since_snapshot, self._log.snapshot_bytes = 0, sum(map(len, chunks))
        topic = self._shared.topics.assembly
        await asyncio.to_thread(self._shared.cluster.delete_records, topic, self.partition, first)
        logger().info(
            "snapshot", partition=self.partition, bytes=self._log.snapshot_bytes, chunks=len(chunks)
        )

    async def _append(self, values: Sequence[bytes]) -> int:
        """Append to the changelog and return the first offset.

        Only records of fenced workers, which no reader accepts, may lie between our records. In
        a recreated changelog our record lands before our last one. Raises FencedOut unless each
        record directly follows our last one.
        """
        topic = self._shared.topics.assembly
        sent = [
            self._shared.producer.send_soon(topic, None, v, partition=self.partition)
            for v in values
        ]
        acks = await asyncio.gather(*sent)
        for ack in acks:
            due = self._last + 1
            if ack.offset < due or (
                ack.offset > due
                and not await asyncio.to_thread(self._all_fenced, due, ack.offset - 1)
            ):
                raise FencedOut(
                    f"{topic}-{self.partition}: our record came to offset {ack.offset}, "
                    f"not to {due}: another worker owns the partition, or the topic was made anew"
                )
            self._last = ack.offset
        return acks[0].offset

    def _all_fenced(self, first: int, last: int) -> bool:
        """Return whether no reader accepts the changelog records in an offset range (blocking)."""
        records = self._shared.cluster.read_range(
            self._shared.topics.assembly, self.partition, first, last
        )
        return not any(
            accepts(r.offset, decode_record(self._shared.decoder, r), self._epoch) for r in records
        )

    # -- 4: outputs

    async def _emit(self) -> None:
        """Send all unacknowledged outputs and wait for their acknowledgement."""
        state, topics, send = self._log.state, self._shared.topics, self._shared.producer.send_soon
        pending = state.pending
        if not pending:
            return
        facts: list[StateChange] = []
        for keys in slices(
            {k: payload_bytes(t) for k, t in pending.closings.items()}, self._shared.slice_bytes
        ):
            facts += await self._send_closings(keys)
        acks = [
            send(
                topics.trajectories,
                key_of_trajectory(mark.key[1]).encode(),
                self._encode(step_mark(mark)),
            )
            for mark in pending.marks
        ]
        await asyncio.gather(*acks)
        for first in range(0, len(pending.dead_letters), SLICE_RECORDS):
            letters = await self._dead_letters(pending.dead_letters[first : first + SLICE_RECORDS])
            await asyncio.gather(*(send(topics.dead_letters, key, value) for key, value in letters))
        await self._send_candidates(pending.revised)
        state.apply([ChangeKind.OUTPUTS_ACKNOWLEDGED])
        self._unflushed_changes = [[ChangeKind.OUTPUTS_ACKNOWLEDGED], *facts]

    async def _send_closings(self, keys: Sequence[RunTrajectory]) -> list[StateChange]:
        """Send some closed trajectories; return the changes with the location of their payload."""
        state, topic, send = (
            self._log.state,
            self._shared.topics.trajectories,
            self._shared.producer.send_soon,
        )
        closings = {k: state.pending.closings[k] for k in keys}
        payload = await self._payload(closings)
        sent: list[list[asyncio.Future[Ack]]] = []
        facts: list[StateChange] = []
        for key, trajectory in closings.items():
            done = assembled(key, trajectory, state.closed[key], payload)
            sent.append(
                [
                    send(topic, key_of_trajectory(key[1]).encode(), self._encode(part))
                    for part in done.parts
                ]
            )
            facts.append([ChangeKind.PAYLOAD_WRITTEN, *key, done.prompt_tokens, done.order])
        for entry, futures in zip(facts, sent, strict=True):
            places = await asyncio.gather(*futures)
            entry.append(
                [
                    self._topics_at_start.topic_ids[topic],
                    places[0].partition,
                    places[0].offset,
                    places[-1].offset,
                ]
            )
            state.apply(entry)
        for offset in {offset for t in closings.values() for offset in starts_of(t)}:
            self._cache.drop(offset)
        return facts

    async def _send_candidates(self, keys: Iterable[RunTrajectory]) -> None:
        """Send candidates in slices: one of 5,000 steps has a megabyte."""
        sent, size = list[asyncio.Future[Ack]](), 0
        for key in keys:
            value, headers = self._candidate(key)
            sent.append(
                self._shared.producer.send_soon(
                    self._shared.topics.candidates, key[0].encode(), value, headers
                )
            )
            size += len(value)
            if size >= self._shared.slice_bytes:
                await asyncio.gather(*sent)
                sent, size = [], 0
        await asyncio.gather(*sent)

    def _candidate(self, key: RunTrajectory) -> tuple[bytes, dict[str, bytes]]:
        """Return value and headers of the record."""
        closed = self._log.state.closed[key]
        assert closed.place is not None, f"{key}: a candidate before its trajectory"
        names = ("topic_id", "partition", "first_offset", "last_offset")
        headers = {name: str(part).encode() for name, part in zip(names, closed.place, strict=True)}
        return self._encode(candidate(key, closed, self._shared.decoder.codec)), headers

    async def _payload(
        self, closings: Mapping[RunTrajectory, OpenTrajectory]
    ) -> dict[int, CachedPayload]:
        """Return the payload of closing trajectories from the cache or the log. Marks as `lost`
        those whose records are gone.
        """
        state = self._log.state
        whole = {k: starts_of(t) for k, t in closings.items() if state.closed[k].outcome != "lost"}
        found = {
            o: kept
            for starts in whole.values()
            for o in starts
            if (kept := self._cache.get(o)) is not None
        }
        missing = {
            o: start for starts in whole.values() for o, start in starts.items() if o not in found
        }
        if missing:
            found.update(
                await asyncio.to_thread(lambda: list(self._inputs[STEPS].payload(missing)))
            )
        lost = [k for k, starts in whole.items() if any(o not in found for o in starts)]
        if lost:
            logger().error("payload_lost", partition=self.partition, trajectories=len(lost))
            entries: list[StateChange] = [
                [ChangeKind.PAYLOAD_LOST, *k, "payload lost to retention"] for k in lost
            ]
            for entry in entries:
                state.apply(entry)
            await self._append_delta(entries)
        return found

    async def _dead_letters(
        self, dead_letters: Sequence[DeadLetterDecision]
    ) -> list[tuple[bytes | None, bytes]]:
        """Return key and value of each dead letter. Reads records of earlier batches from their
        topic.
        """
        out = []
        records = dict(self._batch)
        for source in (STEPS, REWARDS):
            missing = [
                b.offset
                for b in dead_letters
                if b.source == source and (source, b.offset) not in records
            ]
            again = self._inputs[source].records(sorted(set(missing)))
            records.update({(source, r.offset): r for r in await asyncio.to_thread(list, again)})
        for burial in dead_letters:
            topic = self._shared.input(burial.source)
            record = records.get((burial.source, burial.offset))
            if record is None:
                record = Record(topic, self.partition, burial.offset, 0, None, None, {})
            letter = dead_letter(
                record,
                self._topics_at_start.topic_ids[topic],
                PROCESS,
                burial.reason,
                burial.detail,
            )
            # Not the clock: a dead letter that is sent again has the same bytes.
            out.append(
                (letter.key, self._encode(replace(letter, created_at=record.timestamp_ms * 1000)))
            )
            logger().warning(
                "dead_letter",
                topic=topic,
                partition=self.partition,
                offset=burial.offset,
                reason=burial.reason,
            )
        return out

    async def _tick_candidates(self) -> None:
        """Send the event time to admission, after its outputs, about once a second."""
        event_time, (last, at) = self._log.state.event_time, self._last_tick
        if event_time <= last or time.monotonic() - at < CANDIDATE_TICK_S:
            return
        self._last_tick = (event_time, time.monotonic())
        value = self._encode(Tick(partition=self.partition, event_time=event_time))
        topic, send = self._shared.topics.candidates, self._shared.producer.send_soon
        await asyncio.gather(
            *(send(topic, None, value, partition=p) for p in range(CANDIDATE_PARTITIONS))
        )
