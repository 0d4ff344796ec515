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
- A completion brings its own rewards, so the first candidate revision has them. The same reward on
  `claw.rewards` changes nothing; another record there counts as without the completion's.
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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clawstream.schemas.errors import InvalidId
from clawstream.schemas.ids import key_of_trajectory
from clawstream.schemas.records import FailedCall, Outcome, Tick
from clawstream.stream_jobs.assemble.handlers.records import handle
from clawstream.stream_jobs.assemble.handlers.rejected import RejectedRecord
from clawstream.stream_jobs.assemble.handlers.targets import (
    annotate,
    appeared_at,
    dead_letter,
    end_wait,
    target_of,
)
from clawstream.stream_jobs.assemble.limits import Limits
from clawstream.stream_jobs.assemble.payload.cache import CachedPayload
from clawstream.stream_jobs.assemble.state import changes
from clawstream.stream_jobs.assemble.state.changes import Change
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import (
    REWARDS,
    STEPS,
    Completion,
    PendingTarget,
    RunTrajectory,
    SourceTopic,
)

TRACE_CHARS = 4000


class AssemblyFold:
    """Folds records into a state and collects the changes. Call `record` for each record, then
    `finish_batch`.
    """

    def __init__(self, state: PartitionState, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self._changes: list[Change] = []
        self._revised: dict[RunTrajectory, None] = {}
        self._oldest_closed: tuple[RunTrajectory, int] | None = None

    def record(
        self, source: SourceTopic, offset: int, timestamp: int, key: bytes | None, event: Any
    ) -> CachedPayload | None:
        """Fold one record. A record at or below `applied` has no effect.

        Args:
            timestamp: Log timestamp, ms.
            event: A record of `clawstream.schemas.records`, or RejectedRecord.

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
        made: list[Change]
        payload: CachedPayload | None = None
        try:
            made, payload = handle(state, self.limits, source, offset, key, event)
        except (RejectedRecord, InvalidId, ValueError) as e:
            reason = e.reason if isinstance(e, RejectedRecord) else "invalid"
            made = [dead_letter(source, offset, reason, str(e)[:TRACE_CHARS])]
        except MemoryError:
            raise  # the machine's fault, not the record's: the next process may have more
        except Exception:  # noqa: BLE001 - a record must not stop its partition
            trace = traceback.format_exc()[-TRACE_CHARS:]
            made = [dead_letter(source, offset, "invalid", trace)]
        self._apply(made)
        if source == STEPS and state.waiting_for:
            self._resolve_waiting(made)
        return payload

    def tick(self, source: SourceTopic, timestamp: int) -> None:
        """Advance the clock of an input."""
        if source == STEPS:
            self._record_silence(timestamp)
        self.state.time[source] = max(self.state.time[source], timestamp)
        if source == STEPS:
            self._expire()
        self._evict_closed()

    def finish_batch(self) -> list[Change]:
        """Finish the batch: give each changed closed trajectory one new candidate revision. Returns
        all changes of the batch.
        """
        self._apply([changes.Revised(key) for key in self._revised])
        self._revised.clear()
        made, self._changes = self._changes, []
        return made

    def replace_source(self, source: SourceTopic, topic_id: str, first: int) -> None:
        """Restart an input on a new topic, from offset `first`.

        With `claw.steps` the payload of all open or unsent trajectories is gone: they close as
        lost.
        """
        state = self.state
        if source == STEPS:
            why = "claw.steps was replaced by a new topic"
            now = state.time[STEPS]
            self._apply([changes.PayloadLost(key, why) for key in state.pending.closings])
            self._apply([changes.Closed(key, "lost", why, now) for key in list(state.opened)])
        self._apply([changes.SourceReplaced(source, topic_id, first - 1)])
        self._oldest_closed = None

    # -- time

    def _record_silence(self, timestamp: int) -> None:
        """Record a silence if the partition received no record for too long before `timestamp`."""
        before, limit = self.state.time[STEPS], self.limits.silent_after
        if limit is not None and before >= 0 and timestamp - before > limit:
            forget = self.state.silences.expired(before, self.limits.longest)
            self._apply([changes.SilenceNoted(before + limit, timestamp, forget)])

    def _expire(self) -> None:
        """Apply all time-outs of the `claw.steps` clock, before the record that advanced it is
        folded.
        """
        state, limits = self.state, self.limits
        now, elapsed = state.time[STEPS], state.silences.elapsed
        for side in state.waiting:
            while side and elapsed((oldest := next(iter(side.values()))).at, now) > (
                limits.orphan_after
            ):
                self._apply(end_wait(state, oldest, "its target did not come in time"))
        timeout = limits.trajectory_timeout
        anonymous = min(limits.anonymous_inactivity, timeout)
        agent = min(limits.agent_inactivity, timeout)
        self._close_inactive(state.anonymous_open, anonymous, "completed", "inactive")
        self._close_inactive(state.agent_open, agent, "completed", "inactive")
        self._close_inactive(state.opened, timeout, "timed_out", None)

    def _close_inactive(
        self, by_last: Mapping[RunTrajectory, Any], limit: int, outcome: Outcome, reason: str | None
    ) -> None:
        """Close trajectories whose last record is more than `limit` ms old. by_last: ordered by
        last record.
        """
        now, elapsed = self.state.time[STEPS], self.state.silences.elapsed
        while by_last and elapsed(self.state.opened[key := next(iter(by_last))].last, now) > limit:
            self._apply([changes.Closed(key, outcome, reason, now)])

    def _evict_closed(self) -> None:
        """Evict closed trajectories that are beyond the horizon or above the limit."""
        state = self.state
        while state.closed:
            key = next(iter(state.closed))
            if self._oldest_closed is None or self._oldest_closed[0] != key:
                self._oldest_closed = (key, state.closed[key].closed_at)
            age = state.silences.elapsed(self._oldest_closed[1], state.event_time)
            if age <= self.limits.closed_horizon and state.closed.counted <= self.limits.closed_max:
                return
            if (
                key in self._revised
                or key in state.pending.closings
                or key in state.pending.revised
            ):
                return
            self._apply([changes.Evicted(key)])
            self._oldest_closed = None  # the same key may open and close once more

    # -- pending targets

    def _resolve_waiting(self, made: Sequence[Change]) -> None:
        """Apply annotations that waited for a new trajectory or step, in log order."""
        key: RunTrajectory | None = None
        by_suffix: list[str | None] = [None]
        for change in made:
            match change:
                case changes.Opened() | changes.Attributed():
                    key = change.key
                case changes.StepAdded():
                    by_suffix.append(change.step.step_suffix)
                    # A step that fills its trajectory closes it: a change after this one.
                    key = key or self.state.by_open_seq.get(change.open_seq)
                case changes.Closed() if len(by_suffix) > 1:
                    key = change.key
        if key is None:
            return
        waiting, waiting_for = self.state.waiting[REWARDS], self.state.waiting_for
        for offset in sorted(
            offset
            for name in dict.fromkeys((key, (key[0], key_of_trajectory(key[1]))))
            for step_suffix in by_suffix
            for offset in waiting_for.get((REWARDS, name, step_suffix), ())
        ):
            pending = waiting[offset]
            if target_of(self.state, pending.key, pending.step_suffix) == key:
                self._resolve(pending)

    def _resolve(self, pending: PendingTarget) -> None:
        """Apply a waiting annotation, if its step has arrived too."""
        state = self.state
        if appeared_at(state, self.limits, pending.key, pending.step_suffix, pending.at) is None:
            return
        self._apply([changes.WaitEnded(pending.source, pending.offset)])
        found = target_of(state, pending.key, pending.step_suffix) or pending.key
        assert not isinstance(pending.what, Completion)
        self._apply(annotate(state, pending.offset, found, pending.what))

    def _apply(self, made: Iterable[Change]) -> None:
        for change in made:
            if isinstance(change, changes.Closed) or (
                isinstance(change, changes.Annotated)
                and change.key in self.state.closed
                and not self.state.annotations(change.key).confirms(change.annotation)
            ):
                self._revised[change.key] = None
            change.apply(self.state)
            self._changes.append(change)
