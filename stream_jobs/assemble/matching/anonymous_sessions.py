"""Gateway-assigned sessions: assign calls that name no trajectory to a trajectory. Pure.

All conversations of one client with the same first words share an anonymous session, that is a
trajectory key: possibly a thousand parallel rollouts of one task. A step belongs to, by the
first rule that matches:

1. the trajectory that already has its call: another choice, or a duplicate record;
2. the trajectory of the step that it retries: same idempotency key, or the identical prompt
  after an incomplete step;
3. a new trajectory, if its conversation has no model turn yet. So rollouts of one prompt are
  never merged;
4. the trajectory of the step whose reply is the last model turn in its request (`conversation`).
  Among several the longest token prefix wins, then the step whose request is the messages before
  that turn;
5. the trajectory of the step whose request is the messages before the last model turn, and whose
  reply is most like that turn by its words: the agent repeats the reply in another form;
6. the trajectory of the step whose prompt and response are the longest token prefix of its
  prompt;
7. the trajectory of the step whose tool call id occurs as text in the last model turn;
8. the trajectory of the only step whose request is the longest prefix of its messages, if no
  step continues it yet;
9. a new trajectory.

A reply that is found with the messages before it (rule 5) precedes an equal reply that is found
without them (rule 4): call ids that are counted in each conversation repeat.

Among steps that match alike the one that no other step continues wins, then the first one on the
log. Only open trajectories are searched, except by rule 1. No choice loses data: a step in the
wrong trajectory is a branch of its tree, counted as drift.

An agent's session has one open trajectory at a time, split only by inactivity
(`place_in_agent_session`).

The index is derived from the steps and not stored: a new owner rebuilds the same index from the
changelog.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal, NamedTuple

from clawstream.schemas.conversation import RecordedRequest
from clawstream.schemas.records import Step
from clawstream.stream_jobs.assemble.matching.conversation import (
    Conversation,
    Turn,
    call_id_of,
    call_ids_in,
    conversation_of,
    exchange_hash,
    likeness,
    reply_hashes,
    reply_of,
    words_of,
)
from clawstream.stream_jobs.assemble.matching.retries import (
    ended_badly,
    idempotency_hash,
    may_be_equal,
    request_hash,
)
from clawstream.stream_jobs.assemble.matching.token_prefix import hash_of, hashes_at
from clawstream.stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES
from clawstream.stream_jobs.assemble.state.steps import OpenStep, OpenSteps, call_suffix

StepPosition = tuple[str, int]
"""Trajectory id, and position of a step in it."""
StepsOf = Callable[[str], OpenSteps]
EXAMINED_MAX = 1024
"""Maximum number of steps that are examined one by one."""
LIKE = 0.5
"""Least share of common words of a turn and a reply that it repeats in another form."""
STALE_MAX = 64
"""Stale heap entries that are tolerated, in addition to as many as there are live entries."""


@dataclass(slots=True)
class StepMatches:
    """Steps that match a request equally well; thousands if rollouts have the same reply.

    Attributes:
        offsets: Log offset of each step.
        unclaimed: A heap of the steps that no step continues. Stale entries are dropped when
            they reach the top; a step never becomes unclaimed again.
    """

    offsets: dict[StepPosition, int] = field(default_factory=dict)
    unclaimed: list[tuple[int, StepPosition]] = field(default_factory=list, compare=False)

    def add(self, place: StepPosition, offset: int) -> None:
        """Add a step."""
        self.offsets[place] = offset
        heappush(self.unclaimed, (offset, place))

    def remove(self, place: StepPosition) -> None:
        """Remove a step. Rebuilds the heap when most of it is stale."""
        del self.offsets[place]
        if len(self.unclaimed) > 2 * len(self.offsets) + STALE_MAX:
            self.unclaimed = [(offset, left) for left, offset in self.offsets.items()]
            heapify(self.unclaimed)

    def best(self, steps_of: StepsOf) -> StepPosition:
        """Return the best step: not retried, then not continued, then first on the log."""
        if len(self.offsets) == 1:
            return next(iter(self.offsets))
        while self.unclaimed:
            place = self.unclaimed[0][1]
            if place in self.offsets and _rank(place, steps_of)[:2] == (False, False):
                return place
            heappop(self.unclaimed)
        return min(self.offsets, key=lambda place: _rank(place, steps_of))


def _rank(place: StepPosition, steps_of: StepsOf) -> tuple[bool, bool, int]:
    """Return whether a retry replaced the step, whether a step continues it, and its log offset."""
    steps, at = steps_of(place[0]), place[1]
    return steps[at].retried is not None, bool(steps.continued[at]), steps[at].offset


@dataclass(slots=True)
class PrefixIndex:
    """Index of step ends by length of prompt and response, then by hash: one lookup per length
    instead of per step. Covers only steps with sampled tokens.
    """

    by_length: dict[int, dict[int, StepMatches]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    def add(self, place: StepPosition, step: OpenStep, end_hash: int) -> None:
        """Add a step."""
        if step.end not in self.by_length:
            insort(self.lengths, step.end)
        by_hash = self.by_length.setdefault(step.end, {})
        by_hash.setdefault(end_hash, StepMatches()).add(place, step.offset)

    def remove(self, place: StepPosition, step: OpenStep, end_hash: int) -> None:
        """Remove a step."""
        by_hash = self.by_length[step.end]
        by_hash[end_hash].remove(place)
        if not by_hash[end_hash].offsets:
            del by_hash[end_hash]
        if not by_hash:
            del self.by_length[step.end]
            self.lengths.remove(step.end)

    def longest(self, prompt: bytes) -> StepMatches | None:
        """Return the steps whose prompt and response are the longest prefix of a prompt; None if
        there are none.
        """
        for length, hashed in reversed(hashes_at(prompt, self.lengths)[0]):
            if found := self.by_length[length].get(hashed):
                return found
        return None


Lookup = tuple[
    Literal["reply", "exchange", "messages", "call id", "idempotency", "failed prompt"], int
]
"""What finds a step, and its hash. exchange: messages and reply."""


def _lookups(step: OpenStep) -> Iterator[Lookup]:
    if step.reply_hash is not None:
        yield "reply", step.reply_hash
    if step.messages_hash is not None:
        yield "messages", step.messages_hash
    if step.exchange_hash is not None:
        yield "exchange", step.exchange_hash
    if step.call_id_hash is not None:
        yield "call id", step.call_id_hash
    if step.idempotency_hash is not None:
        yield "idempotency", step.idempotency_hash
    if step.prompt_hash is not None and ended_badly(step):
        yield "failed prompt", step.prompt_hash


@dataclass(slots=True)
class SessionIndex:
    """Index of one gateway-assigned session. Everything but `calls` covers open trajectories only.

    Attributes:
        calls: Trajectory id by call, of closed trajectories too.
        opened: Ids of open trajectories.
        matches: Steps by what finds them.
        prefixes: Ends of the steps with a reply hash, by that hash; at None, of all steps.
        failed: Number of incomplete steps.
    """

    calls: dict[str, str] = field(default_factory=dict)
    opened: dict[str, None] = field(default_factory=dict)
    matches: dict[Lookup, StepMatches] = field(default_factory=dict)
    prefixes: dict[int | None, PrefixIndex] = field(default_factory=dict)
    failed: int = 0

    def add(self, trajectory: str, at: int, step: OpenStep) -> None:
        """Add a step of an open trajectory."""
        place = (trajectory, at)
        self.calls[call_suffix(step.step_suffix)] = trajectory
        self.opened[trajectory] = None
        self.failed += ended_badly(step)
        for lookup in _lookups(step):
            self.matches.setdefault(lookup, StepMatches()).add(place, step.offset)
        if step.response and step.end_hash is not None:
            for reply in {None, step.reply_hash}:
                self.prefixes.setdefault(reply, PrefixIndex()).add(place, step, step.end_hash)

    def close(self, trajectory: str, steps: Sequence[OpenStep]) -> None:
        """Remove a closed trajectory."""
        self.opened.pop(trajectory, None)
        for at, step in enumerate(steps):
            place = (trajectory, at)
            self.failed -= ended_badly(step)
            for lookup in _lookups(step):
                self.matches[lookup].remove(place)
                if not self.matches[lookup].offsets:
                    del self.matches[lookup]
            if step.response and step.end_hash is not None:
                for reply in {None, step.reply_hash}:
                    self.prefixes[reply].remove(place, step, step.end_hash)
                    if not self.prefixes[reply].lengths:
                        del self.prefixes[reply]

    def forget(self, by_suffix: Iterable[str]) -> None:
        """Remove the calls of an evicted trajectory."""
        for step_suffix in by_suffix:
            self.calls.pop(call_suffix(step_suffix), None)

    def __bool__(self) -> bool:
        return bool(self.calls or self.opened)


class Placement(NamedTuple):
    """Where a step belongs.

    Attributes:
        trajectory: None for a new trajectory.
        after: Position of the step that it continues.
        reply_hash, messages_hash, call_id_hash, exchange_hash, words: See `OpenStep`.
    """

    trajectory: str | None
    after: int | None
    reply_hash: int | None = None
    messages_hash: int | None = None
    call_id_hash: int | None = None
    exchange_hash: int | None = None
    words: bytes | None = None


EXPLICIT = Placement(None, None)
"""Placement of a step whose request names its trajectory."""


def place_step(
    index: SessionIndex,
    steps_of: StepsOf,
    step_suffix: str,
    step: Step,
    recorded: RecordedRequest,
) -> Placement:
    """Assign a step to a trajectory of its anonymous session.

    Args:
        steps_of: Returns the steps of an open trajectory.
        recorded: The step's request.
    """
    request, reply = conversation_of(recorded), reply_of(step.response_json)
    previous, reply_hash = reply_hashes(request.turns, reply)
    begins = Placement(
        None, None, reply_hash, request.messages, call_id_of(reply),
        exchange_hash(request.messages, reply), words_of(reply) if reply is not None else None,
    )  # fmt: skip
    if (known := index.calls.get(call_suffix(step_suffix))) is not None:
        return begins._replace(trajectory=known)
    if (retried := _retried_trajectory(index, steps_of, step, recorded)) is not None:
        return begins._replace(trajectory=retried)
    if request.turns == []:
        return begins
    place = _continued(index, steps_of, request, previous, step.prompt_token_ids)
    return begins if place is None else begins._replace(trajectory=place[0], after=place[1])


def _continued(
    index: SessionIndex,
    steps_of: StepsOf,
    request: Conversation,
    previous: int | None,
    prompt: bytes | None,
) -> StepPosition | None:
    """Return the step that a request continues, by rules 4 to 8.

    Args:
        previous: Hash of the last reply in its history.
        prompt: Its token ids.
    """

    def by_tokens(reply: int | None) -> StepMatches | None:
        ends = index.prefixes.get(reply)
        return ends.longest(prompt) if prompt is not None and ends is not None else None

    linked = index.matches.get(("reply", previous)) if previous is not None else None
    if linked is not None and (found := by_tokens(previous)) is not None:
        return found.best(steps_of)
    before = request.prefixes[-1] if request.prefixes else None
    asked = index.matches.get(("messages", before)) if before is not None else None
    if asked is not None and request.turns:
        turn = request.turns[-1]
        exchange = exchange_hash(before, turn)
        if exchange is not None and (found := index.matches.get(("exchange", exchange))):
            return found.best(steps_of)
        if (like := _most_like(asked, steps_of, turn)) is not None:
            return like
    if linked is not None:
        return linked.best(steps_of)
    if (found := by_tokens(None)) is not None:
        return found.best(steps_of)
    return _by_rewritten_reply(index, steps_of, request)


def _most_like(places: StepMatches, steps_of: StepsOf, turn: Turn) -> StepPosition | None:
    """Return the step whose reply is most like a turn; None if each has too few words in common.

    The product of both shares of `likeness` decides. By the first alone, a short reply would win
    whose few words are in the turn, too; by the second alone, one that is as long as a cut turn.
    """
    if len(places.offsets) > EXAMINED_MAX:
        return None
    words = words_of(turn)

    def rank(place: StepPosition) -> tuple[bool, float, bool, bool, int]:
        contained, alike = likeness(words, steps_of(place[0])[place[1]].words or b"")
        retried, continued, offset = _rank(place, steps_of)
        return contained < LIKE, -contained * alike, retried, continued, offset

    (differs, *_), place = min((rank(place), place) for place in places.offsets)
    return None if differs else place


def _by_rewritten_reply(
    index: SessionIndex, steps_of: StepsOf, request: Conversation
) -> StepPosition | None:
    """Return the step that a request continues if nothing of the reply is left in its history."""
    if not request.turns:
        return None
    for call_id in call_ids_in(request.turns[-1]):
        if (places := index.matches.get(("call id", call_id))) is not None:
            if len(places.offsets) == 1:
                return places.best(steps_of)
            break  # ids that are counted in each conversation: the messages must tell
    for prefix in reversed(request.prefixes):
        if (places := index.matches.get(("messages", prefix))) is not None:
            return _only(places, steps_of)
    return None


def _only(places: StepMatches, steps_of: StepsOf) -> StepPosition | None:
    """Return the only unclaimed step; None if several trajectories have one, or none has."""
    if len(places.offsets) > EXAMINED_MAX:
        return None
    unclaimed = [place for place in places.offsets if _rank(place, steps_of)[:2] == (False, False)]
    return (
        min(unclaimed, key=lambda place: places.offsets[place])
        if len({t for t, _ in unclaimed}) == 1
        else None
    )


def place_in_agent_session(session: SessionIndex, step_suffix: str) -> Placement:
    """Assign a step to the open trajectory of its agent's session. Sub-agents are branches of its
    tree.
    """
    return Placement(
        session.calls.get(call_suffix(step_suffix)) or next(iter(session.opened), None), None
    )


def _retried_trajectory(
    index: SessionIndex, steps_of: StepsOf, step: Step, recorded: RecordedRequest
) -> str | None:
    """Return the trajectory of the step that this step retries, by hash lookups only.

    Unlike `retries.retry_of`, this also matches steps that were retried before (a third attempt
    belongs there too) and ignores the client's retry count, which identifies no conversation.
    """
    by_key = idempotency_hash(step)
    length = len(step.prompt_token_ids or b"") // TOKEN_BYTES
    if by_key is not None and (found := index.matches.get(("idempotency", by_key))) is not None:
        same = [(t, i) for t, i in found.offsets if may_be_equal(steps_of(t)[i].prompt, length)]
        if same:
            return _first(same, steps_of)
    if not index.failed:
        return None
    hashes = [request_hash(recorded)]
    if step.prompt_token_ids is not None and step.response_token_ids is not None:
        hashes.insert(0, hash_of(step.prompt_token_ids))
    failed = (index.matches.get(("failed prompt", prompt_hash)) for prompt_hash in hashes)
    places = [
        (t, i)
        for found in failed
        if found is not None
        for t, i in found.offsets
        if steps_of(t)[i].retried is None
    ]
    return _first(places, steps_of) if places else None


def _first(places: Sequence[StepPosition], steps_of: StepsOf) -> str:
    """Return the trajectory of the first step on the log. Index order is not used: it differs after
    a snapshot.
    """
    return min(places, key=lambda p: steps_of(p[0])[p[1]].offset)[0]
