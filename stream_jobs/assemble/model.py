"""What assemble keeps of a trajectory: values, without payload. Pure; all times are log timestamps in ms.

`dump` gives plain JSON values, `load` reads them back.
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
"""A change of the state: `[op, ...]`, JSON values."""
RunTrajectory = tuple[str, str]
"""(run id, trajectory id): the id is the trajectory key, except in a bucket or an agent's session."""
SourceTopic = Literal[0, 1]
STEPS: SourceTopic = 0
REWARDS: SourceTopic = 1
AwaitedTarget = tuple[SourceTopic, RunTrajectory, str | int | None]
"""What is waited for on an input: of a reward or mark the key and the tail of the step, of a completion the key and the hash of its event id."""


REWARDS_MAX = 10_000
MARKS_MAX = 10_000
"""Rewards and curation marks a trajectory keeps: without a bound a writer whose names or event ids change would grow the state for ever."""
STEPS_MAX = 5_000
"""Steps a trajectory has. A step's cost, what a closing takes and what a candidate says grow with them."""
PAYLOAD_MAX = 256 << 20
"""Bytes of payload a trajectory has: all of it is in memory when it closes, and a few times as much while it is sent."""
STEP_BYTES = 400
"""Upper bound of what a step takes besides its tokens and its reply."""


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
    """The call of a step, from the part of its id behind the trajectory key."""
    return step_suffix.partition(".")[0]


class OpenStep(NamedTuple):
    """What the index keeps of a step. tail: the id behind the trajectory key. prompt, response: tokens.

    end_hash: of prompt and response, None without tokens. base: position, in log order, of the step whose prompt and response were the
    longest prefix of this prompt when it came: the cache keeps only what is after it. reason: why it can't be trained. at: event time of
    `claw.steps` when it came. reply: KiB of the reply. asked: hash of the prompt, without tokens of the request. idem: hash of the
    idempotency key. leads: in a bucket, what a request that goes on from here will show. after: the step it goes on from, when that is
    not its base. retried: the step that took its place; then it is never trained. tags: their names. repeats: where a
    prompt goes on from an earlier one otherwise than was sampled there, hash of the model's last turn in the request. messages,
    call_id: in an anonymous session, hashes of the request's messages and of the id of the reply's last tool call.
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
        """Tokens of prompt and response."""
        return self.prompt + self.response

    @property
    def choice(self) -> str:
        """Which choice of its call it is."""
        return self.step_suffix.rpartition(".")[2]


class OpenSteps(list[OpenStep]):
    """The steps of an open trajectory in log order, and what is looked up in them: a step must not cost a look at all before it. The
    look-ups follow from the steps and are not stored.

    tails: position by tail. Of steps that have sampled something: ends, prompts: the lengths in tokens of prompt and response, and of the
    prompt, ascending; ended: the latest position by `end_hash`; asked: all of `asked`. continued: a byte a position, 1: a later step goes
    on from it. failed, unread: positions of what ended badly by `asked`, with tokens and without. keyed: positions by hash of the idempotency
    key. size: bytes of payload, about.
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
        """One more. What is put in another's place later may differ in `retried` and `reason` only."""
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
        """How many tokens of the prompt are its base's, which is kept already; of a step that is one of them or comes next."""
        return self[entry.base].end if entry.base is not None else 0

    def size_of(self, entry: OpenStep) -> int:
        """About how many bytes the payload of a step has, that is one of them or comes next."""
        return (
            TOKEN_BYTES * (entry.prompt - self.start_of(entry) + 2 * entry.response)
            + (entry.reply << 10)
            + STEP_BYTES
        )


def _insert(numbers: array[int], number: int) -> None:
    """Into ascending numbers, each once."""
    at = bisect_left(numbers, number)
    if at == len(numbers) or numbers[at] != number:
        numbers.insert(at, number)


class CurrentReward(NamedTuple):
    """A reward as it counts. tail: of the step; None: the whole trajectory. offset: on `claw.rewards`; -1: on one that is no more."""

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
    """Curation of one target, field by field; the last one on the log counts. offsets: which one that is, by field."""

    quality: float | None = None
    trainable: bool | None = None
    tags: list[str] | None = None
    offsets: dict[str, int] = field(default_factory=dict)

    def apply(self, fields: Mapping[str, Any], offset: int) -> None:
        """What the curation at `offset` of `claw.rewards` says. It may come behind a later one: it waited for another step."""
        for name, value in fields.items():
            if offset >= self.offsets.get(name, -1):
                setattr(self, name, value)
                self.offsets[name] = offset


class AssessmentState(NamedTuple):
    """What the rules say: quality of the whole, and of each step by its index in the closed trajectory."""

    revision: int
    quality: float | None
    steps: list[float]


@dataclass(slots=True)
class Annotations:
    """Rewards, curation and assessment of a trajectory, folded. seen: hashes of curation events, so that a re-sent one changes nothing."""

    rewards: dict[str, CurrentReward] = field(default_factory=dict)
    marks: dict[str, CurationState] = field(default_factory=dict)
    seen: dict[int, None] = field(default_factory=dict)
    assessed: AssessmentState | None = None

    def accepts_assessment(self, assessed: list[Any]) -> bool:
        """Whether an assessment changes the state: highest revision, among equals the first."""
        return self.assessed is None or assessed[0] > self.assessed.revision

    def accepts_reward(self, reward: CurrentReward) -> bool:
        """Whether the reward changes the state: highest revision, among equals the first on the log.

        Not the first to be applied: rewards of one bucket's trajectory may name different steps of it, and wait for them.
        """
        old = self.rewards.get(reward.slot)
        return old is None or (reward.revision, -reward.offset) > (old.revision, -old.offset)

    def limit_reached(self, entry: StateChange) -> str | None:
        """What there is too much of for the reward or mark of an entry; None: there is room. What replaces another always has room."""
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
        """They are of a topic that is no more: what comes now comes later than all of it."""
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
    """A trajectory that goes on. number: offset on `claw.steps` of the record that opened it; the state log calls it by that. last: time of
    its last record. meta: offset of the opened event with metadata.
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
            self.open_seq, self.opened_at, self.channel, self.last, self.group_id, self.group_size, self.round, self.meta,
            [list(s) for s in self.steps], self.annotations.dump(),
        ]  # fmt: skip

    @classmethod
    def load(cls, plain: Any) -> OpenTrajectory:
        plain[8] = OpenSteps(OpenStep(*s) for s in plain[8])
        plain[9] = Annotations.load(plain[9])
        return cls(*plain)


class ClosedStep(NamedTuple):
    """What later candidate revisions need of a step."""

    step_suffix: str
    at: int
    response: int
    reason: str | None
    oldest: str | None
    newest: str | None
    tags: list[str] | None = None


@dataclass(slots=True)
class ClosedTrajectory:
    """A closed trajectory, as small as later rewards and marks allow. steps: in log order until `facts`, then by index.

    prompt_tokens: environment tokens, each once. place: topic id, partition, first and last offset of its payload; None before the
    first output. revision: of the last candidate decided, -1 before the first. late: hashes of the ids of its late steps.
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
        """When a step of it came; None: it has no such step. Of many questions the first one costs a look at all steps."""
        if len(self._times) != len(self.steps):
            self._times = {s.step_suffix: s.at for s in self.steps}
        return self._times.get(step_suffix)

    def dump(self) -> bytes:
        return orjson.dumps([
            self.opened_at, self.closed_at, self.outcome, self.reason, self.channel, self.group_id, self.group_size, self.round,
            [list(s) for s in self.steps], self.annotations.dump(), self.prompt_tokens, self.place, self.revision, self.late,
        ])  # fmt: skip

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

    key: of the trajectory or of the bucket. tail: of the step it waits for; None: the trajectory. entry: of a reward or mark, the one
    that is applied to the trajectory when the target comes; of a completion, [kind, reason, hash of its event id].
    """

    source: SourceTopic
    offset: int
    at: int
    key: RunTrajectory
    step_suffix: str | None
    entry: StateChange

    @property
    def awaited(self) -> AwaitedTarget:
        """What it is found by. Of a completion that is what makes it one with another: it is never met, its time runs out."""
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
    """Decided, not yet known to be acknowledged. closings: what closed, with its index. revised: keys with a new revision."""

    closings: dict[RunTrajectory, OpenTrajectory] = field(default_factory=dict)
    revised: dict[RunTrajectory, None] = field(default_factory=dict)
    marks: list[StepMarkDecision] = field(default_factory=list)
    dead_letters: list[DeadLetterDecision] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.closings or self.revised or self.marks or self.dead_letters)
