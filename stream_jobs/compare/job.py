"""The comparison job: judges compare the members of a group and reward their wins.

1. `GroupFold` collects the members of a group from the candidates, until all are there or its
   deadline in event time has come.
2. The payload of each is read from its place on `claw.trajectories`.
3. The functions of the run reward the members; the rewards are sent and acknowledged.
4. The position follows, but stays before the oldest member of an open group: the topic is the only
   state. A repetition sends rewards with the same ids, which change nothing.

Unreadable candidates are left to admission, which makes them dead letters. Where trimming or
retention removed candidates, the job goes on with the ones that are left: their groups lack
members.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from clawstream.runtime.functions.pool import PoolStopped
from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.logs import logger
from clawstream.runtime.topics.event_time import first_tick_needed
from clawstream.runtime.topics.records import Decoder, now_micros
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Candidate, Reward, Trajectory
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.compare.evaluate import GroupEvaluator
from clawstream.stream_jobs.compare.fold import ClosedGroup, GroupFold, Member
from clawstream.stream_jobs.worker.evaluation import Evaluation
from clawstream.stream_jobs.worker.payload import payload_place, read_payload

GROUP = "compare"
GROUPS_AT_ONCE = 8
"""Bounds the payload in memory, and the requests that wait for a judge within their time-outs."""


class CompareJob:
    """A job of `clawstream.stream_jobs.worker.shell`. An exception from it must end the process."""

    def __init__(self, settings: Settings, cluster: Cluster, evaluator: GroupEvaluator) -> None:
        """Create the job. It closes `evaluator`."""
        self._evaluator = evaluator
        self._topics = settings.kafka.topics
        self.inputs: tuple[str, ...] = (self._topics.candidates,)
        self.tick_interval_s = 60.0
        self._group = f"{settings.kafka.topic_prefix}-{GROUP}"
        self._group_size = settings.admit.policy.group_size
        self._wait_ms = int(settings.comparison_wait_s * 1000)
        self._cluster = cluster
        self._producer = cluster.producer()
        self.decoder = Decoder(cluster, self._topics.schemas)
        self._evaluation = Evaluation(
            GROUPS_AT_ONCE,
            evaluator.pool,
            self._producer,
            self.decoder.codec,
            self._topics.rewards,
        )
        self._folds: dict[int, GroupFold] = {}

    async def assigned(self, partitions: Sequence[int]) -> Mapping[tuple[str, int], int]:
        """Resume at the group's positions.

        A partition without a position, or with one after its end, begins with the oldest record
        whose group may still wait; one whose position was trimmed begins with the oldest record.
        """
        first = await asyncio.to_thread(self._open, partitions)
        logger().info("partitions_assigned", partitions=list(partitions))
        return first

    def _open(self, partitions: Sequence[int]) -> dict[tuple[str, int], int]:
        """Begin the folds of partitions with the event time at their positions (blocking)."""
        topic, steps = self._topics.candidates, self._topics.steps
        tickers = self._cluster.topics(steps)[steps]
        committed = self._cluster.committed(self._group)
        recent = self._cluster.offsets_at(topic, int(time.time() * 1000) - self._wait_ms)
        found = dict[tuple[str, int], int]()
        for p, (low, high) in self._cluster.watermarks(topic, partitions).items():
            position = committed.get((topic, p))
            if position is None or position > high:
                position = recent[p]
            at = found[topic, p] = max(position, low)
            fold = GroupFold(tickers, self._group_size, self._wait_ms, self._evaluator.names)
            start = first_tick_needed(self._cluster, self.decoder, (topic, p), low, at, tickers)
            for record in self._cluster.read_range(topic, p, start, at - 1):
                if self.decoder.codec.is_tick(record.value):
                    self._fold(fold, record)
            self._folds[p] = fold
        return found

    async def revoked(self) -> None:
        """Drop the open groups; a restart reads them again."""
        self._folds = {}

    async def process(self, partition: int, records: Sequence[Record]) -> Mapping[str, int]:
        """Reward the groups that close; return the offset up to which all work is done."""
        fold = self._folds.get(partition)
        if fold is None:
            return {}
        groups = [group for record in records for group in self._fold(fold, record)]
        try:
            acks = await self._evaluation.run(groups, self._rewards)
        except PoolStopped:
            return {}  # the job ends: the next worker reads this batch again
        await asyncio.gather(*acks)
        return {self._topics.candidates: fold.position(records[-1].offset)}

    def _fold(self, fold: GroupFold, record: Record) -> list[ClosedGroup]:
        with suppress(Undecodable, UnknownSchema, ValueError):
            event = self.decoder.codec.decode(record.value)
            place = payload_place(record.headers) if isinstance(event, Candidate) else None
            return fold.fold(record.offset, event, place)
        return []

    def _rewards(self, group: ClosedGroup) -> list[Reward]:
        """Evaluate a group on a thread.

        Raises:
            PoolStopped: The job is closing.
            BlobStoreAway, Unavailable: The process restarts from its position.
        """
        rewards = self._evaluator.evaluate(group, self._read, now_micros())
        self._evaluation.evaluated += 1
        return rewards

    def goes_on(self) -> bool:
        """Return whether the evaluation of the groups in hand does."""
        return self._evaluation.goes_on()

    def _read(self, member: Member) -> Trajectory | str:
        if member.place is None:
            return "no payload"
        topic = self._topics.trajectories
        return read_payload(self._cluster, self.decoder, topic, member.candidate, member.place)

    def stop(self) -> None:
        """Stop running functions; the current batch is abandoned where it waits for one."""
        self._evaluator.close()

    async def tick(self) -> None:
        """Do nothing: time is that of the log."""

    def close(self) -> None:
        """Stop the evaluator and wait for records in flight, not for evaluations."""
        self._evaluator.close()
        self._evaluation.close()
        self._producer.close()
