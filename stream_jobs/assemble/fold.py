"""The fold of assemble: records of one partition of `claw.steps` and `claw.rewards` in, state
changes out. Pure.

Rules (docs/contract.md):

- A trajectory consists of the steps of one (run, trajectory key) from its first record to its
  closing; in a gateway-assigned session, of the steps that `anonymous_sessions` assigns to it.
  It closes when it is completed, failed or abandoned, or when a record of `claw.steps`, ticks
  included, has a timestamp (running maximum) beyond its time-out; that record is folded after
  the closing. An interval without any record, ticks included, counts for no time-out
  (`log_time`). In a gateway-assigned session inactivity is the normal end, `completed`, and the
  next step begins the next trajectory. Only `claw.steps` decides the content of a trajectory, so
  its steps do not depend on how the inputs interleave.
- Rewards, curation and assessments apply to open and closed trajectories alike. A target counts
  as known when it appeared at most `orphan_after` after the reward, by log timestamps of both
  inputs, regardless of read order.
- A record without a known target waits `orphan_after` on the clock of `claw.steps`, then becomes
  a dead letter, `unknown_target`. A completion of an unknown trajectory waits too, because steps
  from a gateway's spool may still arrive. At the end of that time it closes the trajectory, if
  there is one.
- A trajectory has a bounded number of steps and bytes of payload: the step that reaches a bound
  closes it as `timed_out`.
- A duplicate step id changes nothing. A step after the closing is marked late; in a
  gateway-assigned session it begins the next trajectory.
- Of a call that the client retried only one step counts (`retries`); the other is marked and
  never trained.
- A trajectory has a bounded number of rewards and marks; further ones become dead letters,
  `too_many_rewards`.
- A record that cannot be folded becomes a dead letter with the reason, and has no other effect.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from schemas.errors import InvalidId
from schemas.ids import key_of_trajectory
from schemas.records import FailedCall, Outcome, Tick
from stream_jobs.assemble.handlers import EventHandler, Limits, RejectedRecord
from stream_jobs.assemble.model import (
    REWARDS,
    STEPS,
    ChangeKind,
    RunTrajectory,
    SourceTopic,
    StateChange,
)
from stream_jobs.assemble.payload.cache import CachedPayload
from stream_jobs.assemble.state import PartitionState

TRACE_CHARS = 4000


class AssemblyFold:
    """Folds records into a state and collects the changes. Call `record` for each record, then
    `finish_batch`.
    """

    def __init__(self, state: PartitionState, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self._handler = EventHandler(state, limits)
        self._entries: list[StateChange] = []
        self._changed: dict[RunTrajectory, None] = {}
        self._oldest_closed: tuple[RunTrajectory, int] | None = None

    def record(
        self, source: SourceTopic, offset: int, timestamp: int, key: bytes | None, event: Any
    ) -> CachedPayload | None:
        """Fold one record. A record at or below `applied` has no effect.

        Args:
            timestamp: Log timestamp, ms.
            event: A record of `schemas.records`, or UndecodableRecord.

        Returns:
            The payload to cache for its trajectory, if any.
        """
        state = self.state
        if offset <= state.applied[source]:
            return None
        state.applied[source] = offset
        self.tick(source, timestamp)
        if isinstance(event, Tick) or (isinstance(event, FailedCall) and source == STEPS):
            # A failed call is recorded only in the lake: nothing was sampled.
            return None
        try:
            entries, payload = self._handler.handle(source, offset, key, event)
        except (RejectedRecord, InvalidId, ValueError) as e:
            reason = e.reason if isinstance(e, RejectedRecord) else "invalid"
            entries, payload = (
                [[ChangeKind.DEAD_LETTERED, source, offset, reason, str(e)[:TRACE_CHARS]]],
                None,
            )
        except MemoryError:
            raise  # the machine's fault, not the record's: the next process may have more
        except Exception:  # noqa: BLE001 - a record must not stop its partition
            # The record becomes a dead letter with the traceback.
            entries, payload = (
                [
                    [
                        ChangeKind.DEAD_LETTERED,
                        source,
                        offset,
                        "invalid",
                        traceback.format_exc()[-TRACE_CHARS:],
                    ]
                ],
                None,
            )
        self._apply(entries)
        if source == STEPS and self.state.waiting_for:
            self._resolve_waiting(entries)
        return payload

    def tick(self, source: SourceTopic, timestamp: int) -> None:
        """Advance the clock of an input."""
        if source == STEPS:
            self._record_silence(timestamp)
        self.state.time[source] = max(self.state.time[source], timestamp)
        if source == STEPS:
            self._expire()
        self._evict_closed()

    def finish_batch(self) -> list[StateChange]:
        """Finish the batch: give each changed closed trajectory one new candidate revision. Returns
        all changes of the batch.
        """
        self._apply([[ChangeKind.REVISED, *key] for key in self._changed])
        self._changed.clear()
        entries, self._entries = self._entries, []
        return entries

    def replace_source(self, source: SourceTopic, topic_id: str, first: int) -> None:
        """Restart an input on a new topic, from offset `first`.

        With `claw.steps` the payload of all open or unsent trajectories is gone: they close as
        lost.
        """
        if source == STEPS:
            why = "claw.steps was replaced by a new topic"
            now = self.state.time[STEPS]
            self._apply(
                [[ChangeKind.PAYLOAD_LOST, *key, why] for key in self.state.pending.closings]
            )
            self._apply(
                [[ChangeKind.CLOSED, *key, "lost", why, now] for key in list(self.state.opened)]
            )
        self._apply([[ChangeKind.SOURCE_REPLACED, source, topic_id, first - 1]])
        self._oldest_closed = None

    # -- time

    def _record_silence(self, timestamp: int) -> None:
        """Record a silence if the partition received no record for too long before `timestamp`."""
        before, limit = self.state.time[STEPS], self.limits.silent_after
        if limit is not None and before >= 0 and timestamp - before > limit:
            forget = self.state.silences.expired(before, self.limits.longest)
            self._apply([[ChangeKind.SILENCE_NOTED, before + limit, timestamp, forget]])

    def _expire(self) -> None:
        """Apply all time-outs of the `claw.steps` clock, before the record that advanced it is
        folded.
        """
        state, now, elapsed = self.state, self.state.time[STEPS], self.state.silences.elapsed
        for source in (STEPS, REWARDS):
            side = state.waiting[source]
            while (
                side
                and elapsed((waiting := next(iter(side.values()))).at, now)
                > self.limits.orphan_after
            ):
                self._apply(
                    self._handler.expire(source, waiting.offset, "its target did not come in time")
                )
        timeout = self.limits.trajectory_timeout
        self._close_inactive(
            state.anonymous_open,
            min(self.limits.anonymous_inactivity, timeout),
            "completed",
            "inactive",
        )
        self._close_inactive(
            state.agent_open, min(self.limits.agent_inactivity, timeout), "completed", "inactive"
        )
        self._close_inactive(state.opened, timeout, "timed_out", None)

    def _close_inactive(
        self, by_last: Mapping[RunTrajectory, Any], limit: int, outcome: Outcome, reason: str | None
    ) -> None:
        """Close trajectories whose last record is more than `limit` ms old. by_last: ordered by
        last record.
        """
        now, elapsed = self.state.time[STEPS], self.state.silences.elapsed
        while by_last and elapsed(self.state.opened[key := next(iter(by_last))].last, now) > limit:
            self._apply([[ChangeKind.CLOSED, *key, outcome, reason, now]])

    def _evict_closed(self) -> None:
        """Evict closed trajectories that are beyond the horizon or above the limit."""
        state = self.state
        while state.closed:
            key = next(iter(state.closed))
            if self._oldest_closed is None or self._oldest_closed[0] != key:
                self._oldest_closed = (key, state.closed[key].closed_at)
            expired = (
                state.silences.elapsed(self._oldest_closed[1], state.event_time)
                > self.limits.closed_horizon
            )
            if not expired and state.closed.counted <= self.limits.closed_max:
                return
            if (
                key in self._changed
                or key in state.pending.closings
                or key in state.pending.revised
            ):
                return
            self._apply([[ChangeKind.EVICTED, *key]])
            self._oldest_closed = None  # the same key may open and close once more

    def _resolve_waiting(self, entries: list[StateChange]) -> None:
        """Apply rewards and marks that waited for a new trajectory or step, in log order."""
        came = next(
            (
                e
                for e in entries
                if e[0] in (ChangeKind.OPENED, ChangeKind.ATTRIBUTED, ChangeKind.STEP_ADDED)
            ),
            None,
        )
        if came is None:
            return
        # A step that fills its trajectory closes it.
        named = next(
            (
                e
                for e in entries
                if e[0] in (ChangeKind.OPENED, ChangeKind.ATTRIBUTED, ChangeKind.CLOSED)
            ),
            None,
        )
        key: RunTrajectory = (
            (named[1], named[2]) if named is not None else self.state.by_open_seq[came[1]]
        )
        by_suffix = [None, *(e[2][2] for e in entries if e[0] == ChangeKind.STEP_ADDED)]
        names = dict.fromkeys((key, (key[0], key_of_trajectory(key[1]))))
        found = [
            self.state.waiting_for.get((REWARDS, name, step_suffix), ())
            for name in names
            for step_suffix in by_suffix
        ]
        for offset in sorted(offset for offsets in found for offset in offsets):
            waiting = self.state.waiting[REWARDS][offset]
            if self._handler.target(waiting.key, waiting.step_suffix) == key:
                self._resolve(REWARDS, offset)

    def _resolve(self, source: SourceTopic, offset: int) -> None:
        """Apply a waiting reward or mark, if its step has arrived too."""
        waiting = self.state.waiting[source][offset]
        if self._handler.appeared_at(waiting.key, waiting.step_suffix, waiting.at) is None:
            return
        self._apply([[ChangeKind.WAIT_ENDED, source, offset]])
        found = self._handler.target(waiting.key, waiting.step_suffix)
        entry = [waiting.entry[0], *(found or waiting.key), *waiting.entry[3:]]
        self._apply(self._handler.annotate(offset, entry))

    def _apply(self, entries: Iterable[StateChange]) -> None:
        for entry in entries:
            self.state.apply(entry)
            self._entries.append(entry)
            if entry[0] == ChangeKind.CLOSED or (
                entry[0] in (ChangeKind.REWARDED, ChangeKind.CURATED, ChangeKind.ASSESSED)
                and (entry[1], entry[2]) in self.state.closed
            ):
                self._changed[entry[1], entry[2]] = None
