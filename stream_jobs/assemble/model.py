"""Values that assemble keeps for a trajectory, without payload. Pure; all times are log timestamps
in ms.

`dump` returns plain JSON values; `load` reads them back.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import orjson

from schemas.records import Channel, Outcome, RewardSource, StepMarkKind, StepStatus
from stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES

StateChange = list[Any]
"""A change of the state: `[kind, ...]`, JSON values."""
RunTrajectory = tuple[str, str]
"""(run id, trajectory id). The trajectory id equals the trajectory key, except in gateway-assigned
sessions.
"""
SourceTopic = Literal[0, 1]
STEPS: SourceTopic = 0
REWARDS: SourceTopic = 1
AwaitedTarget = tuple[SourceTopic, RunTrajectory, str | int | None]
"""Lookup key of a pending target: for a reward or mark the trajectory and the step suffix, for a
completion the trajectory and the hash of its event id.
"""


REWARDS_MAX = 10_000
MARKS_MAX = 10_000
"""Maximum number of rewards and of curation marks per trajectory. Bounds the state against writers
whose names or event ids keep changing.
"""
STEPS_MAX = 5_000
"""Maximum number of steps per trajectory. The cost of a step, of closing and of a candidate grows
with it.
"""
PAYLOAD_MAX = 256 << 20
"""Maximum payload per trajectory, bytes. All of it is in memory at closing, and several times as
much while it is sent.
"""
STEP_BYTES = 400
"""Upper bound for the size of a step without its tokens and its reply, bytes."""


class ChangeKind:
    """Kinds of state changes: the first element of a `StateChange`, as stored in the changelog."""

    OPENED = "o"
    ATTRIBUTED = "a"
    STEP_ADDED = "s"
    RETRIED = "y"
    CLOSED = "c"
    PAYLOAD_LOST = "l"
    PAYLOAD_WRITTEN = "f"
    REVISED = "v"
    EVICTED = "z"
    REWARDED = "r"
    CURATED = "q"
    ASSESSED = "e"
    TARGET_AWAITED = "w"
    WAIT_ENDED = "x"
    STEP_MARKED = "m"
    DEAD_LETTERED = "d"
    OUTPUTS_ACKNOWLEDGED = "D"
    CLOCKS_ADVANCED = "t"
    SILENCE_NOTED = "h"
    SOURCE_REPLACED = "n"


def call_suffix(step_suffix: str) -> str:
    """Return the call part of a step suffix (a step id without its trajectory key)."""
    return step_suffix.partition(".")[0]


class OpenStep(NamedTuple):
    """Index entry of a step in an open trajectory. All hashes have 63 bits.

    Attributes:
        offset: Offset on `claw.steps`.
        at: Event time of `claw.steps` when the step arrived, ms.
        step_suffix: Step id without its trajectory key.
        prompt, response: Lengths in tokens.
        base: Position of the step whose prompt and response were the longest prefix of this
            prompt on arrival. The cache keeps only the tokens after this prefix.
        end_hash: Hash of prompt and response; None without tokens.
        reason: Why the step cannot be trained; None if it can.
        oldest, newest: Version ids with the lowest and highest sync index.
        reply: Size of the reply, KiB.
        prompt_hash: Hash of the prompt tokens; without tokens, of the request.
        idempotency_hash: Hash of the idempotency key and the choice index.
        reply_hash: In a gateway-assigned session: what a request that continues from this reply
            will match.
        after: Position of the step that this step continues, if that is not `base`.
        retried: Position of the step that replaces this one; a replaced step is never trained.
        tags: Names of the tags.
        last_turn_hash: Hash of the last model turn in the request, if the prompt diverges from
            the sampled tokens.
        messages_hash, call_id_hash: In an anonymous session: hashes of the request's messages
            and of the id of the last tool call in the reply.
    """

    offset: int
    at: int
    step_suffix: str
    prompt: int
    response: int
    base: int | None
    end_hash: int | None
    status: StepStatus
    reason: str | None
    oldest: str | None
    newest: str | None
    reply: int = 0
    prompt_hash: int | None = None
    idempotency_hash: int | None = None
    reply_hash: int | None = None
    after: int | None = None
    retried: int | None = None
    tags: list[str] | None = None
    last_turn_hash: int | None = None
    messages_hash: int | None = None
    call_id_hash: int | None = None

    @property
    def end(self) -> int:
        """Return the length of prompt and response, tokens."""
        return self.prompt + self.response

    @property
    def choice(self) -> str:
        """Return the choice index of the step in its call."""
        return self.step_suffix.rpartition(".")[2]


class OpenSteps(list[OpenStep]):
    """The steps of an open trajectory in log order, with lookup tables derived from them.

    The tables are not stored. They make the cost of a step independent of the number of earlier
    steps. Attributes (positions are list indexes; the first four cover only steps with sampled
    tokens):
        ends, prompt_lengths: Ascending lengths in tokens of prompt plus response, and of the
            prompt.
        ended: Latest position by `end_hash`.
        prompt_hashes: All values of `prompt_hash`.
        by_suffix: Position by step suffix.
        continued: One byte per position; 1 if a later step continues from it.
        failed, failed_untokenized: Positions of incomplete steps by `prompt_hash`, with and
            without tokens.
        keyed: Positions by `idempotency_hash`.
        size: Approximate payload size, bytes.
    """

    __slots__ = (
        "by_suffix",
        "continued",
        "ended",
        "ends",
        "failed",
        "failed_untokenized",
        "keyed",
        "prompt_hashes",
        "prompt_lengths",
        "size",
    )

    def __init__(self, entries: Iterable[OpenStep] = ()) -> None:
        super().__init__()
        self.by_suffix: dict[str, int] = {}
        self.ends, self.prompt_lengths = array("q"), array("q")
        self.ended: dict[int, int] = {}
        self.prompt_hashes: set[int | None] = set()
        self.continued = bytearray()
        self.failed: dict[int | None, list[int]] = {}
        self.failed_untokenized: dict[int | None, list[int]] = {}
        self.keyed: dict[int, list[int]] = {}
        self.size = 0
        for entry in entries:
            self.append(entry)

    def append(self, entry: OpenStep) -> None:
        """Append a step. A replacement in place may change only `retried` and `reason`."""
        at = len(self)
        self.by_suffix[entry.step_suffix] = at
        if entry.end_hash is not None and entry.response:
            _insert(self.ends, entry.end)
            _insert(self.prompt_lengths, entry.prompt)
            self.ended[entry.end_hash] = at
            self.prompt_hashes.add(entry.prompt_hash)
        self.continued.append(0)
        for i in (entry.base, entry.after):
            if i is not None:
                self.continued[i] = 1
        if entry.status != "ok":
            failed = self.failed_untokenized if entry.end_hash is None else self.failed
            failed.setdefault(entry.prompt_hash, []).append(at)
        if entry.idempotency_hash is not None:
            self.keyed.setdefault(entry.idempotency_hash, []).append(at)
        self.size += self.size_of(entry)
        super().append(entry)

    def start_of(self, entry: OpenStep) -> int:
        """Return how many prompt tokens are stored with the step's base."""
        return self[entry.base].end if entry.base is not None else 0

    def size_of(self, entry: OpenStep) -> int:
        """Return the approximate payload size of a step, bytes."""
        return (
            TOKEN_BYTES * (entry.prompt - self.start_of(entry) + 2 * entry.response)
            + (entry.reply << 10)
            + STEP_BYTES
        )


def _insert(numbers: array[int], number: int) -> None:
    """Insert a number into an ascending array, if absent."""
    at = bisect_left(numbers, number)
    if at == len(numbers) or numbers[at] != number:
        numbers.insert(at, number)


class CurrentReward(NamedTuple):
    """The reward that counts for its slot. step_suffix: None for the whole trajectory. offset: on
    `claw.rewards`; -1 if that topic was replaced.
    """

    source: RewardSource
    name: str
    version: str
    step_suffix: str | None
    value: float | None
    reason: str | None
    revision: int
    offset: int = -1

    @property
    def slot(self) -> str:
        return f"{self.source}\x1f{self.name}\x1f{self.step_suffix or ''}"


@dataclass(slots=True)
class CurationState:
    """Curation of one target. For each field the last value on the log counts. offsets: log offset
    of each field's value.
    """

    quality: float | None = None
    trainable: bool | None = None
    tags: list[str] | None = None
    offsets: dict[str, int] = field(default_factory=dict)

    def apply(self, fields: Mapping[str, Any], offset: int) -> None:
        """Apply the curation at `offset` of `claw.rewards`. Curations may be applied out of log
        order.
        """
        for name, value in fields.items():
            if offset >= self.offsets.get(name, -1):
                setattr(self, name, value)
                self.offsets[name] = offset


class AssessmentState(NamedTuple):
    """Result of the quality rules: quality of the trajectory, and of each step by its index in the
    closed trajectory.
    """

    revision: int
    quality: float | None
    steps: list[float]


@dataclass(slots=True)
class Annotations:
    """Rewards, curation and assessment of a trajectory. seen: hashes of curation event ids, to
    ignore duplicates.
    """

    rewards: dict[str, CurrentReward] = field(default_factory=dict)
    marks: dict[str, CurationState] = field(default_factory=dict)
    seen: dict[int, None] = field(default_factory=dict)
    assessed: AssessmentState | None = None

    def accepts_assessment(self, assessed: list[Any]) -> bool:
        """Return whether an assessment changes the state: the highest revision wins, then the first
        one.
        """
        return self.assessed is None or assessed[0] > self.assessed.revision

    def accepts_reward(self, reward: CurrentReward) -> bool:
        """Return whether a reward changes the state: the highest revision wins, then the lowest
        offset.

        The lowest offset, not the first applied: rewards may wait for different steps of one
        trajectory.
        """
        old = self.rewards.get(reward.slot)
        return old is None or (reward.revision, -reward.offset) > (old.revision, -old.offset)

    def limit_reached(self, entry: StateChange) -> str | None:
        """Describe the limit that prevents a reward or mark; None if there is room. Replacements
        always fit.
        """
        if (
            len(self.rewards) >= REWARDS_MAX
            and entry[0] == ChangeKind.REWARDED
            and CurrentReward(*entry[3]).slot not in self.rewards
        ):
            return f"{REWARDS_MAX} rewards by source, name and step"
        return (
            f"{MARKS_MAX} curation marks"
            if len(self.seen) >= MARKS_MAX and entry[0] == ChangeKind.CURATED
            else None
        )

    def forget_offsets(self) -> None:
        """Drop all offsets: the topic was replaced, and every record of the new topic is later."""
        self.rewards = {slot: r._replace(offset=-1) for slot, r in self.rewards.items()}
        for marks in self.marks.values():
            marks.offsets.clear()

    def dump(self) -> Any:
        return [
            [list(r) for r in self.rewards.values()],
            [[t, m.quality, m.trainable, m.tags, m.offsets] for t, m in self.marks.items()],
            list(self.seen),
            *([list(self.assessed)] if self.assessed is not None else []),
        ]

    @classmethod
    def load(cls, plain: Any) -> Annotations:
        rewards = (CurrentReward(*r) for r in plain[0])
        marks = {target: CurationState(*said) for target, *said in plain[1]}
        assessed = AssessmentState(*plain[3]) if len(plain) > 3 else None
        return cls({r.slot: r for r in rewards}, marks, dict.fromkeys(plain[2]), assessed)


@dataclass(slots=True)
class OpenTrajectory:
    """A trajectory that has not closed.

    Attributes:
        open_seq: Offset on `claw.steps` of the record that opened it. Identifies the trajectory
            in the changelog.
        last: Time of its last record, ms.
        meta: Offset of the opened event that carries metadata.
    """

    open_seq: int
    opened_at: int
    channel: Channel
    last: int
    group_id: str | None = None
    group_size: int | None = None
    round: int | None = None
    meta: int | None = None
    steps: OpenSteps = field(default_factory=OpenSteps)
    annotations: Annotations = field(default_factory=Annotations)

    def dump(self) -> Any:
        return [
            self.open_seq,
            self.opened_at,
            self.channel,
            self.last,
            self.group_id,
            self.group_size,
            self.round,
            self.meta,
            [list(s) for s in self.steps],
            self.annotations.dump(),
        ]

    @classmethod
    def load(cls, plain: Any) -> OpenTrajectory:
        plain[8] = OpenSteps(OpenStep(*s) for s in plain[8])
        plain[9] = Annotations.load(plain[9])
        return cls(*plain)


class ClosedStep(NamedTuple):
    """The part of a step that later candidate revisions need."""

    step_suffix: str
    at: int
    response: int
    reason: str | None
    oldest: str | None
    newest: str | None
    tags: list[str] | None = None


@dataclass(slots=True)
class ClosedTrajectory:
    """A closed trajectory, reduced to what later rewards and marks need.

    Attributes:
        steps: In log order until the payload is written, then by index.
        prompt_tokens: Environment tokens, each counted once.
        place: Topic id, partition, first and last offset of the payload; None before the first
            output.
        revision: Last decided candidate revision; -1 before the first.
        late: Hashes of the ids of late steps.
    """

    opened_at: int
    closed_at: int
    outcome: Outcome
    reason: str | None
    channel: Channel
    group_id: str | None
    group_size: int | None
    round: int | None
    steps: list[ClosedStep]
    annotations: Annotations
    prompt_tokens: int = 0
    place: tuple[str, int, int, int] | None = None
    revision: int = -1
    late: list[int] = field(default_factory=list)
    _times: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def step_time(self, step_suffix: str) -> int | None:
        """Return when a step arrived, ms; None if there is no such step. The first call builds an
        index of all steps.
        """
        if len(self._times) != len(self.steps):
            self._times = {s.step_suffix: s.at for s in self.steps}
        return self._times.get(step_suffix)

    def dump(self) -> bytes:
        return orjson.dumps(
            [
                self.opened_at,
                self.closed_at,
                self.outcome,
                self.reason,
                self.channel,
                self.group_id,
                self.group_size,
                self.round,
                [list(s) for s in self.steps],
                self.annotations.dump(),
                self.prompt_tokens,
                self.place,
                self.revision,
                self.late,
            ]
        )

    @classmethod
    def load(cls, packed: bytes) -> ClosedTrajectory:
        plain = orjson.loads(packed)
        plain[8] = [ClosedStep(*s) for s in plain[8]]
        plain[9] = Annotations.load(plain[9])
        plain[11] = tuple(plain[11]) if plain[11] else None
        return cls(*plain)


@dataclass(slots=True)
class PendingTarget:
    """A reward, mark or completion whose target is not known yet.

    Attributes:
        key: Trajectory, or gateway-assigned session.
        step_suffix: Step that it waits for; None for the trajectory.
        entry: For a reward or mark, the change to apply when the target arrives; for a
            completion, [kind, reason, hash of its event id].
    """

    source: SourceTopic
    offset: int
    at: int
    key: RunTrajectory
    step_suffix: str | None
    entry: StateChange

    @property
    def awaited(self) -> AwaitedTarget:
        """Return the lookup key. For a completion it only detects duplicates; a completion waits
        until its time limit.
        """
        return self.source, self.key, self.step_suffix if self.source == REWARDS else self.entry[2]


class StepMarkDecision(NamedTuple):
    """A decided StepMark."""

    key: RunTrajectory
    step_id: str
    kind: StepMarkKind
    evidence: str | None
    offset: int


class DeadLetterDecision(NamedTuple):
    """A decided dead letter: the record at `offset` of an input."""

    source: SourceTopic
    offset: int
    reason: str
    detail: str


@dataclass(slots=True)
class PendingOutputs:
    """Decided outputs that are not yet acknowledged. closings: closed trajectories with their
    steps. revised: trajectories with a new revision.
    """

    closings: dict[RunTrajectory, OpenTrajectory] = field(default_factory=dict)
    revised: dict[RunTrajectory, None] = field(default_factory=dict)
    marks: list[StepMarkDecision] = field(default_factory=list)
    dead_letters: list[DeadLetterDecision] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.closings or self.revised or self.marks or self.dead_letters)
