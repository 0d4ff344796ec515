"""The fold of a replay: recorded events by log time in, output records of assemble and reward out.

It uses assemble's fold (`clawstream.stream_jobs.assemble.fold`) without the timing of a live run:
every record is a batch of its own, partitions advance together by log time, and rules answer as
soon as a trajectory closes. The same records therefore give the same candidates in the same order
at any speed, as in a run in which no process ever lags. Pure.

The clock of `claw.steps` is the partition's own, ticks included, as in a live run. That of
`claw.rewards` is common: all earlier records have been folded, so no older reward can arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.ids import key_of_trajectory, parse_version
from clawstream.schemas.records import Assessment, Reward, Step, StepMark, Tick, Trajectory
from clawstream.schemas.records.trajectory_parts import joined
from clawstream.schemas.topics import CANDIDATE_PARTITIONS, partition_of
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.output_records import (
    assembled,
    candidate,
    payload_headers,
    starts_of,
    step_mark,
)
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload, PayloadCache
from clawstream.stream_jobs.assemble.state.changes import (
    OutputsAcknowledged,
    PayloadLost,
    PayloadWritten,
)
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    OpenTrajectory,
    RunTrajectory,
    SourceTopic,
)

Rules = Callable[[Trajectory], Iterable[Reward | Assessment]]
"""Evaluates the reward functions and quality rules of a whole trajectory."""
ReadPayload = Callable[[int, Mapping[int, int]], Iterable[tuple[int, CachedPayload]]]
"""Reads payload by (partition, starts), as `InputLog.payload`."""


class ReplayEvent(NamedTuple):
    """One record of an input.

    time: Log time in ms, non-decreasing. record: A record of `clawstream.schemas.records`. The
    offset of a tick is meaningless.
    """

    time: int
    partition: int
    source: SourceTopic
    offset: int
    key: bytes | None
    record: Any


class ReplaySource(Protocol):
    """The input of a replay: topics, or the lake."""

    end: int
    """The last log time of the window in ms; known once all events were read."""
    unreadable: int
    """Number of omitted records that could not be decoded."""

    def events(self) -> Iterator[ReplayEvent]:
        """All records and ticks of one run, in order."""

    def payload(
        self, partition: int, starts: Mapping[int, int]
    ) -> Iterable[tuple[int, CachedPayload]]:
        """Read payload that the cache has evicted, as `InputLog.payload`."""


class OutputRecord(NamedTuple):
    """A record to write. topic: Its name in `Topics`, e.g. "rewards"."""

    topic: str
    partition: int
    key: bytes | None
    event: Any
    headers: Mapping[str, bytes] | None
    time: int


@dataclass(slots=True)
class ReplayStats:
    """Counts of a replay.

    trajectories: By outcome. answers: Results of rules that the replay evaluated. no_rewards: Those
    without a reward, by reason. newest_attempt: The highest attempt of this run's version ids that
    steps name, or None. dead_letters: Records that would have become dead letters, by reason.
    """

    steps: int = 0
    rewards: int = 0
    marks: int = 0
    trajectories: Counter[str] = field(default_factory=Counter)
    candidates: int = 0
    answers: int = 0
    no_rewards: Counter[str] = field(default_factory=Counter)
    newest_attempt: int | None = None
    dead_letters: Counter[str] = field(default_factory=Counter)

    def count_step(self, step: Step, run_id: str) -> None:
        """Count a step."""
        self.steps += 1
        spans = (span.version for span in step.versions)
        for name in {step.version_first, step.version_last, *spans}:
            version = parse_version(name or "")
            if version is not None and version.run_id == run_id:
                self.newest_attempt = max(version.attempt, self.newest_attempt or 0)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts for a report."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: dict(v) if isinstance(v, Counter) else v for n, v in counts.items()}


class Replay:
    """All partitions of one run.

    Args:
        trajectories_id: Topic id of the replay's trajectories.
        read_payload: Reads payload that the cache has evicted.
    """

    def __init__(
        self,
        run_id: str,
        partitions: int,
        limits: Limits,
        codec: Codec,
        rules: Rules,
        trajectories_id: str,
        cache_bytes: int,
        read_payload: ReadPayload,
    ) -> None:
        self.stats = ReplayStats()
        self.run_id, self.codec, self.trajectories_id = run_id, codec, trajectories_id
        self.candidates_at = partition_of(run_id.encode(), CANDIDATE_PARTITIONS)
        self.rules, self.read_payload = rules, read_payload
        each = cache_bytes // partitions
        self._parts = [_Partition(p, self, limits, each) for p in range(partitions)]
        self._last_tick = -1

    def take(self, event: ReplayEvent) -> list[OutputRecord]:
        """Fold one record and return the output records."""
        out = self._parts[event.partition].take(event)
        return [*self.tick(event.time), *out] if any(o.topic == "candidates" for o in out) else out

    def tick(self, time: int) -> list[OutputRecord]:
        """Advance the event time of admission to `time`, in all partitions at once.

        It precedes candidates of that time.
        """
        if time <= self._last_tick:
            return []
        self._last_tick = time
        ticks = (Tick(partition=p, event_time=time) for p in range(len(self._parts)))
        return [
            OutputRecord("candidates", self.candidates_at, None, tick, None, time) for tick in ticks
        ]

    @property
    def open(self) -> int:
        """Number of open trajectories."""
        return sum(len(p.state.opened) for p in self._parts)

    @property
    def waiting(self) -> int:
        """Number of rewards, marks and completions with an unknown target."""
        return sum(len(side) for p in self._parts for side in p.state.waiting)


class _Partition:
    """One partition of assemble without a changelog: a killed replay starts over."""

    def __init__(self, partition: int, replay: Replay, limits: Limits, cache_bytes: int) -> None:
        self.state = PartitionState()
        self._partition, self._replay = partition, replay
        self._fold = AssemblyFold(self.state, limits)
        self._cache = PayloadCache(cache_bytes)
        self._rewards = 0
        """Next offset of `claw.rewards`, recorded or created here."""
        self._trajectories = 0
        """Next offset of the replay's trajectories."""

    def take(self, event: ReplayEvent) -> list[OutputRecord]:
        """Fold one record and return the records that its decisions give."""
        stats, out, record = self._replay.stats, list[OutputRecord](), event.record
        # Events come by time, so no older reward can arrive.
        self._fold.tick(REWARDS, event.time)
        if isinstance(record, Tick):
            self._fold.tick(STEPS, event.time)
        elif event.source == STEPS:
            kept = self._fold.record(STEPS, event.offset, event.time, event.key, record)
            if kept is not None:
                self._cache.put(event.offset, kept)
            if isinstance(record, Step):
                stats.count_step(record, self._replay.run_id)
        else:
            out.append(self._reward(event.key, record, event.time))
            stats.rewards += 1
        return out + self._outputs(event.time)

    def _reward(self, key: bytes | None, event: Any, time: int) -> OutputRecord:
        self._fold.record(REWARDS, self._rewards, time, key, event)
        self._rewards += 1
        return OutputRecord("rewards", self._partition, key, event, None, time)

    def _outputs(self, time: int) -> list[OutputRecord]:
        """Return the records of all pending decisions."""
        out, pending = list[OutputRecord](), self.state.pending
        for key, trajectory in list(pending.closings.items()):
            out += self._closing(key, trajectory, time)
        self._fold.finish_batch()
        if not pending:
            return out
        for mark in pending.marks:
            name = key_of_trajectory(mark.key[1]).encode()
            out.append(self._trajectory_record(name, step_mark(mark), time))
            self._replay.stats.marks += 1
        self._replay.stats.dead_letters.update(d.reason for d in pending.dead_letters)
        out += [self._candidate(key, time) for key in pending.revised]
        OutputsAcknowledged().apply(self.state)
        return out

    def _closing(
        self, key: RunTrajectory, trajectory: OpenTrajectory, time: int
    ) -> Iterator[OutputRecord]:
        replay, state = self._replay, self.state
        payload = self._payload(key, trajectory)
        closed = state.closed[key]
        done = assembled(key, trajectory, closed, payload)
        name, first = key_of_trajectory(key[1]).encode(), self._trajectories
        for part in done.parts:
            yield self._trajectory_record(name, part, time)
        place = (replay.trajectories_id, self._partition, first, self._trajectories - 1)
        PayloadWritten(key, done.prompt_tokens, done.order, place).apply(state)
        for offset in starts_of(trajectory):
            self._cache.drop(offset)
        replay.stats.trajectories[closed.outcome] += 1
        for reward in replay.rules(joined(done.parts)):
            yield self._reward(name, reward, time)
            replay.stats.answers += 1
            if isinstance(reward, Reward) and reward.value is None:
                replay.stats.no_rewards[reward.reason or "no reason"] += 1

    def _payload(self, key: RunTrajectory, trajectory: OpenTrajectory) -> dict[int, CachedPayload]:
        """Return the trajectory's payload; if retention has removed some, it closes as lost."""
        if self.state.closed[key].outcome == "lost":
            return {}
        starts = starts_of(trajectory)
        found, missing = self._cache.split(starts)
        if missing:
            found.update(self._replay.read_payload(self._partition, missing))
        if any(o not in found for o in starts):
            PayloadLost(key, "payload lost to retention").apply(self.state)
        return found

    def _trajectory_record(
        self, key: bytes, event: Trajectory | StepMark, time: int
    ) -> OutputRecord:
        self._trajectories += 1
        return OutputRecord("trajectories", self._partition, key, event, None, time)

    def _candidate(self, key: RunTrajectory, time: int) -> OutputRecord:
        replay, closed = self._replay, self.state.closed[key]
        headers = payload_headers(key, closed)
        replay.stats.candidates += 1
        (event, _), run = candidate(key, closed, replay.codec), key[0].encode()
        return OutputRecord("candidates", replay.candidates_at, run, event, headers, time)
