"""The fold of assemble: records of one partition of `claw.steps` and `claw.rewards` in, entries of the state log out. Pure.

Rules (design sections 1, 2 and 3.13):

- A trajectory is the steps of one (run, trajectory key) from its first record to its closing. It closes when it is completed, failed or
  abandoned, or when a record of `claw.steps`, tick included, has a timestamp (running maximum) past its time-out; that record is folded
  after the closing. Only `claw.steps` decides what is in a trajectory, so its steps do not depend on how the inputs interleave.
- Rewards and curation fold into open and closed trajectories alike. A target counts as known when it appeared at most `orphan_after`
  after the reward, by log timestamps on both sides: whichever was read first.
- What has no target yet waits `orphan_after` on the clock of `claw.steps`, then is buried as `unknown_target`. A completion of an
  unknown trajectory waits as well: steps from a gateway's spool may still come. When the time is over it closes the trajectory, if by
  then there is one.
- A step id that the trajectory has already changes nothing. A step after the closing is marked late.
- A record that cannot be folded is buried, with the reason, and has no other effect.

Later: anonymous buckets choose a trajectory in `_step` by longest prefix, and retries are marked there.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from schemas.errors import InvalidId
from schemas.events import Curation, Reward, SessionEvent, Step, Tick
from schemas.ids import check_group_id, check_run_id, check_trajectory_key, key_of_step
from schemas.topics import MAX_MESSAGE_BYTES
from stream_jobs import assembly as op
from stream_jobs.assembly import Assembly
from stream_jobs.index import REWARDS, STEPS, Closed, Entry, Folded, Key, Open, RewardEntry, Source, StepEntry
from stream_jobs.payload import Kept, metadata_of, payload_of
from stream_jobs.provenance import REASON_CHARS, provenance
from stream_jobs.tree import WIDTH

NAME_CHARS = 200
TAGS_MAX = 50
PAYLOAD_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A step's payload and a trajectory's metadata go into records of their own, which must fit into Kafka as well."""
TRACE_CHARS = 4000
TOPIC_WORD = ("claw.steps", "claw.rewards")


@dataclass(frozen=True, slots=True)
class Limits:
    """Times in ms of log time. closed_max, waiting_max: bounds on memory, records a partition."""

    trajectory_timeout: int
    closed_horizon: int
    orphan_after: int
    closed_max: int
    waiting_max: int = 100_000


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


class Fold:
    """Folds records into a state, and collects the entries that say how. `record` for each, then `seal` for the batch."""

    def __init__(self, state: Assembly, limits: Limits) -> None:
        self.state = state
        self.limits = limits
        self._entries: list[Entry] = []
        self._changed: dict[Key, None] = {}
        self._oldest_closed: tuple[Key, int] | None = None

    def record(self, source: Source, offset: int, timestamp: int, key: bytes | None, event: Any) -> Kept | None:
        """Fold one record. event: a record of `schemas.events`, or Bad. Returns the payload to keep for its trajectory.

        Offsets at or below what was applied fold to nothing.
        """
        state = self.state
        if offset <= state.applied[source]:
            return None
        state.applied[source] = offset
        state.time[source] = max(state.time[source], timestamp)
        if source == STEPS:
            self._pass_time()
        self._forget()
        if isinstance(event, Tick):
            return None
        try:
            entries, kept = self._judge(source, offset, key, event)
        except (Refusal, InvalidId, ValueError) as e:
            reason = e.reason if isinstance(e, Refusal) else "invalid"
            entries, kept = [[op.BURIED, source, offset, reason, str(e)[:TRACE_CHARS]]], None
        except Exception:  # noqa: BLE001 - a record must not stop its partition: it becomes a dead letter with the traceback
            entries, kept = [[op.BURIED, source, offset, "invalid", traceback.format_exc()[-TRACE_CHARS:]]], None
        self._do(entries)
        if source == STEPS and entries:
            self._meet(entries[-1])
        return kept

    def seal(self) -> list[Entry]:
        """End the batch: each changed closed trajectory gets one new candidate revision. Returns the entries since the last seal."""
        self._do([[op.REVISED, *key] for key in self._changed])
        self._changed.clear()
        entries, self._entries = self._entries, []
        return [[op.TIMES, *self.state.time], *entries] if entries else []

    def replaced(self, source: Source, topic_id: str, first: int) -> None:
        """The input is another topic now, or known for the first time: read it from offset `first` on.

        With `claw.steps` the payload of everything that was open or not yet out is gone: it closes as lost.
        """
        if source == STEPS:
            why = "claw.steps was replaced by a new topic"
            now = self.state.time[STEPS]
            self._do([[op.LOST, *key, why] for key in self.state.pending.closings])
            self._do([[op.CLOSED, *key, "lost", why, now] for key in list(self.state.opened)])
        self._do([[op.NEW, source, topic_id, first - 1]])

    # -- time

    def _pass_time(self) -> None:
        """What is due on the clock of `claw.steps`, before the record that brought the time is folded."""
        state, now = self.state, self.state.time[STEPS]
        for source in (STEPS, REWARDS):
            side = state.waiting[source]
            while side and now > (waiting := next(iter(side.values()))).at + self.limits.orphan_after:
                self._do(self._give_up(source, waiting.offset, "its target did not come in time"))
        while state.opened:
            key, trajectory = next(iter(state.opened.items()))
            if now <= trajectory.last + self.limits.trajectory_timeout:
                break
            self._do([[op.CLOSED, *key, "timed_out", None, now]])

    def _give_up(self, source: Source, offset: int, why: str) -> list[Entry]:
        """End a wait: a completion closes what is there by now; anything else is buried."""
        waiting = self.state.waiting[source][offset]
        ends: Entry = [op.WAITS_NO_MORE, source, offset]
        if source == STEPS and waiting.key in self.state.opened:
            return [ends, [op.CLOSED, *waiting.key, *waiting.entry[:2], self.state.time[STEPS]]]
        if source == STEPS and waiting.key in self.state.closed:
            return [ends]
        detail = f"no {'step' if waiting.tail else 'trajectory'} {_name(waiting.key, waiting.tail)}: {why}"
        return [ends, [op.BURIED, source, offset, "unknown_target", detail]]

    def _waiting_for(self, key: Key) -> Sequence[tuple[Source, int]]:
        return self.state.waiting_for.get(key, ())

    def _make_room(self, source: Source) -> list[Entry]:
        """Before one more waits: the oldest gives up when there are too many."""
        side = self.state.waiting[source]
        if len(side) < self.limits.waiting_max:
            return []
        return self._give_up(source, next(iter(side)), f"more than {self.limits.waiting_max} wait in this partition")

    def _forget(self) -> None:
        """Closed trajectories past the horizon, or too many of them."""
        state = self.state
        while state.closed:
            key = next(iter(state.closed))
            if self._oldest_closed is None or self._oldest_closed[0] != key:
                self._oldest_closed = (key, Closed.load(state.closed[key]).closed_at)
            expired = state.event_time > self._oldest_closed[1] + self.limits.closed_horizon
            if not expired and len(state.closed) <= self.limits.closed_max:
                return
            if key in self._changed or key in state.pending.closings or key in state.pending.revised:
                return
            self._do([[op.FORGOTTEN, *key]])

    # -- records

    def _judge(self, source: Source, offset: int, key: bytes | None, event: Any) -> tuple[list[Entry], Kept | None]:
        """What a record changes: nothing is changed here. Raises Refusal, InvalidId or ValueError when it can't be folded."""
        if isinstance(event, Bad):
            raise Refusal(event.reason, event.detail)
        belongs = isinstance(event, Step | SessionEvent) if source == STEPS else isinstance(event, Reward | Curation)
        if not belongs:
            raise Refusal("invalid", f"a {type(event).__name__} does not belong on {TOPIC_WORD[source]}")
        run, name = check_run_id(event.run_id), check_trajectory_key(event.trajectory_key)
        if key != name.encode():
            raise Refusal("invalid", f"Kafka key {key!r:.250} is not the trajectory key {name!r}")
        if event.step_id is not None and key_of_step(event.step_id) != name:
            raise Refusal("invalid", f"step id {event.step_id!r:.250} is not of trajectory key {name!r}")
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

    def _step(self, offset: int, key: Key, step: Step) -> tuple[list[Entry], Kept | None]:
        tail = step.step_id[len(key[1]) + 1 :]
        _check_sizes(step, tail)
        if key in self.state.closed:
            return self._late(offset, key, step, tail), None
        trajectory = self.state.opened.get(key)
        if trajectory is not None and any(s.tail == tail for s in trajectory.steps):
            return [], None
        now = self.state.time[STEPS]
        origin = provenance(step)
        steps = trajectory.steps if trajectory else []
        base, end_hash = _longest_known_prefix(steps, step)
        entries: list[Entry] = [] if trajectory else [[op.OPENED, *key, now, step.channel or "train"]]
        if step.group_id is not None and (trajectory is None or trajectory.group_id is None):
            entries.append([op.ATTRIBUTES, *key, now, {"group_id": check_group_id(step.group_id)}])
        entry = StepEntry(
            offset, now, tail, len(step.prompt_token_ids or b"") // WIDTH, len(step.response_token_ids or b"") // WIDTH,
            base, end_hash, step.status, origin.reason, origin.oldest, origin.newest,
        )  # fmt: skip
        entries.append([op.STEP, *key, list(entry)])
        start = steps[base].prompt + steps[base].response if base is not None else 0
        return entries, payload_of(step, origin, start)

    def _late(self, offset: int, key: Key, step: Step, tail: str) -> list[Entry]:
        closed = Closed.load(self.state.closed[key])
        hashed = _hash(tail.encode())
        if hashed in closed.late or any(s.tail == tail for s in closed.steps):
            return []
        evidence = f"closed as {closed.outcome} at {closed.closed_at}"
        return [[op.MARKED, *key, step.step_id, "late", evidence, offset, hashed]]

    def _session(self, offset: int, key: Key, event: SessionEvent) -> tuple[list[Entry], Kept | None]:
        now = self.state.time[STEPS]
        trajectory = self.state.opened.get(key)
        if len(event.metadata_json or b"") > PAYLOAD_BYTES:
            raise Refusal("invalid", f"metadata has more than {PAYLOAD_BYTES} bytes")
        if key in self.state.closed:
            return [], None
        if event.kind != "opened":
            reason = event.reason[:REASON_CHARS] if event.reason else None
            event_hash = _hash(event.event_id.encode())
            if any(s == STEPS and self.state.waiting[s][o].entry[2] == event_hash for s, o in self._waiting_for(key)):
                return [], None
            if trajectory is None:
                entry: Entry = [event.kind, reason, event_hash]
                return [*self._make_room(STEPS), [op.WAITS, STEPS, offset, now, *key, None, entry]], None
            return [[op.CLOSED, *key, event.kind, reason, now]], None
        said = {
            "group_id": check_group_id(event.group_id) if event.group_id is not None else None,
            "group_size": event.group_size,
            "round": event.round,
            "meta": offset if event.metadata_json is not None else None,
        }
        new = {n: v for n, v in said.items() if v is not None and getattr(trajectory, n, None) is None}
        entries: list[Entry] = [] if trajectory else [[op.OPENED, *key, now, event.channel or "train"]]
        if new:
            entries.append([op.ATTRIBUTES, *key, now, new])
        return entries, metadata_of(event) if "meta" in new else None

    def _reward(self, offset: int, key: Key, reward: Reward) -> list[Entry]:
        if len(reward.name) > NAME_CHARS or len(reward.function_version) > NAME_CHARS:
            raise Refusal("invalid", f"name and function_version have at most {NAME_CHARS} characters")
        if reward.value is not None and not math.isfinite(reward.value):
            raise Refusal("invalid", f"value {reward.value} is not finite; no reward is null, with a reason")
        tail = reward.step_id[len(key[1]) + 1 :] if reward.step_id is not None else None
        reason = reward.reason[:REASON_CHARS] if reward.reason else None
        entry = RewardEntry(
            reward.source, reward.name, reward.function_version, tail, reward.value, reason, reward.reward_revision
        )
        return self._aim(offset, key, tail, reward.trajectory_id, [op.REWARD, *key, list(entry)])

    def _curation(self, offset: int, key: Key, mark: Curation) -> list[Entry]:
        if mark.quality is not None and not 0 <= mark.quality <= 1:
            raise Refusal("invalid", f"quality {mark.quality} is not in [0, 1]")
        if len(mark.tags or ()) > TAGS_MAX or any(len(tag) > NAME_CHARS for tag in mark.tags or ()):
            raise Refusal("invalid", f"there are at most {TAGS_MAX} tags of at most {NAME_CHARS} characters")
        said = {
            "quality": mark.quality,
            "trainable": mark.trainable,
            "tags": list(mark.tags) if mark.tags else mark.tags,
        }
        fields = {n: v for n, v in said.items() if v is not None}
        if not fields:
            return []
        tail = mark.step_id[len(key[1]) + 1 :] if mark.step_id is not None else None
        entry: Entry = [op.CURATED, *key, _hash(mark.event_id.encode()), tail or "", fields]
        return self._aim(offset, key, tail, mark.trajectory_id, entry)

    def _aim(self, offset: int, key: Key, tail: str | None, trajectory_id: str | None, entry: Entry) -> list[Entry]:
        """Apply to a known target, wait for one that may come, or bury."""
        at = self.state.time[REWARDS]
        since = self._appeared(key, tail, at) if trajectory_id in (None, key[1]) else None
        if since is not None and since <= at + self.limits.orphan_after:
            return [entry] if self._changes(key, entry) else []
        if since is None and self.state.time[STEPS] <= at + self.limits.orphan_after:
            return [*self._make_room(REWARDS), [op.WAITS, REWARDS, offset, at, *key, tail, entry]]
        detail = f"no {'step' if tail else 'trajectory'} {_name(key, tail)} in time"
        return [[op.BURIED, REWARDS, offset, "unknown_target", detail]]

    def _appeared(self, key: Key, tail: str | None, at: int) -> int | None:
        """When the target came, on the clock of `claw.steps`; None: not known at time `at`."""
        target: Open | Closed | None = self.state.opened.get(key)
        if target is None and (packed := self.state.closed.get(key)) is not None:
            target = Closed.load(packed)
            if at > target.closed_at + self.limits.closed_horizon:
                return None
        if target is None:
            return None
        if tail is None:
            return target.opened_at
        return next((s.at for s in target.steps if s.tail == tail), None)

    def _changes(self, key: Key, entry: Entry) -> bool:
        folded = self._folded(key)
        if entry[0] == op.REWARD:
            return folded.beats(RewardEntry(*entry[3]))
        return entry[3] not in folded.seen

    def _folded(self, key: Key) -> Folded:
        trajectory = self.state.opened.get(key)
        return trajectory.folded if trajectory is not None else Closed.load(self.state.closed[key]).folded

    def _meet(self, entry: Entry) -> None:
        """After a trajectory or step has come: rewards and marks that waited for it, in the order of their log."""
        if entry[0] not in (op.OPENED, op.ATTRIBUTES, op.STEP):
            return
        key: Key = (entry[1], entry[2])
        for source, offset in list(self._waiting_for(key)):
            waiting = self.state.waiting[source][offset]
            if source == REWARDS and self._appeared(key, waiting.tail, waiting.at) is not None:
                self._do([[op.WAITS_NO_MORE, source, offset]])
                if self._changes(key, waiting.entry):
                    self._do([waiting.entry])

    def _do(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self.state.apply(entry)
            self._entries.append(entry)
            if entry[0] == op.CLOSED or (
                entry[0] in (op.REWARD, op.CURATED) and (entry[1], entry[2]) in self.state.closed
            ):
                self._changed[entry[1], entry[2]] = None


def _check_sizes(step: Step, tail: str) -> None:
    """What would make a record of ours too large, now or together with others. Raises Refusal."""
    names = (tail, step.finish_reason, step.version_first, step.version_last, *(s.version for s in step.versions))
    if any(len(name) > NAME_CHARS for name in (*names, *(t.name for t in step.tags)) if name is not None):
        raise Refusal("invalid", f"step id, finish reason, versions and tags have at most {NAME_CHARS} characters")
    packed = (step.prompt_token_ids, step.response_token_ids, step.response_logprobs, step.response_json)
    tags = sum(len(t.evidence) for t in step.tags)
    if sum(len(part) for part in packed if part is not None) + 4 * tags > PAYLOAD_BYTES:
        raise Refusal("invalid", f"tokens, reply and tags have more than {PAYLOAD_BYTES} bytes")


def _longest_known_prefix(steps: Sequence[StepEntry], step: Step) -> tuple[int | None, int | None]:
    """Position of the step whose prompt and response are the longest prefix of this prompt, and the hash of this whole step."""
    prompt, response = step.prompt_token_ids, step.response_token_ids
    if prompt is None or response is None:
        return None, None
    view, hashed, at, base = memoryview(prompt), blake2b(digest_size=8), 0, None
    ends = sorted((s.prompt + s.response, i) for i, s in enumerate(steps) if s.end_hash is not None and s.response)
    for end, i in ends:
        if end * WIDTH > len(prompt):
            break
        hashed.update(view[at : end * WIDTH])
        at = end * WIDTH
        if _number(hashed.digest()) == steps[i].end_hash:
            base = i
    hashed.update(view[at:])
    hashed.update(response)
    return base, _number(hashed.digest())


def _hash(text: bytes) -> int:
    return _number(blake2b(text, digest_size=8).digest())


def _number(digest: bytes) -> int:
    """63 bits: JSON integers are signed."""
    return int.from_bytes(digest, "little") >> 1


def _name(key: Key, tail: str | None) -> str:
    return f"{key[1]}~{tail} of run {key[0]}" if tail else f"{key[1]} of run {key[0]}"
