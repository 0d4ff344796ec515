"""Anonymous buckets: calls that name no trajectory, and which trajectory of their bucket each belongs to. Pure.

A bucket is a trajectory key that all conversations share which begin with the same words of the same client: a thousand rollouts of
one task, side by side. A step goes, by the first rule that finds something,

1. to the trajectory that has its call already: another choice of it, or the record once more;
2. to that of the step whose retry it is: same idempotency key, or the identical prompt after a step that ended badly;
3. if the model has not said anything in its conversation yet: to a new trajectory. So rollouts of one prompt are never merged;
4. to that of the step whose reply is the model's last turn in its request (`turns`);
5. to that of the step whose prompt and response are the longest beginning of its prompt, token for token;
6. to that of the step whose tool call the model's last turn repeats as text, by the call's id;
7. to that of the only step whose request is the longest beginning of its messages, if nothing has gone on from that step yet;
8. to a new trajectory.

By 6 and 7 an agent is followed whose history repeats replies in another form. Several rollouts that asked the same are never told
apart by 7 alone: such a step begins a trajectory.

Where several steps fit (replies that are equal, word for word) the one counts whose tokens are the longest beginning of the prompt, then
one that nobody has gone on from, then the first on the log. Only open trajectories are looked at, except by rule 1. Whatever is
chosen, nothing is lost: a step in the wrong trajectory is a branch of its tree, counted as drift.

The session of a known agent is a bucket too, with one open trajectory at a time: nothing is split there but by time (`in_session`).

The index is derived from the steps and not stored: a new owner makes the same one from the state log.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from schemas.records import Step
from stream_jobs.assemble.matching.conversation import (
    Conversation,
    call_id_of,
    call_ids_in,
    conversation_of,
    reply_hashes,
    reply_of,
)
from stream_jobs.assemble.matching.retries import (
    ended_badly,
    idempotency_hash,
    may_be_equal,
    request_hash,
)
from stream_jobs.assemble.matching.token_prefix import hash_of, hashes_at
from stream_jobs.assemble.model import OpenStep, OpenSteps, call_suffix
from stream_jobs.assemble.payload.segment_tree import TOKEN_BYTES

StepPosition = tuple[str, int]
"""Trajectory id and position of a step in it."""
StepsOf = Callable[[str], OpenSteps]
FEW = 8
"""Steps that are looked at one by one."""
STALE_MAX = 64
"""Places in a heap that are gone, beside as many as are there: below it a heap is not worth making anew."""


@dataclass(slots=True)
class StepMatches:
    """Steps that fit a request equally well: thousands, when rollouts have said the same. offsets: of each; unclaimed: a heap of those that
    nobody has gone on from, and some that are taken or gone, which are noticed when they come to its top. Neither ever reverses: a
    step that no longer counts as retried does so because the client has gone on from it.
    """

    offsets: dict[StepPosition, int] = field(default_factory=dict)
    unclaimed: list[tuple[int, StepPosition]] = field(default_factory=list, compare=False)

    def add(self, place: StepPosition, offset: int) -> None:
        """One more."""
        self.offsets[place] = offset
        heappush(self.unclaimed, (offset, place))

    def remove(self, place: StepPosition) -> None:
        """Of one that was added. The heap is made anew when most of it is gone: those that nobody asks for never come to its top."""
        del self.offsets[place]
        if len(self.unclaimed) > 2 * len(self.offsets) + STALE_MAX:
            self.unclaimed = [(offset, left) for left, offset in self.offsets.items()]
            heapify(self.unclaimed)

    def best(self, steps_of: StepsOf) -> StepPosition:
        """The one that counts: one that no retry has replaced, then one that nobody has gone on from, then the first on the log."""
        if len(self.offsets) == 1:
            return next(iter(self.offsets))
        while self.unclaimed:
            place = self.unclaimed[0][1]
            if place in self.offsets and _rank(place, steps_of)[:2] == (False, False):
                return place
            heappop(self.unclaimed)
        return min(self.offsets, key=lambda place: _rank(place, steps_of))


def _rank(place: StepPosition, steps_of: StepsOf) -> tuple[bool, bool, int]:
    """Whether a retry has replaced it, whether somebody has gone on from it, where it is on the log."""
    steps, at = steps_of(place[0]), place[1]
    return steps[at].retried is not None, bool(steps.continued[at]), steps[at].offset


@dataclass(slots=True)
class PrefixIndex:
    """Where steps end, by length of prompt and response in tokens, then by their hash. So a step costs one look a length, not a step."""

    by_length: dict[int, dict[int, StepMatches]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    def add(self, place: StepPosition, step: OpenStep) -> None:
        """A step that sampled something."""
        if step.response and step.end_hash is not None:
            if step.end not in self.by_length:
                insort(self.lengths, step.end)
            self.by_length.setdefault(step.end, {}).setdefault(step.end_hash, StepMatches()).add(
                place, step.offset
            )

    def remove(self, place: StepPosition, step: OpenStep) -> None:
        """Of a step that was added."""
        if step.response and step.end_hash is not None:
            by_hash = self.by_length[step.end]
            by_hash[step.end_hash].remove(place)
            if not by_hash[step.end_hash].offsets:
                del by_hash[step.end_hash]
            if not by_hash:
                del self.by_length[step.end]
                self.lengths.remove(step.end)

    def longest(self, prompt: bytes) -> StepMatches | None:
        """The steps whose prompt and response are the longest beginning of a prompt; None: there are none."""
        for length, hashed in reversed(hashes_at(prompt, self.lengths)[0]):
            if found := self.by_length[length].get(hashed):
                return found
        return None


@dataclass(slots=True)
class ReplyMatches:
    """The steps that one link leads to, all and by where they end."""

    matches: StepMatches = field(default_factory=StepMatches)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)


@dataclass(slots=True)
class SessionIndex:
    """What is known of one index. calls: call to trajectory id, closed ones too. opened: ids. reply_index: steps by what a request shows that goes on
    from them; evidence: places by what shows that a call is a retry of them; ends: where steps end; messages, call_ids: steps by
    what `OpenStep` has under these names. All of open trajectories.
    """

    calls: dict[str, str] = field(default_factory=dict)
    opened: dict[str, None] = field(default_factory=dict)
    reply_index: dict[int, ReplyMatches] = field(default_factory=dict)
    evidence: dict[int, dict[StepPosition, None]] = field(default_factory=dict)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    by_messages: dict[int, StepMatches] = field(default_factory=dict)
    by_call_id: dict[int, StepMatches] = field(default_factory=dict)
    failed: int = 0

    def add(self, trajectory: str, at: int, step: OpenStep) -> None:
        """A step of an open trajectory."""
        self.calls[call_suffix(step.step_suffix)] = trajectory
        self.opened[trajectory] = None
        self.failed += ended_badly(step)
        for number in _evidence(step):
            self.evidence.setdefault(number, {})[trajectory, at] = None
        if step.reply_hash is not None:
            linked = self.reply_index.setdefault(step.reply_hash, ReplyMatches())
            linked.matches.add((trajectory, at), step.offset)
            linked.prefixes.add((trajectory, at), step)
        self.prefixes.add((trajectory, at), step)
        for places, key in self._forms(step):
            places.setdefault(key, StepMatches()).add((trajectory, at), step.offset)

    def _forms(self, step: OpenStep) -> Iterator[tuple[dict[int, StepMatches], int]]:
        """What finds a step whose reply comes back in another form."""
        if step.messages_hash is not None:
            yield self.by_messages, step.messages_hash
        if step.call_id_hash is not None:
            yield self.by_call_id, step.call_id_hash

    def close(self, trajectory: str, steps: Sequence[OpenStep]) -> None:
        """Nothing goes on there any more."""
        self.opened.pop(trajectory, None)
        for at, step in enumerate(steps):
            self.failed -= ended_badly(step)
            for number in _evidence(step):
                _remove_evidence(self.evidence, number, (trajectory, at))
            if step.reply_hash is not None:
                linked = self.reply_index[step.reply_hash]
                linked.matches.remove((trajectory, at))
                linked.prefixes.remove((trajectory, at), step)
                if not linked.matches.offsets:
                    del self.reply_index[step.reply_hash]
            self.prefixes.remove((trajectory, at), step)
            for places, key in self._forms(step):
                places[key].remove((trajectory, at))
                if not places[key].offsets:
                    del places[key]

    def forget(self, by_suffix: Iterable[str]) -> None:
        """Steps of a closed trajectory that is remembered no more."""
        for step_suffix in by_suffix:
            self.calls.pop(call_suffix(step_suffix), None)

    def __bool__(self) -> bool:
        return bool(self.calls or self.opened)


class Placement(NamedTuple):
    """Where a step belongs.

    Attributes:
        trajectory: None: it begins one.
        after: Position of the step it goes on from.
        leads, messages, call_id: As in `OpenStep`.
    """

    trajectory: str | None
    after: int | None
    reply_hash: int | None = None
    messages_hash: int | None = None
    call_id_hash: int | None = None


EXPLICIT = Placement(None, None)
"""Of a step whose request names its trajectory."""


def place_step(index: SessionIndex, steps_of: StepsOf, step_suffix: str, step: Step) -> Placement:
    """Where in its bucket a step belongs. steps_of: gives those of an open trajectory."""
    asked, reply = conversation_of(step.request_json), reply_of(step.response_json)
    shown, reply_hash = reply_hashes(asked.turns, reply)
    begins = Placement(None, None, reply_hash, asked.messages, call_id_of(reply))
    if (known := index.calls.get(call_suffix(step_suffix))) is not None:
        return begins._replace(trajectory=known)
    if (retried := _retried_trajectory(index, steps_of, step)) is not None:
        return begins._replace(trajectory=retried)
    if asked.turns == []:
        return begins
    prompt = step.prompt_token_ids
    linked = index.reply_index.get(shown) if shown is not None else None
    ends = linked.prefixes if linked is not None else index.prefixes
    places = ends.longest(prompt) if prompt is not None else None
    if places is None and linked is not None:
        places = linked.matches
    place = (
        places.best(steps_of) if places is not None else _by_rewritten_reply(index, steps_of, asked)
    )
    return begins if place is None else begins._replace(trajectory=place[0], after=place[1])


def _by_rewritten_reply(
    index: SessionIndex, steps_of: StepsOf, asked: Conversation
) -> StepPosition | None:
    """The step that a request goes on from, whose history repeats the reply in another form."""
    if not asked.turns:
        return None
    for call_id in call_ids_in(asked.turns[-1]):
        if (places := index.by_call_id.get(call_id)) is not None:
            if len(places.offsets) == 1:
                return places.best(steps_of)
            break  # ids that are counted in each conversation: the messages must tell
    for prefix in reversed(asked.prefixes):
        if (places := index.by_messages.get(prefix)) is not None:
            return _only(places, steps_of)
    return None


def _only(places: StepMatches, steps_of: StepsOf) -> StepPosition | None:
    """The step of the only trajectory in which nothing has gone on from it; None when there are several, or none."""
    if len(places.offsets) > FEW:
        return None
    unclaimed = [place for place in places.offsets if _rank(place, steps_of)[:2] == (False, False)]
    return (
        min(unclaimed, key=lambda place: places.offsets[place])
        if len({t for t, _ in unclaimed}) == 1
        else None
    )


def place_in_agent_session(session: SessionIndex, step_suffix: str) -> Placement:
    """Where in its agent's session a step belongs: to the open trajectory, whatever it says. Sub-agents are branches of its tree."""
    return Placement(
        session.calls.get(call_suffix(step_suffix)) or next(iter(session.opened), None), None
    )


def _remove_evidence(
    places: dict[int, dict[StepPosition, None]], number: int, place: StepPosition
) -> None:
    """A place is no longer led to by a number. It may be led to twice: equal numbers of one step."""
    left = places.get(number, {})
    left.pop(place, None)
    if not left:
        places.pop(number, None)


def _evidence(step: OpenStep) -> list[int]:
    numbers = [step.idempotency_hash, step.prompt_hash if ended_badly(step) else None]
    return [n for n in numbers if n is not None]


def _retried_trajectory(index: SessionIndex, steps_of: StepsOf, step: Step) -> str | None:
    """The trajectory of the step whose retry this is, by looking numbers up: a bucket may have thousands of steps.

    Not `retries.retry_of`, which then decides in that trajectory which step it is: here one that was retried before counts too, for a
    third try belongs there as well, and what the client says of its tries doesn't, for that names no conversation.
    """
    by_key = idempotency_hash(step)
    length = len(step.prompt_token_ids or b"") // TOKEN_BYTES
    same = [
        (t, i) for t, i in (index.evidence.get(by_key, ()) if by_key is not None else ())
        if may_be_equal(steps_of(t)[i].prompt, length)
    ]  # fmt: skip
    if same:
        return _first(same, steps_of)
    if not index.failed:
        return None
    asked = [request_hash(step)]
    if step.prompt_token_ids is not None and step.response_token_ids is not None:
        asked.insert(0, hash_of(step.prompt_token_ids))
    places = [
        (t, i) for number in asked for t, i in index.evidence.get(number, ())
        if ended_badly(steps_of(t)[i]) and steps_of(t)[i].retried is None and steps_of(t)[i].prompt_hash == number
    ]  # fmt: skip
    return _first(places, steps_of) if places else None


def _first(places: Sequence[StepPosition], steps_of: StepsOf) -> str:
    """The trajectory of the first of some steps on the log. Not of the first that is led to: that order is another after a snapshot."""
    return min(places, key=lambda p: steps_of(p[0])[p[1]].offset)[0]
