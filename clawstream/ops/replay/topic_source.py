"""A replay's input from topics: a window of `claw.steps` and `claw.rewards`, one run of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from clawstream.ops.replay.fold import ReplayEvent
from clawstream.ops.replay.record_filter import RecordFilter
from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.kafka.window import Window, merge_by_time
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import FailedCall, Tick
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload
from clawstream.stream_jobs.assemble.payload.input_log import InputLog
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS


class TopicReplaySource:
    """Steps with ticks, and rewards, by log time. Reads only and is deterministic."""

    def __init__(
        self,
        cluster: Cluster,
        decoder: Decoder,
        steps: Window,
        rewards: Window,
        record_filter: RecordFilter,
        new_messages_bytes: int = 0,
    ) -> None:
        """new_messages_bytes: As in `Limits` of assemble."""
        self.end = 0
        self.unreadable = 0
        self._cluster, self._decoder, self._record_filter = cluster, decoder, record_filter
        self._steps, self._rewards = steps, rewards
        self._new_messages_bytes = new_messages_bytes

    def events(self) -> Iterator[ReplayEvent]:
        """Yield all records and ticks, as `ReplaySource.events`.

        Every record of the steps that is not replayed (of another run, a failed call) counts as a
        tick. Ticks of the rewards are omitted: the order of the events replaces them.
        """
        for time, record in merge_by_time(self._cluster, [self._steps, self._rewards]):
            self.end, p = time, record.partition
            source = STEPS if record.topic == self._steps.topic else REWARDS
            event = self._chosen(record)
            if event is not None:
                yield ReplayEvent(time, p, source, record.offset, record.key, event)
            elif source == STEPS:
                yield ReplayEvent(time, p, source, -1, None, Tick(partition=p))

    def _chosen(self, record: Record) -> Any | None:
        """Decode a record of the run; None for others."""
        if self._decoder.codec.is_tick(record.value):
            return None
        try:
            event = self._decoder.decode(record.value)
        except (Undecodable, UnknownSchema):
            self.unreadable += 1
            return None
        if not hasattr(event, "run_id") or isinstance(event, FailedCall):
            return None
        return self._record_filter.apply(event)

    def payload(
        self, partition: int, starts: Mapping[int, int]
    ) -> Iterable[tuple[int, CachedPayload]]:
        """As `InputLog.payload`."""
        log = InputLog(
            self._cluster, self._decoder, self._steps.topic, partition, self._new_messages_bytes
        )
        return log.payload(starts)
