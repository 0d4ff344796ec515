"""Event handlers: map one record of `claw.steps` or `claw.rewards` to state changes, or reject it.
Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from schemas.ids import (
    check_group_id,
    check_run_id,
    check_trajectory_key,
    is_anonymous_session,
    is_gateway_assigned,
    key_of_step,
    key_of_trajectory,
    session_trajectory_id,
)
from schemas.records import Assessment, Curation, Reward, SessionEvent, Step
from schemas.topics import MAX_MESSAGE_BYTES
from stream_jobs.assemble.matching.anonymous_sessions import (
    EXPLICIT,
    Placement,
    SessionIndex,
    place_in_agent_session,
    place_step,
)
from stream_jobs.assemble.matching.conversation import turn_hash, turns_of
from stream_jobs.assemble.matching.retries import (
    Retry,
    idempotency_hash,
    request_hash,
    retry_of,
    undo_retry,
)
from stream_jobs.assemble.matching.token_prefix import hash_of, match_prefix
from stream_jobs.assemble.model import (
    PAYLOAD_MAX,
    REWARDS,
    STEPS,
    STEPS_MAX,
    ChangeKind,
    CurrentReward,
    OpenStep,
    OpenSteps,
    RunTrajectory,
    SourceTopic,
    StateChange,
    call_suffix,
)
from stream_jobs.assemble.payload.cache import CachedPayload, metadata_of, payload_of
from stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES
from stream_jobs.assemble.payload.trainability import REASON_CHARS, trainability
from stream_jobs.assemble.state import PartitionState

NAME_CHARS = 200
TAGS_MAX = 50
PAYLOAD_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""Maximum size of a step's payload and of a trajectory's metadata: each must fit into an output
record.
"""
TOPIC_NAMES = ("claw.steps", "claw.rewards")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the fold. Times are ms of log time.

    Attributes:
        closed_max, waiting_max: Records per partition; bounds on memory. A long trajectory
            counts as several.
        silent_after: How much of an interval without records counts (`log_time`); None: all of
            it.
        steps_max, payload_max: Steps and payload bytes per trajectory. The step that reaches one
            closes the trajectory.
        train_truncated: See `jobs.train_truncated`.
    """

    trajectory_timeout: int
    closed_horizon: int
    orphan_after: int
    closed_max: int
    anonymous_inactivity: int = 300_000
    agent_inactivity: int = 1_800_000
    silent_after: int | None = None
    waiting_max: int = 100_000
    steps_max: int = STEPS_MAX
    payload_max: int = PAYLOAD_MAX
    train_truncated: bool = False

    @property
    def longest(self) -> int:
        """Return the longest time-out, ms."""
        return max(
            self.trajectory_timeout,
            self.closed_horizon,
            self.orphan_after,
            self.anonymous_inactivity,
            self.agent_inactivity,
        )


@dataclass(frozen=True, slots=True)
class UndecodableRecord:
    """A record that could not be decoded. reason, detail: as in a dead letter."""

    reason: str
    detail: str


class RejectedRecord(Exception):
    """The record cannot be folded and becomes a dead letter with this reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class EventHandler:
    """Maps records to state changes; reads the state and never modifies it."""

    def __init__(self, state: PartitionState, limits: Limits) -> None:
        self.state = state
        self.limits = limits

    def handle(
        self, source: SourceTopic, offset: int, key: bytes | None, event: Any
    ) -> tuple[list[StateChange], CachedPayload | None]:
        """Return the changes of a record, and the payload to cache.

        Raises:
            RejectedRecord, InvalidId, ValueError: The record cannot be folded.
        """
        if isinstance(event, UndecodableRecord):
            raise RejectedRecord(event.reason, event.detail)
        if not isinstance(
            event, Step | SessionEvent if source == STEPS else Reward | Curation | Assessment
        ):
            raise RejectedRecord(
                "invalid", f"a {type(event).__name__} does not belong on {TOPIC_NAMES[source]}"
            )
        run, name = check_run_id(event.run_id), check_trajectory_key(event.trajectory_key)
        if key != name.encode():
            raise RejectedRecord(
                "invalid", f"Kafka key {key!r:.250} is not the trajectory key {name!r}"
            )
        if isinstance(event, Assessment):
            return self._assessment(offset, (run, name), event), None
        if event.step_id is not None and key_of_step(event.step_id) != name:
            raise RejectedRecord(
                "invalid", f"step id {event.step_id!r:.250} is not of trajectory key {name!r}"
            )
        match event:
            case Step():
                return self._step(offset, (run, name), event)
            case SessionEvent():
                return self._session(offset, (run, name), event)
            case Reward():
                return self._reward(offset, (run, name), event), None
            case Curation():
                return self._curation(offset, (run, name), event), None
            case _:
                raise TypeError(type(event))

    # -- targets

    def target(self, key: RunTrajectory, step_suffix: str | None) -> RunTrajectory | None:
        """Return the trajectory of a key; None if unknown. For a gateway-assigned key,
        `step_suffix` selects the trajectory.
        """
        if not is_gateway_assigned(key[1]):
            return key if key in self.state.opened or key in self.state.closed else None
        index = self.state.session_indexes.get(key)
        trajectory = (
            index.calls.get(call_suffix(step_suffix))
            if index is not None and step_suffix is not None
            else None
        )
        return (key[0], trajectory) if trajectory is not None else None

    def appeared_at(self, key: RunTrajectory, step_suffix: str | None, at: int) -> int | None:
        """Return when the target appeared on `claw.steps`, ms; None if unknown at time `at` of
        `claw.rewards`.
        """
        found = self.target(key, step_suffix)
        if found is None:
            return None
        trajectory = self.state.opened.get(found)
        if trajectory is not None:
            if step_suffix is None:
                return trajectory.opened_at
            position = trajectory.steps.by_suffix.get(step_suffix)
            return trajectory.steps[position].at if position is not None else None
        closed = self.state.closed[found]
        if self.state.silences.elapsed(closed.closed_at, at) > self.limits.closed_horizon:
            return None
        return closed.opened_at if step_suffix is None else closed.step_time(step_suffix)

    def annotate(self, offset: int, entry: StateChange) -> list[StateChange]:
        """Return the changes of a reward, mark or assessment with a known target.

        Returns nothing if it changes nothing, and a dead letter if the trajectory has too many.
        offset: on `claw.rewards`.
        """
        key: RunTrajectory = (entry[1], entry[2])
        trajectory = self.state.opened.get(key)
        annotations = (trajectory if trajectory is not None else self.state.closed[key]).annotations
        if entry[0] == ChangeKind.ASSESSED:
            return [entry] if annotations.accepts_assessment(entry[3]) else []
        if not (
            annotations.accepts_reward(CurrentReward(*entry[3]))
            if entry[0] == ChangeKind.REWARDED
            else entry[3] not in annotations.seen
        ):
            return []
        if (full := annotations.limit_reached(entry)) is None:
            return [entry]
        detail = f"trajectory {_describe(key, None)} has {full} already, and keeps no more"
        return [[ChangeKind.DEAD_LETTERED, REWARDS, offset, "too_many_rewards", detail]]

    def expire(self, source: SourceTopic, offset: int, why: str) -> list[StateChange]:
        """End a wait: a completion closes the steps that have arrived; anything else becomes a dead
        letter.
        """
        waiting = self.state.waiting[source][offset]
        ends: StateChange = [ChangeKind.WAIT_ENDED, source, offset]
        found = self.target(waiting.key, waiting.step_suffix)
        if source == STEPS and found is not None:
            closes: StateChange = [
                ChangeKind.CLOSED,
                *found,
                *waiting.entry[:2],
                self.state.time[STEPS],
            ]
            return [ends, closes] if found in self.state.opened else [ends]
        detail = (
            f"no {'step' if waiting.step_suffix else 'trajectory'} "
            f"{_describe(waiting.key, waiting.step_suffix)}: {why}"
        )
        return [ends, [ChangeKind.DEAD_LETTERED, source, offset, "unknown_target", detail]]

    def _make_room(self, source: SourceTopic) -> list[StateChange]:
        """Expire the oldest pending target if there are too many."""
        side = self.state.waiting[source]
        if len(side) < self.limits.waiting_max:
            return []
        return self.expire(
            source, next(iter(side)), f"more than {self.limits.waiting_max} wait in this partition"
        )

    # -- steps and session events

    def _step(
        self, offset: int, name: RunTrajectory, step: Step
    ) -> tuple[list[StateChange], CachedPayload | None]:
        step_suffix = step.step_id[len(name[1]) + 1 :]
        _check_sizes(step, step_suffix)
        key, placement = self._resolve_trajectory(name, step_suffix, step)
        if key in self.state.closed:
            return self._late(offset, key, step, step_suffix), None
        trajectory = self.state.opened.get(key)
        steps = trajectory.steps if trajectory else OpenSteps()
        if step_suffix in steps.by_suffix:
            return [], None
        now = self.state.time[STEPS]
        trained = trainability(step, self.limits.train_truncated)
        measured = match_prefix(steps, step)
        entries: list[StateChange] = (
            [] if trajectory else [[ChangeKind.OPENED, *key, now, step.channel or "train", offset]]
        )
        if step.group_id is not None and (trajectory is None or trajectory.group_id is None):
            entries.append(
                [ChangeKind.ATTRIBUTED, *key, now, {"group_id": check_group_id(step.group_id)}]
            )
        entry = OpenStep(
            offset,
            now,
            step_suffix,
            len(step.prompt_token_ids or b"") // TOKEN_BYTES,
            len(step.response_token_ids or b"") // TOKEN_BYTES,
            measured.base,
            measured.end_hash,
            step.status,
            trained.reason,
            trained.oldest,
            trained.newest,
            reply=len(step.response_json) >> 10,
            prompt_hash=measured.prompt_hash
            if measured.prompt_hash is not None
            else request_hash(step),
            idempotency_hash=idempotency_hash(step),
            reply_hash=placement.reply_hash,
            after=placement.after if placement.after != measured.base else None,
            tags=[t.name for t in step.tags] or None,
            last_turn_hash=_last_turn_hash(step) if measured.diverges else None,
            messages_hash=placement.messages_hash,
            call_id_hash=placement.call_id_hash,
        )
        entries.append(
            [ChangeKind.STEP_ADDED, trajectory.open_seq if trajectory else offset, list(entry)]
        )
        entries += [[ChangeKind.RETRIED, *key, *retry] for retry in _retries(steps, entry, step)]
        if (full := self._full(steps, entry)) is not None:
            entries.append([ChangeKind.CLOSED, *key, "timed_out", full, now])
        return entries, payload_of(step, trained, steps.start_of(entry))

    def _full(self, steps: OpenSteps, entry: OpenStep) -> str | None:
        """Return why a trajectory closes with its next step; None if there is room for more."""
        if len(steps) + 1 >= self.limits.steps_max:
            return f"full: {len(steps) + 1} steps"
        size = steps.size + steps.size_of(entry)
        return f"full: {size} bytes of payload" if size >= self.limits.payload_max else None

    def _resolve_trajectory(
        self, name: RunTrajectory, step_suffix: str, step: Step
    ) -> tuple[RunTrajectory, Placement]:
        """Return the trajectory of a step, and how it was found."""
        if not is_gateway_assigned(name[1]):
            return name, EXPLICIT
        run = name[0]
        index = self.state.session_indexes.get(name) or SessionIndex()
        if is_anonymous_session(name[1]):
            placement = place_step(
                index, lambda t: self.state.opened[run, t].steps, step_suffix, step
            )
        else:
            placement = place_in_agent_session(index, step_suffix)
        trajectory = placement.trajectory or session_trajectory_id(
            name[1], call_suffix(step_suffix)
        )
        return (run, trajectory), placement

    def _late(
        self, offset: int, key: RunTrajectory, step: Step, step_suffix: str
    ) -> list[StateChange]:
        closed = self.state.closed[key]
        hashed = hash_of(step_suffix.encode())
        if hashed in closed.late or closed.step_time(step_suffix) is not None:
            return []
        evidence = f"closed as {closed.outcome} at {closed.closed_at}"
        return [[ChangeKind.STEP_MARKED, *key, step.step_id, "late", evidence, offset, hashed]]

    def _session(
        self, offset: int, name: RunTrajectory, event: SessionEvent
    ) -> tuple[list[StateChange], CachedPayload | None]:
        if len(event.metadata_json or b"") > PAYLOAD_BYTES:
            raise RejectedRecord("invalid", f"metadata has more than {PAYLOAD_BYTES} bytes")
        if is_gateway_assigned(name[1]) and (event.kind == "opened" or event.step_id is None):
            raise RejectedRecord(
                "invalid",
                f"{name[1]} was made by the gateway: "
                "only a completion that names a step has a target there",
            )
        if event.kind == "opened":
            return self._opened(offset, name, event)
        return self._ended(offset, name, event), None

    def _opened(
        self, offset: int, key: RunTrajectory, event: SessionEvent
    ) -> tuple[list[StateChange], CachedPayload | None]:
        if key in self.state.closed:
            return [], None
        now, trajectory = self.state.time[STEPS], self.state.opened.get(key)
        said = {
            "group_id": check_group_id(event.group_id) if event.group_id is not None else None,
            "group_size": event.group_size,
            "round": event.round,
            "meta": offset if event.metadata_json is not None else None,
        }
        new = {
            n: v for n, v in said.items() if v is not None and getattr(trajectory, n, None) is None
        }
        entries: list[StateChange] = (
            [] if trajectory else [[ChangeKind.OPENED, *key, now, event.channel or "train", offset]]
        )
        if new:
            entries.append([ChangeKind.ATTRIBUTED, *key, now, new])
        return entries, metadata_of(event) if "meta" in new else None

    def _ended(self, offset: int, name: RunTrajectory, event: SessionEvent) -> list[StateChange]:
        now, reason = self.state.time[STEPS], event.reason[:REASON_CHARS] if event.reason else None
        step_suffix = (
            event.step_id[len(name[1]) + 1 :]
            if event.step_id is not None and is_gateway_assigned(name[1])
            else None
        )
        found = self.target(name, step_suffix)
        if found in self.state.closed:
            return []
        event_hash = hash_of(event.event_id.encode())
        if (STEPS, name, event_hash) in self.state.waiting_for:
            return []
        if found is None:
            return [
                *self._make_room(STEPS),
                [
                    ChangeKind.TARGET_AWAITED,
                    STEPS,
                    offset,
                    now,
                    *name,
                    step_suffix,
                    [event.kind, reason, event_hash],
                ],
            ]
        return [[ChangeKind.CLOSED, *found, event.kind, reason, now]]

    # -- rewards, curation and assessments

    def _reward(self, offset: int, name: RunTrajectory, reward: Reward) -> list[StateChange]:
        if len(reward.name) > NAME_CHARS or len(reward.function_version) > NAME_CHARS:
            raise RejectedRecord(
                "invalid", f"name and function_version have at most {NAME_CHARS} characters"
            )
        if reward.value is not None and not math.isfinite(reward.value):
            raise RejectedRecord(
                "invalid", f"value {reward.value} is not finite; no reward is null, with a reason"
            )
        step_suffix = _target_step(name, reward)
        reason = reward.reason[:REASON_CHARS] if reward.reason else None
        entry = CurrentReward(
            reward.source,
            reward.name,
            reward.function_version,
            step_suffix,
            reward.value,
            reason,
            reward.reward_revision,
            offset,
        )
        return self._apply_or_defer(
            offset, *_target_trajectory(name, reward), ChangeKind.REWARDED, [list(entry)]
        )

    def _curation(self, offset: int, name: RunTrajectory, mark: Curation) -> list[StateChange]:
        if mark.quality is not None and not 0 <= mark.quality <= 1:
            raise RejectedRecord("invalid", f"quality {mark.quality} is not in [0, 1]")
        if len(mark.tags or ()) > TAGS_MAX or any(len(tag) > NAME_CHARS for tag in mark.tags or ()):
            raise RejectedRecord(
                "invalid", f"there are at most {TAGS_MAX} tags of at most {NAME_CHARS} characters"
            )
        said = {
            "quality": mark.quality,
            "trainable": mark.trainable,
            "tags": list(mark.tags) if mark.tags else mark.tags,
        }
        fields = {n: v for n, v in said.items() if v is not None}
        if not fields:
            return []
        what = [hash_of(mark.event_id.encode()), _target_step(name, mark) or "", fields, offset]
        return self._apply_or_defer(
            offset, *_target_trajectory(name, mark), ChangeKind.CURATED, what
        )

    def _assessment(self, offset: int, name: RunTrajectory, said: Assessment) -> list[StateChange]:
        scores = [*said.step_quality, *([said.quality] if said.quality is not None else [])]
        if not all(0 <= score <= 1 for score in scores):
            raise RejectedRecord("invalid", "a quality is not in [0, 1]")
        if key_of_trajectory(said.trajectory_id) != name[1] or is_gateway_assigned(
            said.trajectory_id
        ):
            raise RejectedRecord(
                "invalid",
                f"{said.trajectory_id!r:.250} is not the id of a trajectory "
                f"of trajectory key {name[1]!r}",
            )
        what = [said.assessment_revision, said.quality, list(said.step_quality)]
        return self._apply_or_defer(
            offset, (name[0], said.trajectory_id), None, ChangeKind.ASSESSED, [what]
        )

    def _apply_or_defer(
        self, offset: int, key: RunTrajectory, step_suffix: str | None, kind: str, what: list[Any]
    ) -> list[StateChange]:
        """Apply to a known target, defer to a target that may still arrive, or dead-letter. key,
        step_suffix: as in `target`.
        """
        at = self.state.time[REWARDS]
        since = self.appeared_at(key, step_suffix, at)
        elapsed, patience = self.state.silences.elapsed, self.limits.orphan_after
        if since is not None and elapsed(at, since) <= patience:
            entry: StateChange = [kind, *(self.target(key, step_suffix) or key), *what]
            return self.annotate(offset, entry)
        if since is None and elapsed(at, self.state.time[STEPS]) <= patience:
            return [
                *self._make_room(REWARDS),
                [
                    ChangeKind.TARGET_AWAITED,
                    REWARDS,
                    offset,
                    at,
                    *key,
                    step_suffix,
                    [kind, *key, *what],
                ],
            ]
        detail = (
            f"no {'step' if step_suffix else 'trajectory'} {_describe(key, step_suffix)} in time"
        )
        return [[ChangeKind.DEAD_LETTERED, REWARDS, offset, "unknown_target", detail]]


def _retries(steps: OpenSteps, entry: OpenStep, step: Step) -> list[Retry]:
    """Return the retry that the next step causes: its own, or one that it undoes."""
    found = [retry_of(steps, entry, step)]
    found += [undo_retry(steps, at) for at in (entry.base, entry.after) if at is not None]
    return [retry for retry in found if retry is not None][:1]


def _last_turn_hash(step: Step) -> int | None:
    """See `OpenStep`. The request is parsed only when the prompt diverges."""
    turns = turns_of(step.request_json)
    return turn_hash(turns[-1]) if turns else None


def _target_step(name: RunTrajectory, event: Reward | Curation) -> str | None:
    """Return the step suffix of a reward's or mark's target; None if the step only selects the
    trajectory.
    """
    if event.step_id is None or (is_gateway_assigned(name[1]) and event.trajectory_id == name[1]):
        return None
    return event.step_id[len(name[1]) + 1 :]


def _target_trajectory(
    name: RunTrajectory, event: Reward | Curation
) -> tuple[RunTrajectory, str | None]:
    """Return the trajectory that a record names, and its step suffix. Raises RejectedRecord.

    In a gateway-assigned session the trajectory is identified by its id, or by the key and a
    step.
    """
    given, step_suffix = (
        event.trajectory_id,
        event.step_id[len(name[1]) + 1 :] if event.step_id is not None else None,
    )
    if given is None or given == name[1]:
        if is_gateway_assigned(name[1]) and event.step_id is None:
            raise RejectedRecord(
                "invalid",
                f"{name[1]} was made by the gateway: the trajectory must be named, or a step of it",
            )
        return name, step_suffix
    if not (is_gateway_assigned(name[1]) and given.startswith(f"{name[1]}~")):
        raise RejectedRecord(
            "invalid", f"trajectory id {given!r:.250} is not of trajectory key {name[1]!r}"
        )
    return (name[0], given), step_suffix


def _check_sizes(step: Step, step_suffix: str) -> None:
    """Reject a step that would make an output record too large. Raises RejectedRecord."""
    names = [step_suffix, step.finish_reason, step.version_first, step.version_last]
    names += [s.version for s in step.versions] + [t.name for t in step.tags]
    if max([len(name) for name in names if name is not None]) > NAME_CHARS:
        raise RejectedRecord(
            "invalid",
            f"step id, finish reason, versions and tags have at most {NAME_CHARS} characters",
        )
    if len(step.tags) > TAGS_MAX:
        raise RejectedRecord("invalid", f"a step has at most {TAGS_MAX} tags")
    packed = (
        step.prompt_token_ids,
        step.response_token_ids,
        step.response_logprobs,
        step.response_json,
    )
    tags = sum([len(t.evidence) for t in step.tags])
    if sum([len(part) for part in packed if part is not None]) + 4 * tags > PAYLOAD_BYTES:
        raise RejectedRecord(
            "invalid", f"tokens, reply and tags have more than {PAYLOAD_BYTES} bytes"
        )


def _describe(key: RunTrajectory, step_suffix: str | None) -> str:
    return f"{key[1]}~{step_suffix} of run {key[0]}" if step_suffix else f"{key[1]} of run {key[0]}"
