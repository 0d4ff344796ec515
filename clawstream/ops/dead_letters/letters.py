"""What lies on `claw.dead-letters`: which records, why, and what became of them.

A dead letter is a record at its original place (topic id, partition, offset), however often and by whoever it was buried: a process that
was killed buries again what it had buried. It is open until a `DeadLetterResolved` names its place. Only what one chooses by is kept in
memory; the bytes are read again when they are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.kafka import Cluster, Record
from runtime.topics.records import Decoder
from schemas.codec.single_object import Event
from schemas.errors import Undecodable, UnknownSchema
from schemas.ids import RUN_ID
from schemas.records import DeadLetter, DeadLetterResolved
from schemas.topics import Topics
from stream_jobs.assemble.payload.input_log import InputLog
from stream_jobs.errors import StreamJobError

DETAIL_CHARS = 200
"""Of the detail, in a list."""
Decode = Callable[[bytes | None], Event]


class DeadLetterError(StreamJobError):
    """Root of what can't be done about a dead letter."""


class NoSuchLetter(DeadLetterError):
    """No dead letter has that id; or several have, and the message says by which ids to tell them apart."""


class Spot(NamedTuple):
    """Where the original record lies, or lay: that makes a dead letter one and the same."""

    topic: str
    topic_id: str
    partition: int
    offset: int

    @property
    def short(self) -> str:
        """As one types it. Another topic of the same name may have the same."""
        return f"{self.topic}-{self.partition}-{self.offset}"

    @property
    def full(self) -> str:
        return f"{self.short}@{self.topic_id}"


class Burial(NamedTuple):
    """One time that it was buried. at: offset on `claw.dead-letters`. detail: its first line, cut. created_at: microseconds."""

    at: int
    process: str
    reason: str
    detail: str
    created_at: int


@dataclass(slots=True)
class Letter:
    """A dead letter, without its bytes. kind: name of the record in it; run: whose it is; None: can't be told.

    size: bytes of the value; None: there is none, or it did not fit and is at its place only. timestamp_ms: the original's.
    """

    spot: Spot
    key: bytes | None
    size: int | None
    timestamp_ms: int
    kind: str | None
    run: str | None
    burials: list[Burial] = field(default_factory=list)
    resolutions: list[DeadLetterResolved] = field(default_factory=list)

    @property
    def reason(self) -> str:
        return self.burials[0].reason

    @property
    def at(self) -> int:
        """Where it lies on `claw.dead-letters`, the first time."""
        return self.burials[0].at

    @property
    def state(self) -> str:
        """open, or what was done last: replayed, repaired, dismissed."""
        return self.resolutions[-1].action if self.resolutions else "open"


def letters_in(
    records: Iterable[tuple[int, Event]], decode: Decode, topics: Topics
) -> dict[Spot, Letter]:
    """The dead letters of a log of (offset, record), in the order in which they were buried first. Raises nothing for what is poison."""
    found: dict[Spot, Letter] = {}
    early: dict[Spot, list[DeadLetterResolved]] = {}
    for at, event in records:
        match event:
            case DeadLetter():
                spot = Spot(event.topic, event.topic_id, event.partition, event.offset)
                if spot not in found:
                    found[spot] = _letter(spot, event, decode, topics)
                first = event.detail.strip().partition("\n")[0][:DETAIL_CHARS]
                found[spot].burials.append(
                    Burial(at, event.process, event.reason, first, event.created_at)
                )
            case DeadLetterResolved():
                spot = Spot(event.topic, event.topic_id, event.partition, event.offset)
                (found[spot].resolutions if spot in found else early.setdefault(spot, [])).append(
                    event
                )
    for spot, resolutions in early.items():
        if spot in found:
            found[spot].resolutions[:0] = resolutions
    return found


def _letter(spot: Spot, letter: DeadLetter, decode: Decode, topics: Topics) -> Letter:
    event: Event | None = None
    with suppress(Undecodable, UnknownSchema):
        event = decode(letter.value)
    run = getattr(event, "run_id", None) or _run_of_topic(spot.topic, letter.key, topics)
    kind = type(event).__name__ if event is not None else None
    size = len(letter.value) if letter.value is not None else None
    return Letter(spot, letter.key, size, letter.timestamp_ms, kind, run)


def _run_of_topic(topic: str, key: bytes | None, topics: Topics) -> str | None:
    """The run of a record that can't be read: there are topics that tell it."""
    named = topics.parse_ready_batches(topic)
    if named is not None:
        return named[0]
    text = (key or b"").decode("ascii", "replace")
    return text if topic == topics.candidates and RUN_ID.fullmatch(text) else None


def read_letters(cluster: Cluster, decoder: Decoder, topics: Topics) -> dict[Spot, Letter]:
    """All dead letters there are, those behind another producer's open transaction too. Raises Unavailable."""
    if topics.dead_letters not in cluster.topics(topics.dead_letters):
        return {}

    def events() -> Iterator[tuple[int, Event]]:
        for record in cluster.read_all(topics.dead_letters, await_open=True):
            with suppress(
                Undecodable, UnknownSchema
            ):  # poison among the dead letters: the lake has buried it here
                yield record.offset, decoder.decode(record.value)

    return letters_in(events(), decoder.decode, topics)


# -- choosing


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters: what is None does not matter. topic: with or without the prefix. since: microseconds, of the first burial."""

    topic: str | None = None
    process: str | None = None
    reason: str | None = None
    run: str | None = None
    since: int | None = None
    resolved: bool = False
    """Those too that something was done about."""

    def takes(self, letter: Letter, topics: Topics) -> bool:
        named = self.topic is None or self.topic in (
            letter.spot.topic,
            letter.spot.topic.removeprefix(topics.prefix + "."),
        )
        return (
            named
            and (self.resolved or not letter.resolutions)
            and (self.run is None or self.run == letter.run)
            and any(self._takes_burial(b) for b in letter.burials)
        )

    def _takes_burial(self, burial: Burial) -> bool:
        return (
            (self.process is None or self.process == burial.process)
            and (self.reason is None or self.reason == burial.reason)
            and (self.since is None or self.since <= burial.created_at)
        )


def letter_of(letters: Mapping[Spot, Letter], name: str) -> Letter:
    """The letter of an id, short or full. Raises NoSuchLetter."""
    found = [s for s in letters if name in (s.short, s.full)]
    if len(found) > 1:
        raise NoSuchLetter(
            f"{name} was buried in {len(found)} topics of that name: {', '.join(s.full for s in found)}"
        )
    if not found:
        raise NoSuchLetter(f"no dead letter {name}: `clawstream dlq list --all` has them all")
    return letters[found[0]]


# -- the records themselves


@dataclass(frozen=True, slots=True)
class Original:
    """The record as it was. detail: in full, with the traceback. headers: None when they are gone with its log."""

    letter: Letter
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] | None
    detail: str


def originals(
    cluster: Cluster, decoder: Decoder, topics: Topics, letters: Sequence[Letter]
) -> Iterator[Original]:
    """The records of some letters, in the order in which they were buried.

    Key and value are in the dead letter. Headers, and what was too large for one, are read at the original place if it still has them.
    """
    inside = {letter.at: letter for letter in letters}
    said = InputLog(cluster, decoder, topics.dead_letters, 0)
    at_place = _at_their_places(cluster, decoder, topics, letters)
    for record in said.records(sorted(inside)):
        letter, event = inside[record.offset], decoder.decode(record.value)
        there = at_place.get(letter.spot)
        key, value = event.key, event.value
        if there is not None:
            key, value = there.key if key is None else key, there.value if value is None else value
        yield Original(
            letter, key, value, there.headers if there is not None else None, event.detail
        )


def _at_their_places(
    cluster: Cluster, decoder: Decoder, topics: Topics, letters: Sequence[Letter]
) -> dict[Spot, Record]:
    """The records that must be looked at where they lie, as far as they do."""
    wanted: dict[tuple[str, int], list[Spot]] = {}
    ids = cluster.topic_ids(sorted({letter.spot.topic for letter in letters}))
    for letter in letters:
        spot = letter.spot
        if ids.get(spot.topic) == spot.topic_id and (
            letter.size is None or spot.topic == topics.candidates
        ):
            wanted.setdefault((spot.topic, spot.partition), []).append(spot)
    found = {}
    for (topic, partition), spots in wanted.items():
        log = InputLog(cluster, decoder, topic, partition)
        for record in log.records(sorted(s.offset for s in spots)):
            found[Spot(topic, ids[topic], partition, record.offset)] = record
    return found
