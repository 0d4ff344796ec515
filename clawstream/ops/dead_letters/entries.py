"""Read `claw.dead-letters`: the records, the reasons and the resolutions.

A dead letter is identified by the position of its original record (topic id, partition, offset),
however often it was written: a process that was killed writes it again. It is open until a
`DeadLetterResolved` names its position. Only the fields to filter by are kept in memory; the bytes
are read again on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from clawstream.runtime.kafka import Record
from clawstream.runtime.topics.records import Decoder, cluster_of
from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.ids import RUN_ID
from clawstream.schemas.records import DeadLetter, DeadLetterResolved
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics
from clawstream.stream_jobs.assemble.payload.input_log import InputLog
from clawstream.stream_jobs.errors import StreamJobError

DETAIL_CHARS = 200
"""Maximum length of the detail in an entry."""
Decode = Callable[[bytes | None], Event]


class DeadLetterError(StreamJobError):
    """Root of the errors of commands on dead letters."""


class NoSuchEntry(DeadLetterError):
    """No dead letter has that id, or several have; the message lists unambiguous ids."""


class RecordId(NamedTuple):
    """Position of the original record: the identity of a dead letter."""

    topic: str
    topic_id: str
    partition: int
    offset: int

    @property
    def short(self) -> str:
        """Id without the topic id: not unique after a topic was recreated."""
        return f"{self.topic}-{self.partition}-{self.offset}"

    @property
    def full(self) -> str:
        return f"{self.short}@{self.topic_id}"


class Occurrence(NamedTuple):
    """One dead letter record of an entry.

    at: Offset on `claw.dead-letters`. detail: Its first line, truncated. created_at: Microseconds.
    """

    at: int
    process: str
    reason: str
    detail: str
    created_at: int


@dataclass(slots=True)
class DeadLetterEntry:
    """A dead letter without its bytes.

    kind, run: Type and run of the record, None if unknown. size: Bytes of the value; None without a
    value, or when it is only at the original position. timestamp_ms: Of the original record.
    """

    record_id: RecordId
    key: bytes | None
    size: int | None
    timestamp_ms: int
    kind: str | None
    run: str | None
    occurrences: list[Occurrence] = field(default_factory=list)
    resolutions: list[DeadLetterResolved] = field(default_factory=list)

    @property
    def reason(self) -> str:
        return self.occurrences[0].reason

    @property
    def at(self) -> int:
        """Offset of the first occurrence on `claw.dead-letters`."""
        return self.occurrences[0].at

    @property
    def state(self) -> str:
        """open, or the last action: replayed, repaired, dismissed."""
        return self.resolutions[-1].action if self.resolutions else "open"


def entries_in(
    records: Iterable[tuple[int, Event]], decode: Decode, topics: Topics
) -> dict[RecordId, DeadLetterEntry]:
    """Collect the dead letters of a log of (offset, record), in log order.

    Skips unreadable ones.
    """
    found: dict[RecordId, DeadLetterEntry] = {}
    early: dict[RecordId, list[DeadLetterResolved]] = {}
    for at, event in records:
        match event:
            case DeadLetter():
                record_id = RecordId(event.topic, event.topic_id, event.partition, event.offset)
                if record_id not in found:
                    found[record_id] = _entry(record_id, event, decode, topics)
                first = event.detail.strip().partition("\n")[0][:DETAIL_CHARS]
                found[record_id].occurrences.append(
                    Occurrence(at, event.process, event.reason, first, event.created_at)
                )
            case DeadLetterResolved():
                record_id = RecordId(event.topic, event.topic_id, event.partition, event.offset)
                known = found.get(record_id)
                (early.setdefault(record_id, []) if known is None else known.resolutions).append(
                    event
                )
    for record_id, resolutions in early.items():
        if record_id in found:
            found[record_id].resolutions[:0] = resolutions
    return found


def _entry(
    record_id: RecordId, entry: DeadLetter, decode: Decode, topics: Topics
) -> DeadLetterEntry:
    event: Event | None = None
    with suppress(Undecodable, UnknownSchema):
        event = decode(entry.value)
    run = getattr(event, "run_id", None) or _run_of_topic(record_id.topic, entry.key, topics)
    kind = type(event).__name__ if event is not None else None
    size = len(entry.value) if entry.value is not None else None
    return DeadLetterEntry(record_id, entry.key, size, entry.timestamp_ms, kind, run)


def _run_of_topic(topic: str, key: bytes | None, topics: Topics) -> str | None:
    """Return the run of an unreadable record, which some topics name themselves or in the key."""
    if (named := topics.parse_ready_batches(topic)) is not None:
        return named[0]
    text = (key or b"").decode("ascii", "replace")
    return text if topic == topics.candidates and RUN_ID.fullmatch(text) else None


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Selects entries; None matches everything.

    topic: With or without the prefix. reason: Of any occurrence.
    """

    topic: str | None = None
    reason: str | None = None
    run: str | None = None
    resolved: bool = False
    """Whether it matches resolved entries too."""

    def matches(self, entry: DeadLetterEntry, topics: Topics) -> bool:
        named = self.topic is None or self.topic in (
            entry.record_id.topic,
            entry.record_id.topic.removeprefix(topics.prefix + "."),
        )
        return (
            named
            and (self.resolved or not entry.resolutions)
            and (self.run is None or self.run == entry.run)
            and (self.reason is None or any(self.reason == o.reason for o in entry.occurrences))
        )


@dataclass(frozen=True, slots=True)
class Original:
    """The original record.

    detail: In full, with the traceback. headers: None when the original log no longer has them.
    """

    entry: DeadLetterEntry
    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] | None
    detail: str


class DeadLetterLog:
    """All dead letters of an installation, those behind an open transaction included.

    entries: By the position of their original record, in log order.
    """

    def __init__(self, settings: Settings) -> None:
        """Read the topic. Raises Unavailable."""
        self.cluster, self.topics = cluster_of(settings), settings.kafka.topics
        self.decoder = Decoder(self.cluster, self.topics.schemas)
        self.entries = entries_in(self._events(), self.decoder.decode, self.topics)

    def _events(self) -> Iterator[tuple[int, Event]]:
        topic = self.topics.dead_letters
        if topic in self.cluster.topics(topic):
            for record in self.cluster.read_all(topic, await_open=True):
                # The lake writes a dead letter for an unreadable one.
                with suppress(Undecodable, UnknownSchema):
                    yield record.offset, self.decoder.decode(record.value)

    def matching(self, chosen: EntryFilter) -> list[DeadLetterEntry]:
        """Return the entries that a filter matches."""
        return [x for x in self.entries.values() if chosen.matches(x, self.topics)]

    def find(self, name: str) -> DeadLetterEntry:
        """Return the entry of an id, short or full. Raises NoSuchEntry."""
        found = [s for s in self.entries if name in (s.short, s.full)]
        if len(found) > 1:
            raise NoSuchEntry(
                f"{name} is a dead letter in {len(found)} topics of that name: "
                f"{', '.join(s.full for s in found)}"
            )
        if not found:
            raise NoSuchEntry(f"no dead letter {name}: `clawstream dlq list --all` lists all")
        return self.entries[found[0]]

    def original(self, entry: DeadLetterEntry) -> Original:
        """Read the original record of an entry."""
        return next(self.originals([entry]))

    def originals(self, entries: Sequence[DeadLetterEntry]) -> Iterator[Original]:
        """Yield the original records of entries, in the order of the dead-letters topic.

        Key and value are in the dead letter. Headers and oversized values are read from the
        original position, if it still exists.
        """
        by_offset = {entry.at: entry for entry in entries}
        log = InputLog(self.cluster, self.decoder, self.topics.dead_letters, 0)
        in_place = self._read_in_place(entries)
        for record in log.records(sorted(by_offset)):
            entry, event = by_offset[record.offset], self.decoder.decode(record.value)
            key, value, headers = event.key, event.value, None
            if (there := in_place.get(entry.record_id)) is not None:
                key = there.key if key is None else key
                value = there.value if value is None else value
                headers = there.headers
            yield Original(entry, key, value, headers, event.detail)

    def _read_in_place(self, entries: Sequence[DeadLetterEntry]) -> dict[RecordId, Record]:
        """Read records whose value or headers are only at their original position."""
        wanted: dict[tuple[str, int], list[RecordId]] = {}
        ids = self.cluster.topic_ids(sorted({entry.record_id.topic for entry in entries}))
        for entry in entries:
            record_id = entry.record_id
            if ids.get(record_id.topic) == record_id.topic_id and (
                entry.size is None or record_id.topic == self.topics.candidates
            ):
                wanted.setdefault((record_id.topic, record_id.partition), []).append(record_id)
        found = {}
        for (topic, partition), record_ids in wanted.items():
            log = InputLog(self.cluster, self.decoder, topic, partition)
            for record in log.records(sorted(s.offset for s in record_ids)):
                found[RecordId(topic, ids[topic], partition, record.offset)] = record
        return found
