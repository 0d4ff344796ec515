"""What one record of `claw.steps` or `claw.rewards` changes: entries of the state log, or a refusal. Pure; nothing is changed here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from schemas.ids import (
    check_group_id,
    check_run_id,
    check_trajectory_key,
    is_bucket,
    is_unnamed,
    key_of_step,
    key_of_trajectory,
    unnamed_trajectory_id,
)
from schemas.records import Assessment, Curation, Reward, SessionEvent, Step
from schemas.topics import MAX_MESSAGE_BYTES
from stream_jobs.assemble import state as op
from stream_jobs.assemble.matching.anonymous_sessions import (
    NAMED,
    Bucket,
    Choice,
    choose,
    in_session,
)
from stream_jobs.assemble.matching.conversation import said_in, turns_of
from stream_jobs.assemble.matching.retries import (
    Retry,
    idempotency_hash,
    mended,
    request_hash,
    retry_of,
)
from stream_jobs.assemble.matching.token_prefix import hash_of, measure
from stream_jobs.assemble.model import (
    PAYLOAD_MAX,
    REWARDS,
    STEPS,
    STEPS_MAX,
    Entry,
    Key,
    RewardEntry,
    Source,
    StepEntry,
    Steps,
    call_of,
)
from stream_jobs.assemble.payload.cache import Kept, metadata_of, payload_of
from stream_jobs.assemble.payload.segment_tree import WIDTH
from stream_jobs.assemble.payload.trainability import REASON_CHARS, provenance
from stream_jobs.assemble.state import Assembly

NAME_CHARS = 200
TAGS_MAX = 50
PAYLOAD_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A step's payload and a trajectory's metadata go into records of their own, which must fit into Kafka as well."""
TOPIC_WORD = ("claw.steps", "claw.rewards")


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in ms of log time. closed_max, waiting_max: bounds on memory, records a partition (a long trajectory counts as several).
    silent_after: how much of a time in which a partition takes no record counts (`log_time`); None: all of it. steps_max, payload_max: steps and bytes a trajectory; the step that reaches one closes it. train_truncated: as `jobs.train_truncated`.
    """

    trajectory_timeout: int
    closed_horizon: int
    orphan_after: int
    closed_max: int
    bucket_inactivity: int = 300_000
    agent_inactivity: int = 1_800_000
    silent_after: int | None = None
    waiting_max: int = 100_000
    steps_max: int = STEPS_MAX
    payload_max: int = PAYLOAD_MAX
    train_truncated: bool = False

    @property
    def longest(self) -> int:
        """Time after which nothing waits any more."""
        return max(
            self.trajectory_timeout,
            self.closed_horizon,
            self.orphan_after,
            self.bucket_inactivity,
            self.agent_inactivity,
        )


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that could not be decoded. reason, detail: as in a dead letter."""

    reason: str
    detail: str


class Refusal(Exception):
    """The record can't be folded: it becomes a dead letter with this reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Judge:
    """Looks at records, one after the other, against a state that others change."""

    def __init__(self, state: Assembly, limits: Limits) -> None:
        self.state = state
        self.limits = limits

    def changes(
        self, source: Source, offset: int, key: bytes | None, event: Any
    ) -> tuple[list[Entry], Kept | None]:
        """What a record changes, and the payload to keep. Raises Refusal, InvalidId or ValueError when it can't be folded."""
        if isinstance(event, Bad):
            raise Refusal(event.reason, event.detail)
        if not isinstance(
            event, Step | SessionEvent if source == STEPS else Reward | Curation | Assessment
        ):
            raise Refusal(
                "invalid", f"a {type(event).__name__} does not belong on {TOPIC_WORD[source]}"
            )
        run, name = check_run_id(event.run_id), check_trajectory_key(event.trajectory_key)
        if key != name.encode():
            raise Refusal("invalid", f"Kafka key {key!r:.250} is not the trajectory key {name!r}")
        if isinstance(event, Assessment):
            return self._assessment(offset, (run, name), event), None
        if event.step_id is not None and key_of_step(event.step_id) != name:
            raise Refusal(
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

    def target(self, key: Key, tail: str | None) -> Key | None:
        """The trajectory that is meant, None when it is not known. key: its own, or one that the gateway made; then `tail`
        is of a step of it.
        """
        if not is_unnamed(key[1]):
            return key if key in self.state.opened or key in self.state.closed else None
        bucket = self.state.buckets.get(key)
        trajectory = (
            bucket.calls.get(call_of(tail)) if bucket is not None and tail is not None else None
        )
        return (key[0], trajectory) if trajectory is not None else None

    def appeared(self, key: Key, tail: str | None, at: int) -> int | None:
        """When the target came, on the clock of `claw.steps`; None: not known at time `at` of `claw.rewards`."""
        found = self.target(key, tail)
        if found is None:
            return None
        trajectory = self.state.opened.get(found)
        if trajectory is not None:
            if tail is None:
                return trajectory.opened_at
            position = trajectory.steps.tails.get(tail)
            return trajectory.steps[position].at if position is not None else None
        closed = self.state.closed[found]
        if self.state.silences.elapsed(closed.closed_at, at) > self.limits.closed_horizon:
            return None
        return closed.opened_at if tail is None else closed.came(tail)

    def applied(self, offset: int, entry: Entry) -> list[Entry]:
        """What becomes of a reward, mark or assessment whose target is there. offset: on `claw.rewards`. Nothing, if it changes nothing;
        it is buried where its trajectory has too many.
        """
        key: Key = (entry[1], entry[2])
        trajectory = self.state.opened.get(key)
        folded = (trajectory if trajectory is not None else self.state.closed[key]).folded
        if entry[0] == op.ASSESSED:
            return [entry] if folded.supersedes(entry[3]) else []
        if not (
            folded.beats(RewardEntry(*entry[3]))
            if entry[0] == op.REWARD
            else entry[3] not in folded.seen
        ):
            return []
        if (full := folded.full(entry)) is None:
            return [entry]
        detail = f"trajectory {_name(key, None)} has {full} already, and keeps no more"
        return [[op.BURIED, REWARDS, offset, "too_many_rewards", detail]]

    def give_up(self, source: Source, offset: int, why: str) -> list[Entry]:
        """End a wait: a completion closes what is there by now; anything else is buried."""
        waiting = self.state.waiting[source][offset]
        ends: Entry = [op.WAITS_NO_MORE, source, offset]
        found = self.target(waiting.key, waiting.tail)
        if source == STEPS and found is not None:
            closes: Entry = [op.CLOSED, *found, *waiting.entry[:2], self.state.time[STEPS]]
            return [ends, closes] if found in self.state.opened else [ends]
        detail = f"no {'step' if waiting.tail else 'trajectory'} {_name(waiting.key, waiting.tail)}: {why}"
        return [ends, [op.BURIED, source, offset, "unknown_target", detail]]

    def _make_room(self, source: Source) -> list[Entry]:
        """Before one more waits: the oldest gives up when there are too many."""
        side = self.state.waiting[source]
        if len(side) < self.limits.waiting_max:
            return []
        return self.give_up(
            source, next(iter(side)), f"more than {self.limits.waiting_max} wait in this partition"
        )

    # -- steps and session events

    def _step(self, offset: int, name: Key, step: Step) -> tuple[list[Entry], Kept | None]:
        tail = step.step_id[len(name[1]) + 1 :]
        _check_sizes(step, tail)
        key, choice = self._place(name, tail, step)
        if key in self.state.closed:
            return self._late(offset, key, step, tail), None
        trajectory = self.state.opened.get(key)
        steps = trajectory.steps if trajectory else Steps()
        if tail in steps.tails:
            return [], None
        now = self.state.time[STEPS]
        origin = provenance(step, self.limits.train_truncated)
        measured = measure(steps, step)
        entries: list[Entry] = (
            [] if trajectory else [[op.OPENED, *key, now, step.channel or "train", offset]]
        )
        if step.group_id is not None and (trajectory is None or trajectory.group_id is None):
            entries.append([op.ATTRIBUTES, *key, now, {"group_id": check_group_id(step.group_id)}])
        entry = StepEntry(
            offset, now, tail, len(step.prompt_token_ids or b"") // WIDTH, len(step.response_token_ids or b"") // WIDTH,
            measured.base, measured.end_hash, step.status, origin.reason, origin.oldest, origin.newest,
            reply=len(step.response_json) >> 10,
            asked=measured.asked if measured.asked is not None else request_hash(step),
            idem=idempotency_hash(step),
            leads=choice.leads,
            after=choice.after if choice.after != measured.base else None,
            tags=[t.name for t in step.tags] or None,
            repeats=_repeats(step) if measured.leaves else None,
            messages=choice.messages,
            call_id=choice.call_id,
        )  # fmt: skip
        entries.append([op.STEP, trajectory.number if trajectory else offset, list(entry)])
        entries += [[op.RETRIED, *key, *retry] for retry in _retries(steps, entry, step)]
        if (full := self._full(steps, entry)) is not None:
            entries.append([op.CLOSED, *key, "timed_out", full, now])
        return entries, payload_of(step, origin, steps.start_of(entry))

    def _full(self, steps: Steps, entry: StepEntry) -> str | None:
        """Why a trajectory closes with its next step; None: there is room for more."""
        if len(steps) + 1 >= self.limits.steps_max:
            return f"full: {len(steps) + 1} steps"
        size = steps.size + steps.size_of(entry)
        return f"full: {size} bytes of payload" if size >= self.limits.payload_max else None

    def _place(self, name: Key, tail: str, step: Step) -> tuple[Key, Choice]:
        """The trajectory that a step belongs to, and how that was found."""
        if not is_unnamed(name[1]):
            return name, NAMED
        run = name[0]
        bucket = self.state.buckets.get(name) or Bucket()
        if is_bucket(name[1]):
            choice = choose(bucket, lambda t: self.state.opened[run, t].steps, tail, step)
        else:
            choice = in_session(bucket, tail)
        trajectory = choice.trajectory or unnamed_trajectory_id(name[1], call_of(tail))
        return (run, trajectory), choice

    def _late(self, offset: int, key: Key, step: Step, tail: str) -> list[Entry]:
        closed = self.state.closed[key]
        hashed = hash_of(tail.encode())
        if hashed in closed.late or closed.came(tail) is not None:
            return []
        evidence = f"closed as {closed.outcome} at {closed.closed_at}"
        return [[op.MARKED, *key, step.step_id, "late", evidence, offset, hashed]]

    def _session(
        self, offset: int, name: Key, event: SessionEvent
    ) -> tuple[list[Entry], Kept | None]:
        if len(event.metadata_json or b"") > PAYLOAD_BYTES:
            raise Refusal("invalid", f"metadata has more than {PAYLOAD_BYTES} bytes")
        if is_unnamed(name[1]) and (event.kind == "opened" or event.step_id is None):
            raise Refusal(
                "invalid",
                f"{name[1]} was made by the gateway: only a completion that names a step has a target there",
            )
        if event.kind == "opened":
            return self._opened(offset, name, event)
        return self._ended(offset, name, event), None

    def _opened(
        self, offset: int, key: Key, event: SessionEvent
    ) -> tuple[list[Entry], Kept | None]:
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
        entries: list[Entry] = (
            [] if trajectory else [[op.OPENED, *key, now, event.channel or "train", offset]]
        )
        if new:
            entries.append([op.ATTRIBUTES, *key, now, new])
        return entries, metadata_of(event) if "meta" in new else None

    def _ended(self, offset: int, name: Key, event: SessionEvent) -> list[Entry]:
        now, reason = self.state.time[STEPS], event.reason[:REASON_CHARS] if event.reason else None
        tail = (
            event.step_id[len(name[1]) + 1 :]
            if event.step_id is not None and is_unnamed(name[1])
            else None
        )
        found = self.target(name, tail)
        if found in self.state.closed:
            return []
        event_hash = hash_of(event.event_id.encode())
        if (STEPS, name, event_hash) in self.state.waiting_for:
            return []
        if found is None:
            return [
                *self._make_room(STEPS),
                [op.WAITS, STEPS, offset, now, *name, tail, [event.kind, reason, event_hash]],
            ]
        return [[op.CLOSED, *found, event.kind, reason, now]]

    # -- rewards, curation and assessments

    def _reward(self, offset: int, name: Key, reward: Reward) -> list[Entry]:
        if len(reward.name) > NAME_CHARS or len(reward.function_version) > NAME_CHARS:
            raise Refusal(
                "invalid", f"name and function_version have at most {NAME_CHARS} characters"
            )
        if reward.value is not None and not math.isfinite(reward.value):
            raise Refusal(
                "invalid", f"value {reward.value} is not finite; no reward is null, with a reason"
            )
        tail = _step_meant(name, reward)
        reason = reward.reason[:REASON_CHARS] if reward.reason else None
        entry = RewardEntry(
            reward.source,
            reward.name,
            reward.function_version,
            tail,
            reward.value,
            reason,
            reward.reward_revision,
            offset,
        )
        return self._aim(offset, *_target_of(name, reward), op.REWARD, [list(entry)])

    def _curation(self, offset: int, name: Key, mark: Curation) -> list[Entry]:
        if mark.quality is not None and not 0 <= mark.quality <= 1:
            raise Refusal("invalid", f"quality {mark.quality} is not in [0, 1]")
        if len(mark.tags or ()) > TAGS_MAX or any(len(tag) > NAME_CHARS for tag in mark.tags or ()):
            raise Refusal(
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
        what = [hash_of(mark.event_id.encode()), _step_meant(name, mark) or "", fields, offset]
        return self._aim(offset, *_target_of(name, mark), op.CURATED, what)

    def _assessment(self, offset: int, name: Key, said: Assessment) -> list[Entry]:
        scores = [*said.step_quality, *([said.quality] if said.quality is not None else [])]
        if not all(0 <= score <= 1 for score in scores):
            raise Refusal("invalid", "a quality is not in [0, 1]")
        if key_of_trajectory(said.trajectory_id) != name[1] or is_unnamed(said.trajectory_id):
            raise Refusal(
                "invalid",
                f"{said.trajectory_id!r:.250} is not the id of a trajectory of trajectory key {name[1]!r}",
            )
        what = [said.assessment_revision, said.quality, list(said.step_quality)]
        return self._aim(offset, (name[0], said.trajectory_id), None, op.ASSESSED, [what])

    def _aim(
        self, offset: int, key: Key, tail: str | None, kind: str, what: list[Any]
    ) -> list[Entry]:
        """Apply to a known target, wait for one that may come, or bury. key, tail: as in `target`."""
        at = self.state.time[REWARDS]
        since = self.appeared(key, tail, at)
        elapsed, patience = self.state.silences.elapsed, self.limits.orphan_after
        if since is not None and elapsed(at, since) <= patience:
            entry: Entry = [kind, *(self.target(key, tail) or key), *what]
            return self.applied(offset, entry)
        if since is None and elapsed(at, self.state.time[STEPS]) <= patience:
            return [
                *self._make_room(REWARDS),
                [op.WAITS, REWARDS, offset, at, *key, tail, [kind, *key, *what]],
            ]
        detail = f"no {'step' if tail else 'trajectory'} {_name(key, tail)} in time"
        return [[op.BURIED, REWARDS, offset, "unknown_target", detail]]


def _retries(steps: Steps, entry: StepEntry, step: Step) -> list[Retry]:
    """What the next step says of retries: it is one itself, or it goes on from one that was taken for one."""
    found = [retry_of(steps, entry, step)]
    found += [mended(steps, at) for at in (entry.base, entry.after) if at is not None]
    return [retry for retry in found if retry is not None][:1]


def _repeats(step: Step) -> int | None:
    """As in `StepEntry`. The request is read only where the prompt has drifted."""
    turns = turns_of(step.request_json)
    return said_in(turns[-1]) if turns else None


def _step_meant(name: Key, event: Reward | Curation) -> str | None:
    """Tail of the step that a reward or mark is about. With a key of the gateway as its trajectory the step only says which."""
    if event.step_id is None or (is_unnamed(name[1]) and event.trajectory_id == name[1]):
        return None
    return event.step_id[len(name[1]) + 1 :]


def _target_of(name: Key, event: Reward | Curation) -> tuple[Key, str | None]:
    """The trajectory as far as the record says it, and the tail of the step that it names.

    Where the gateway made the key a trajectory is known by its id; else by the key, and the step says which. Raises Refusal.
    """
    given, tail = (
        event.trajectory_id,
        event.step_id[len(name[1]) + 1 :] if event.step_id is not None else None,
    )
    if given is None or given == name[1]:
        if is_unnamed(name[1]) and event.step_id is None:
            raise Refusal(
                "invalid",
                f"{name[1]} was made by the gateway: the trajectory must be named, or a step of it",
            )
        return name, tail
    if not (is_unnamed(name[1]) and given.startswith(f"{name[1]}~")):
        raise Refusal(
            "invalid", f"trajectory id {given!r:.250} is not of trajectory key {name[1]!r}"
        )
    return (name[0], given), tail


def _check_sizes(step: Step, tail: str) -> None:
    """What would make a record of ours too large, now or together with others. Raises Refusal."""
    names = [tail, step.finish_reason, step.version_first, step.version_last]
    names += [s.version for s in step.versions] + [t.name for t in step.tags]
    if max([len(name) for name in names if name is not None]) > NAME_CHARS:
        raise Refusal(
            "invalid",
            f"step id, finish reason, versions and tags have at most {NAME_CHARS} characters",
        )
    if len(step.tags) > TAGS_MAX:
        raise Refusal("invalid", f"a step has at most {TAGS_MAX} tags")
    packed = (
        step.prompt_token_ids,
        step.response_token_ids,
        step.response_logprobs,
        step.response_json,
    )
    tags = sum([len(t.evidence) for t in step.tags])
    if sum([len(part) for part in packed if part is not None]) + 4 * tags > PAYLOAD_BYTES:
        raise Refusal("invalid", f"tokens, reply and tags have more than {PAYLOAD_BYTES} bytes")


def _name(key: Key, tail: str | None) -> str:
    return f"{key[1]}~{tail} of run {key[0]}" if tail else f"{key[1]} of run {key[0]}"
