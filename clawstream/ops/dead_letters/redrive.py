"""Dead letters are sent again: as they were, when what was wrong lay elsewhere, or repaired.

1. `Office` begins a transactional producer: whoever did the same before is fenced, and what it had left open is given up.
2. Then it reads the dead letters to their end: a letter that was resolved is not sent a second time, unless that is forced.
3. The record, and the `DeadLetterResolved` that says where it landed, are one transaction: readers see both or none.

So a command that is killed anywhere and run again sends what is left, each record once. The record carries the header `replays`, by which the
lake looks it up in all of a table and not only in its window of newest ids: what it has already is not written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clawstream.ops.dead_letters.letters import (
    DeadLetterError,
    Letter,
    Original,
    Spot,
    originals,
    read_letters,
)
from runtime.kafka import Ack
from runtime.topics.records import Decoder, cluster_of, now_micros
from runtime.user import whoami
from schemas.codec.record_json import from_json, to_json
from schemas.codec.single_object import Event
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import (
    AdmissionPolicy,
    Candidate,
    DeadLetterResolved,
    FailedCall,
    SchemaPublished,
)
from schemas.settings import Settings
from schemas.topics import REPLAYS, Topics
from stream_jobs.admit.main import place_of
from stream_jobs.admit.policy import flaw_of_policy
from stream_jobs.assemble import state as op
from stream_jobs.assemble.fold import Fold
from stream_jobs.assemble.job import limits_of
from stream_jobs.assemble.model import REWARDS, STEPS
from stream_jobs.assemble.state import Assembly

TRANSACTION_MS = 10_000
"""One that a killed command leaves open hides what comes behind it from every reader for so long, and no longer."""
SLICE_LETTERS = 200
SLICE_BYTES = 16 << 20
"""Of one transaction."""


class NotSendable(DeadLetterError):
    """The record would be buried again, or must not be sent by anyone but its writer. The message says why."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of one letter. why_not: None when it was sent, or dismissed."""

    letter: Letter
    action: str
    place: Ack | None = None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class _Post:
    """A record to be sent, with the resolution that goes with it."""

    original: Original
    action: str
    key: bytes | None
    value: bytes


# -- what may be sent


def key_of(event: Event) -> bytes:
    """The Kafka key that a record of ours has."""
    if isinstance(event, SchemaPublished):
        return event.fingerprint.encode()
    if isinstance(event, FailedCall) and event.trajectory_key is None:
        return event.event_id.encode()
    key: str = (
        event.trajectory_key
        if hasattr(event, "trajectory_key") and not isinstance(event, Candidate)
        else event.run_id
    )
    return key.encode()


def check_topic(topics: Topics, topic: str) -> None:
    """Raises NotSendable for a topic on which a second copy, or one of another writer, would do harm."""
    if topic not in (
        topics.steps,
        topics.rewards,
        topics.trajectories,
        topics.candidates,
        topics.schemas,
    ):
        raise NotSendable(
            f"only its own writer may write to {topic}: a record sent again there would be out of its sequence. Dismiss it"
        )


def check(
    settings: Settings,
    topic: str,
    key: bytes | None,
    event: Event,
    headers: Mapping[str, bytes] | None,
) -> None:
    """Raises NotSendable for a record that the topic's owner would bury again, as far as the record itself tells that."""
    topics, name = settings.kafka.topics, type(event).__name__
    spec = next(s for s in topics.specs(1, -1) if s.name == topic)
    if type(event) not in spec.records:
        raise NotSendable(f"a {name} does not belong on {topic}")
    if key != key_of(event):
        raise NotSendable(f"Kafka key {key!r:.250} is not {key_of(event)!r:.250}: repair it")
    if topic in (topics.steps, topics.rewards):
        _check_fold(settings, STEPS if topic == topics.steps else REWARDS, key, event)
    if isinstance(event, AdmissionPolicy) and (flaw := flaw_of_policy(event, None)) is not None:
        raise NotSendable(flaw)
    if isinstance(event, Candidate):
        if headers is None:
            raise NotSendable(
                "where its payload lies was in its headers, and they are gone with its log. Dismiss it"
            )
        try:
            place_of(headers)
        except ValueError as e:
            raise NotSendable(str(e)) from e


def _check_fold(settings: Settings, source: int, key: bytes | None, event: Event) -> None:
    """Let assemble's own fold judge it, on an empty partition."""
    fold = Fold(Assembly(), limits_of(settings))
    fold.record(STEPS if source == STEPS else REWARDS, 0, 0, key, event)
    for entry in fold.seal():
        if entry[0] == op.BURIED:
            raise NotSendable(str(entry[4]))


# -- the office


class Office:
    """The one that acts on dead letters. Making it fences any other, which then fails with Fenced at its next write."""

    def __init__(self, settings: Settings, by: str | None = None) -> None:
        self._settings, self._topics, self._by = settings, settings.kafka.topics, by or whoami()
        self._cluster = cluster_of(settings)
        self.decoder = Decoder(self._cluster, self._topics.schemas)
        self._producer = self._cluster.producer(
            f"{self._topics.prefix}-dead-letters", transaction_timeout_ms=TRANSACTION_MS
        )
        self._ids: dict[str, str] = {}
        self.letters: dict[Spot, Letter] = read_letters(self._cluster, self.decoder, self._topics)

    def __enter__(self) -> Office:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    def original(self, letter: Letter) -> Original:
        """The record of a letter."""
        return next(originals(self._cluster, self.decoder, self._topics, [letter]))

    def replay(
        self, letters: Sequence[Letter], force: bool = False, note: str | None = None
    ) -> Iterator[Sent]:
        """Send records again as they were, in the order in which they were buried. One result each, once it is durable.

        force: also what was resolved before, and what would be buried again.
        """
        for some in _slices(sorted(letters, key=lambda x: x.at)):
            posts, refused = list[_Post](), list[Sent]()
            for original in originals(self._cluster, self.decoder, self._topics, some):
                try:
                    posts.append(self._as_it_was(original, force))
                except NotSendable as e:
                    refused.append(Sent(original.letter, "replayed", why_not=str(e)))
            yield from refused
            yield from self._send(posts, note)

    def _as_it_was(self, original: Original, force: bool) -> _Post:
        """Raises NotSendable."""
        letter, topic = original.letter, original.letter.spot.topic
        check_topic(self._topics, topic)
        self._topic_id(topic)
        if original.value is None:
            raise NotSendable("it has no value, so there is nothing to send. Dismiss it")
        if not force:
            _check_open(letter)
            try:
                event = self.decoder.decode(original.value)
            except (Undecodable, UnknownSchema) as e:
                raise NotSendable(f"still {e}") from e
            check(self._settings, topic, original.key, event, original.headers)
        return _Post(original, "replayed", original.key, original.value)

    def repair(
        self,
        letter: Letter,
        name: str,
        said: Mapping[str, object],
        force: bool = False,
        note: str | None = None,
    ) -> Sent:
        """Send the record `name` with the fields `said` in its place, under the key that belongs to it. Raises NotSendable, NotARecord.

        What looks in `said` as it was keeps its very bytes.
        """
        check_topic(self._topics, letter.spot.topic)
        if not force:
            _check_open(letter)
        original = self.original(letter)
        event = from_json(self.decoder.codec, name, said, self.event_of(original))
        key, value = key_of(event), self.decoder.codec.encode(event)
        check(self._settings, letter.spot.topic, key, event, original.headers)
        if not force and (key, event) == (original.key, self.event_of(original)):
            raise NotSendable(
                f"nothing is changed: `clawstream dlq replay {letter.spot.short}` sends it as it was"
            )
        (sent,) = self._send([_Post(original, "repaired", key, value)], note)
        return sent

    def dismiss(self, letters: Sequence[Letter], note: str | None = None) -> Iterator[Sent]:
        """Say that nothing is to be done about them. What was resolved before stays as it is."""
        for some in _slices(letters):
            todo = [letter for letter in some if not letter.resolutions]
            asyncio.run(
                self._transact(
                    [], [(x, self._resolution(x, "dismissed", None, note)) for x in todo]
                )
            )
            for letter in some:
                yield Sent(letter, "dismissed", why_not=None if letter in todo else _done(letter))

    def event_of(self, original: Original) -> Event | None:
        """What the record says; None when it can't be read."""
        try:
            return self.decoder.decode(original.value)
        except (Undecodable, UnknownSchema):
            return None

    # -- writing

    def _send(self, posts: Sequence[_Post], note: str | None) -> list[Sent]:
        if not posts:
            return []
        places = asyncio.run(self._transact(posts, [], note))
        return [
            Sent(p.original.letter, p.action, place) for p, place in zip(posts, places, strict=True)
        ]

    async def _transact(
        self,
        posts: Sequence[_Post],
        resolved: Sequence[tuple[Letter, DeadLetterResolved]],
        note: str | None = None,
    ) -> list[Ack]:
        """One transaction: the records, then what became of their letters, with the places where they are now."""
        send, encode, mine = (
            self._producer.send_soon,
            self.decoder.codec.encode,
            self._topics.dead_letters,
        )
        done = list(resolved)
        with self._producer.transaction():
            places = await asyncio.gather(
                *(
                    send(p.original.letter.spot.topic, p.key, p.value, _headers(p.original))
                    for p in posts
                )
            )
            for post, place in zip(posts, places, strict=True):
                letter = post.original.letter
                done.append((letter, self._resolution(letter, post.action, place, note)))
            await asyncio.gather(
                *(send(mine, letter.key, encode(resolution)) for letter, resolution in done)
            )
        for letter, resolution in done:
            letter.resolutions.append(resolution)
        return list(places)

    def _topic_id(self, topic: str) -> str:
        """Today's. Raises KafkaError when the topic is no more."""
        if topic not in self._ids:
            self._ids[topic] = self._cluster.topic_id(topic)
        return self._ids[topic]

    def _resolution(
        self, letter: Letter, action: str, place: Ack | None, note: str | None
    ) -> DeadLetterResolved:
        spot = letter.spot
        return DeadLetterResolved(
            topic=spot.topic,
            topic_id=spot.topic_id,
            partition=spot.partition,
            offset=spot.offset,
            action=action,
            sent_topic_id=self._topic_id(spot.topic) if place is not None else None,
            sent_partition=place.partition if place is not None else None,
            sent_offset=place.offset if place is not None else None,
            by=self._by,
            note=note,
            created_at=now_micros(),
        )


def _headers(original: Original) -> dict[str, bytes]:
    return {**(original.headers or {}), REPLAYS: original.letter.spot.full.encode()}


def _check_open(letter: Letter) -> None:
    if letter.resolutions:
        raise NotSendable(f"{_done(letter)}; --force does it again")


def _done(letter: Letter) -> str:
    last = letter.resolutions[-1]
    where = (
        f" to {last.topic}-{last.sent_partition}-{last.sent_offset}"
        if last.sent_offset is not None
        else ""
    )
    return f"it was {last.action}{where} by {last.by}"


def _slices(letters: Sequence[Letter]) -> Iterator[list[Letter]]:
    """In order, as many as fit into a transaction."""
    some, used = list[Letter](), 0
    for letter in letters:
        size = letter.size or SLICE_BYTES
        if some and (len(some) == SLICE_LETTERS or used + size > SLICE_BYTES):
            yield some
            some, used = [], 0
        some.append(letter)
        used += size
    if some:
        yield some


def editable(original: Original, event: Event | None) -> dict[str, object]:
    """What a person edits: the name of the record, and its fields. Both empty when it can't be read."""
    return {
        "type": type(event).__name__ if event is not None else "",
        "record": to_json(event) if event is not None else {},
    }
