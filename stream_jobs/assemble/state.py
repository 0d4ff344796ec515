"""What assemble knows of one partition, and how the entries of its state log change it. Pure; all times are log timestamps in ms.

The state is a fold over entries, small JSON arrays `[op, ...]`. `assemble.Fold` makes them while it reads the inputs, and applies them by
the same `Assembly.apply` by which a new owner rebuilds the state from the log. Payload (tokens, replies, metadata) is not in here:
only its offsets on `claw.steps`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from schemas.ids import is_bucket, is_unnamed, key_of_trajectory
from schemas.records import Channel, Outcome, StepMarkKind
from stream_jobs.assemble.closed_store import Archive
from stream_jobs.assemble.log_time import Silences
from stream_jobs.assemble.matching.anonymous_sessions import Bucket
from stream_jobs.assemble.matching.retries import why_retried
from stream_jobs.assemble.model import (
    CURATED as CURATED,
)
from stream_jobs.assemble.model import (
    REWARD as REWARD,
)
from stream_jobs.assemble.model import (
    STEPS,
    Assessed,
    Awaited,
    Burial,
    Closed,
    ClosedStep,
    Entry,
    Folded,
    Key,
    Mark,
    Marks,
    Open,
    Pending,
    RewardEntry,
    Source,
    StepEntry,
    Waiting,
    call_of,
)

LATE_MAX = 1000
"""Late steps remembered a trajectory; beyond it a re-sent late step is marked again."""


@dataclass(slots=True)
class Assembly:
    """All that assemble knows of one partition. applied, time, topic_ids: of `claw.steps` and `claw.rewards`. silences: of `claw.steps`.

    opened: by time of the last record; numbered: their keys by their numbers; anonymous: those of them that are in a bucket; agents: in an agent's session. closed: by time of
    closing. waiting: of each input, by offset; waiting_for: those offsets by what they wait for, so that a step looks at no others.
    numbered, buckets (agents' sessions too), anonymous, agents and waiting_for follow from the rest and are not stored.
    """

    applied: list[int] = field(default_factory=lambda: [-1, -1])
    time: list[int] = field(default_factory=lambda: [-1, -1])
    topic_ids: list[str] = field(default_factory=lambda: ["", ""])
    silences: Silences = field(default_factory=Silences)
    opened: OrderedDict[Key, Open] = field(default_factory=OrderedDict)
    numbered: dict[int, Key] = field(default_factory=dict)
    closed: Archive = field(default_factory=Archive)
    waiting: tuple[OrderedDict[int, Waiting], OrderedDict[int, Waiting]] = field(
        default_factory=lambda: (OrderedDict(), OrderedDict())
    )
    pending: Pending = field(default_factory=Pending)
    waiting_for: dict[Awaited, dict[int, None]] = field(default_factory=dict)
    buckets: dict[Key, Bucket] = field(default_factory=dict)
    anonymous: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    agents: OrderedDict[Key, None] = field(default_factory=OrderedDict)

    @property
    def event_time(self) -> int:
        """Event time of the partition: the minimum over its inputs; -1 before both have begun."""
        return min(self.time)

    def apply(self, entry: Entry) -> None:
        """Change the state by one entry."""
        op, *args = entry
        _APPLY[op](self, *args)

    # -- one method for each kind of entry; the constant beside it is its op

    def _opened(self, run: str, key: str, at: int, channel: Channel, number: int) -> None:
        self.opened[run, key] = Open(number, at, channel, at)
        self.numbered[number] = (run, key)

    def _attributes(self, run: str, key: str, at: int, given: Mapping[str, Any]) -> None:
        trajectory = self._touch((run, key), at)
        for name, value in given.items():
            if getattr(trajectory, name) is None:
                setattr(trajectory, name, value)

    def _step(self, number: int, step: list[Any]) -> None:
        entry, key = StepEntry(*step), self.numbered[number]
        steps = self._touch(key, entry.at).steps
        steps.append(entry)
        if (bucket := self._bucket(key)) is not None:
            bucket.add(key[1], len(steps) - 1, entry)

    def _retried(self, run: str, key: str, gone: int, counts: int) -> None:
        steps = self.opened[run, key].steps
        steps[gone] = steps[gone]._replace(retried=counts)
        steps[counts] = steps[counts]._replace(retried=None)

    def _touch(self, key: Key, at: int) -> Open:
        trajectory = self.opened[key]
        trajectory.last = at
        self.opened.move_to_end(key)
        if (idle := self._idle(key)) is not None:
            idle[key] = None
            idle.move_to_end(key)
        return trajectory

    def _idle(self, key: Key) -> OrderedDict[Key, None] | None:
        """Where a trajectory is that ends by inactivity; None: it does not."""
        name = key_of_trajectory(key[1])
        return None if not is_unnamed(name) else self.anonymous if is_bucket(name) else self.agents

    def _bucket(self, key: Key) -> Bucket | None:
        """The bucket or agent's session that a trajectory is in; None: it is in none."""
        name = key_of_trajectory(key[1])
        return self.buckets.setdefault((key[0], name), Bucket()) if is_unnamed(name) else None

    def _closed(self, run: str, key: str, outcome: Outcome, reason: str | None, at: int) -> None:
        was = self.opened.pop((run, key))
        del self.numbered[was.number]
        if (idle := self._idle((run, key))) is not None:
            idle.pop((run, key), None)
        if (bucket := self._bucket((run, key))) is not None:
            bucket.close(key, was.steps)
        for i, s in enumerate(was.steps):
            if s.retried is not None:
                was.steps[i] = s._replace(reason=why_retried(was.steps, i))
        self.pending.closings[run, key] = was
        steps = [
            ClosedStep(s.tail, s.at, s.response, s.reason, s.oldest, s.newest, s.tags)
            for s in was.steps
        ]
        closed = Closed(
            was.opened_at,
            at,
            outcome,
            reason,
            was.channel,
            was.group_id,
            was.group_size,
            was.round,
            steps,
            was.folded,
        )
        self.closed.add((run, key), closed)

    def _lost(self, run: str, key: str, reason: str) -> None:
        closed = self.closed.change((run, key))
        closed.outcome, closed.reason = "lost", reason

    def _facts(
        self, run: str, key: str, prompt_tokens: int, order: list[int], place: list[Any]
    ) -> None:
        closed = self.closed.change((run, key))
        if order:
            closed.steps = [closed.steps[at] for at in order]
        closed.prompt_tokens = prompt_tokens
        closed.place = (place[0], place[1], place[2], place[3])

    def _revised(self, run: str, key: str) -> None:
        self.closed.change((run, key)).revision += 1
        self.pending.revised[run, key] = None

    def _forgotten(self, run: str, key: str) -> None:
        closed = self.closed.pop((run, key))
        if (bucket := self._bucket((run, key))) is not None:
            bucket.forget(s.tail for s in closed.steps)
            if not bucket:
                del self.buckets[run, key_of_trajectory(key)]

    def _reward(self, run: str, key: str, reward: list[Any]) -> None:
        entry = RewardEntry(*reward)
        folded = self._folded((run, key))
        if folded.beats(entry):
            folded.rewards[entry.slot] = entry

    def _curated(
        self,
        run: str,
        key: str,
        event: int,
        target: str,
        fields: Mapping[str, Any],
        offset: int = -1,
    ) -> None:
        folded = self._folded((run, key))
        if event not in folded.seen:
            folded.seen[event] = None
            folded.marks.setdefault(target, Marks()).take(fields, offset)

    def _assessed(self, run: str, key: str, assessed: list[Any]) -> None:
        folded = self._folded((run, key))
        if folded.supersedes(assessed):
            folded.assessed = Assessed(*assessed)

    def _waits(
        self,
        source: Source,
        offset: int,
        at: int,
        run: str,
        key: str,
        tail: str | None,
        entry: Entry,
    ) -> None:
        self.waiting[source][offset] = waiting = Waiting(
            source, offset, at, (run, key), tail, entry
        )
        self.waiting_for.setdefault(waiting.awaited, {})[offset] = None

    def _waits_no_more(self, source: Source, offset: int) -> None:
        awaited = self.waiting[source].pop(offset).awaited
        left = self.waiting_for[awaited]
        del left[offset]
        if not left:
            del self.waiting_for[awaited]

    def _marked(
        self,
        run: str,
        key: str,
        step_id: str,
        kind: StepMarkKind,
        why: str | None,
        offset: int,
        hashed: int,
    ) -> None:
        self.pending.marks.append(Mark((run, key), step_id, kind, why, offset))
        closed = self.closed.change((run, key))
        if len(closed.late) < LATE_MAX:
            closed.late.append(hashed)

    def _buried(self, source: Source, offset: int, reason: str, detail: str) -> None:
        self.pending.burials.append(Burial(source, offset, reason, detail))

    def _done(self) -> None:
        self.pending = Pending()
        self.closed.pack()

    def _times(self, steps: int, rewards: int) -> None:
        self.time = [steps, rewards]

    def _silent(self, start: int, end: int, forget: int) -> None:
        self.silences.add(start, end, forget)

    def _new_position(self, source: Source, topic_id: str, applied: int) -> None:
        """Another topic of that name: nothing before counts for it. Without its steps no closed trajectory can be told from a new one."""
        self.topic_ids[source] = topic_id
        self.applied[source] = applied
        self.time[source] = -1
        for offset in list(self.waiting[source]):
            self._waits_no_more(source, offset)
        # An offset of the former topic: in this one another record lies there.
        self.pending.burials = [b for b in self.pending.burials if b.source != source]
        if source == STEPS:
            for key in [
                k
                for k in self.closed
                if k not in self.pending.closings and k not in self.pending.revised
            ]:
                self._forgotten(*key)
        else:
            for key in [*self.opened, *self.closed]:
                self._folded(key).forget_offsets()

    def _find_buckets(self) -> None:
        """What is derived from the trajectories."""
        for run, key in self.closed:
            if (bucket := self._bucket((run, key))) is not None:
                bucket.calls.update((call_of(s.tail), key) for s in self.closed[run, key].steps)
        for (run, key), trajectory in self.opened.items():
            bucket, idle = self._bucket((run, key)), self._idle((run, key))
            if bucket is not None and idle is not None:
                idle[run, key] = None
                for at, step in enumerate(trajectory.steps):
                    bucket.add(key, at, step)

    def _folded(self, key: Key) -> Folded:
        """Of an open or closed trajectory, to be changed at once."""
        trajectory = self.opened.get(key)
        return trajectory.folded if trajectory is not None else self.closed.change(key).folded

    # -- snapshots

    def dump(self) -> bytes:
        """The state as JSON, without what is pending: a snapshot is taken when nothing is."""
        return orjson.dumps({
            "applied": self.applied, "time": self.time, "topic_ids": self.topic_ids, "silences": self.silences.dump(),
            "opened": [[*k, v.dump()] for k, v in self.opened.items()],
            "closed": self.closed.dump(),
            "waiting": [[w.source, w.offset, w.at, *w.key, w.tail, w.entry] for side in self.waiting for w in side.values()],
        })  # fmt: skip

    @classmethod
    def load(cls, packed: bytes) -> Assembly:
        """The state of `dump`."""
        plain = orjson.loads(packed)
        state = cls(
            plain["applied"],
            plain["time"],
            plain["topic_ids"],
            Silences.load(plain.get("silences", [[], [], []])),
        )
        for run, key, trajectory in plain["opened"]:
            state.opened[run, key] = opened = Open.load(trajectory)
            state.numbered[opened.number] = (run, key)
        state.closed = Archive(
            ((run, key), orjson.dumps(trajectory)) for run, key, trajectory in plain["closed"]
        )
        state._find_buckets()
        for w in plain["waiting"]:
            state._waits(*w)
        return state


OPENED, ATTRIBUTES, STEP, CLOSED, LOST, FACTS, REVISED, FORGOTTEN = (
    "o",
    "a",
    "s",
    "c",
    "l",
    "f",
    "v",
    "z",
)
RETRIED, ASSESSED, SILENT = "y", "e", "h"
WAITS, WAITS_NO_MORE, MARKED, BURIED, DONE, TIMES, NEW = "w", "x", "m", "d", "D", "t", "n"

_APPLY: Mapping[str, Any] = {
    OPENED: Assembly._opened, ATTRIBUTES: Assembly._attributes, STEP: Assembly._step, CLOSED: Assembly._closed,
    LOST: Assembly._lost, FACTS: Assembly._facts, REVISED: Assembly._revised, FORGOTTEN: Assembly._forgotten,
    REWARD: Assembly._reward, CURATED: Assembly._curated, WAITS: Assembly._waits, WAITS_NO_MORE: Assembly._waits_no_more,
    MARKED: Assembly._marked, BURIED: Assembly._buried, DONE: Assembly._done, TIMES: Assembly._times,
    NEW: Assembly._new_position, SILENT: Assembly._silent, RETRIED: Assembly._retried, ASSESSED: Assembly._assessed,
}  # fmt: skip
