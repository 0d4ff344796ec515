"""The reward job: assess and reward closed trajectories by the configured functions.

Its only state is the position of its consumer group.

A trajectory in several parts is rewarded when its last part arrives. The position stays before its
first part until then, so a restart reads all parts again. A writer that was killed between two
parts starts again with part 0. If a trajectory stays incomplete, for example because a part cannot
be decoded, it expires: its first part becomes a dead letter, and its rewards are `no_reward`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from clawstream.runtime.functions.pool import PoolStopped
from clawstream.runtime.kafka import Ack, Cluster, KafkaError, Record, SourceTruncated
from clawstream.runtime.kafka.truncation import check_truncation
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.records import Decoder, dead_letter, decode_all, now_micros
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Assessment, DeadLetterResolved, Reward, StepMark, Trajectory
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.reward.evaluate import RuleEvaluator
from clawstream.stream_jobs.worker.evaluation import Evaluation

PROCESS = "reward"
GROUP = "reward"
INCOMPLETE = "a part of it never came"
EXPIRE_RECORDS = 20_000
EXPIRE_MS = 6 * 3_600_000
"""A trajectory expires when this many records of its partition, or this much log time, follow its
last part without the next one.

Parts are written one after the other. A writer that died between two parts writes all of them again
before anything new, except for outputs of the same decision.
"""
CONTROL_MAX = 8
"""Offsets after the last record that may be control records; a longer gap has records."""


@dataclass(slots=True)
class PartialTrajectory:
    """A trajectory with missing parts: its first record; offset and time of its latest part."""

    first: Record
    last: int
    at: int
    parts: dict[int, Trajectory]


class PartBuffer:
    """Join the parts of trajectories of one partition. Pure."""

    def __init__(self, expire_records: int = EXPIRE_RECORDS, expire_ms: int = EXPIRE_MS) -> None:
        self._begun: dict[tuple[str, str], PartialTrajectory] = {}
        self._limits = (expire_records, expire_ms)

    def take(self, record: Record, part: Trajectory) -> Trajectory | None:
        """Add a part; return the trajectory when it is complete.

        Drops a part without a first part. Parts of a fenced writer may be mixed in; they are
        identical.
        """
        key = (part.run_id, part.trajectory_id)
        if part.part == 0:
            self._begun[key] = PartialTrajectory(
                record, record.offset, record.timestamp_ms, {0: part}
            )
        begun = self._begun.get(key)
        if (
            begun is None
            or part.parts != begun.parts[0].parts
            or not 0 <= part.part < max(1, part.parts)
        ):
            return None
        begun.parts[part.part] = part
        begun.last, begun.at = record.offset, record.timestamp_ms
        if len(begun.parts) < part.parts:
            return None
        del self._begun[key]
        return joined([begun.parts[i] for i in sorted(begun.parts)])

    def expire(self, now: Record) -> list[tuple[Record, Trajectory]]:
        """Remove trajectories that will not become complete, as of the record `now`."""
        records, ms = self._limits
        late = [
            k
            for k, b in self._begun.items()
            if now.offset - b.last > records or now.timestamp_ms - b.at > ms
        ]
        return [(begun.first, begun.parts[0]) for begun in map(self._begun.pop, late)]

    def done(self, last: int) -> int:
        """Return the highest offset, up to `last`, below which no buffered part remains."""
        return min((b.first.offset - 1 for b in self._begun.values()), default=last)


class RewardJob:
    """A job of `clawstream.stream_jobs.worker.shell`. An exception from it must end the process."""

    def __init__(self, settings: Settings, cluster: Cluster, evaluator: RuleEvaluator) -> None:
        """Create the job. It closes `evaluator`."""
        self.evaluator = evaluator
        self._topics = settings.kafka.topics
        self.inputs: tuple[str, ...] = (self._topics.trajectories,)
        self.tick_interval_s = 60.0
        self._group = f"{settings.kafka.topic_prefix}-{GROUP}"
        self._cluster = cluster
        self._producer = cluster.producer()
        self.decoder = Decoder(cluster, self._topics.schemas)
        self._evaluation = Evaluation(
            settings.functions.calls_at_once,
            evaluator.pool,
            self._producer,
            self.decoder.codec,
            self._topics.rewards,
        )
        self._buffers: dict[int, PartBuffer] = {}
        self._due: dict[int, int] = {}  # the next offset of each partition
        self._topic_id = ""

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """Resume at the group's positions, without one at the start of the log.

        Raises:
            SourceTruncated: The topic lost a position.
        """
        self._buffers = {p: PartBuffer() for p in partitions}
        await asyncio.to_thread(self._check_positions, partitions)
        logger().info("partitions_assigned", partitions=list(partitions))
        return {(self._topics.trajectories, p): due for p, due in self._due.items()}

    def _check_positions(self, partitions: Sequence[int]) -> None:
        topic, self._due = self._topics.trajectories, {}
        self._topic_id = self._cluster.topic_id(topic)
        ends, committed = (
            self._cluster.watermarks(topic, partitions),
            self._cluster.committed(self._group),
        )
        for p, (low, high) in ends.items():
            position = committed.get((topic, p), low)
            if low == high == position + 1 and self._was_control_record(p, position):
                position = high
            if not low <= position <= high:
                raise SourceTruncated(
                    f"source truncated: {topic}-{p} holds offsets {low} to {high - 1}, position "
                    f"{position}; run clawstream status --positions"
                )
            self._due[p] = position

    def _was_control_record(self, partition: int, offset: int) -> bool:
        """Return whether the last offset of a log, now empty, was a control record (blocking).

        It was if a replay of dead letters has sent the record before it: that record was read, so
        its transaction has ended, and the control record has the next offset. Without this proof a
        record may have been lost.
        """
        for record in self._cluster.read_all(self._topics.dead_letters, await_open=True):
            with suppress(Undecodable, UnknownSchema):
                event = self.decoder.decode(record.value)
                if isinstance(event, DeadLetterResolved) and (
                    (event.sent_topic_id, event.sent_partition, event.sent_offset)
                    == (self._topic_id, partition, offset - 1)
                ):
                    logger().info("control_record_removed", partition=partition, offset=offset)
                    return True
        return False

    def _skip_control_records(self) -> None:
        """Advance past trailing control records while the log still has them (blocking)."""
        topic = self._topics.trajectories
        for p, due in list(self._due.items()):
            end = self._cluster.end(topic, p)
            if 0 < end - due <= CONTROL_MAX and not any(
                True for _ in self._cluster.read_range(topic, p, due, end - 1)
            ):
                self._due[p] = max(end, self._due.get(p, end))

    async def _check_no_gap(self, partition: int, records: Sequence[Record]) -> None:
        """Raise SourceTruncated when retention removed records that were not yet read."""
        due = self._due[partition]
        for record in records:
            if record.offset > due:
                await asyncio.to_thread(
                    check_truncation, self._cluster, record.topic, partition, due, record.offset
                )
            due = record.offset + 1
        self._due[partition] = records[-1].offset + 1

    async def revoked(self) -> None:
        """Drop the buffers; a restart reads the parts again."""
        self._buffers = {}

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Reward complete trajectories; return the offsets up to which all work is done."""
        buffer = self._buffers.get(partition)
        if buffer is None:
            return {}
        await self._check_no_gap(partition, records)
        dead_letters: list[tuple[Record, str, str]] = []
        decoded = decode_all(
            self.decoder.codec, records, lambda *letter: dead_letters.append(letter)
        )
        for record, event in decoded:
            if not isinstance(event, Trajectory | StepMark):
                dead_letters.append(
                    (
                        record,
                        "invalid",
                        f"a {type(event).__name__} does not belong on claw.trajectories",
                    )
                )
        whole = [
            t
            for r, e in decoded
            if isinstance(e, Trajectory) and (t := buffer.take(r, e)) is not None
        ]
        for record, first in buffer.expire(records[-1]):
            dead_letters.append((record, "invalid", f"{INCOMPLETE}: {first.parts} were due"))
            whole.append(replace(first, outcome="lost", reason=INCOMPLETE, segments=(), steps=()))
        try:
            acks = await self._evaluate_and_send(whole)
        except PoolStopped:
            return {}  # the job ends: the next worker reads this batch again
        encode, send = self.decoder.codec.encode, self._producer.send_soon
        for record, reason, detail in dead_letters:
            letter = dead_letter(record, self._topic_id, PROCESS, reason, detail)
            acks.append(send(self._topics.dead_letters, letter.key, encode(letter)))
            logger().warning(
                "dead_letter",
                topic=record.topic,
                partition=partition,
                offset=record.offset,
                reason=reason,
            )
        await asyncio.gather(*acks)
        return {self._topics.trajectories: buffer.done(records[-1].offset)}

    async def _evaluate_and_send(
        self, trajectories: Sequence[Trajectory]
    ) -> list[asyncio.Future[Ack]]:
        """Evaluate trajectories and send the results; return the acknowledgements.

        Built-in functions run on one thread. For runs with users' functions, as many trajectories
        are evaluated at once as the child processes take, and each is sent when it is done.

        Raises:
            PoolStopped: The job is closing.
        """
        quick, slow = list[Trajectory](), list[Trajectory]()
        for trajectory in trajectories:
            (slow if self.evaluator.uses_child_processes(trajectory.run_id) else quick).append(
                trajectory
            )
        send = self._evaluation.send
        acks = send(await asyncio.to_thread(self._evaluate, quick)) if quick else []
        return acks + await self._evaluation.run([[t] for t in slow], self._evaluate)

    def _evaluate(self, trajectories: Sequence[Trajectory]) -> list[Reward | Assessment]:
        """Evaluate trajectories on a thread.

        Raises:
            BlobStoreAway: The blob store cannot be reached; the process restarts from its position.
            PoolStopped: The job is closing.
        """
        now, results = now_micros(), list[Reward | Assessment]()
        for trajectory in trajectories:
            results += self.evaluator.evaluate(trajectory, now)
            self._evaluation.evaluated += 1
        return results

    def goes_on(self) -> bool:
        """Return whether the evaluation of the batch in hand does."""
        return self._evaluation.goes_on()

    def stop(self) -> None:
        """Stop running functions; the current batch is abandoned where it waits for one."""
        self.evaluator.close()

    async def tick(self) -> None:
        """Skip trailing control records, which may outlive the retention of the log."""
        with suppress(KafkaError):  # away for now: the next tick looks again
            await asyncio.to_thread(self._skip_control_records)

    def close(self) -> None:
        """Stop the evaluator and wait for records in flight, not for evaluations.

        The worker's time limit for its end cannot fire while this blocks.
        """
        self.evaluator.close()
        self._evaluation.close()
        self._producer.close()
