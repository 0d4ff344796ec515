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


class NoSuchEntry(DeadLetterError):
    """No dead letter has that id, or several have; the message lists unambiguous ids."""


class RecordId(NamedTuple):
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
        """Where it lies on `claw.dead-letters`, the first time."""
        return self.occurrences[0].at

    @property
    def state(self) -> str:
        """open, or what was done last: replayed, repaired, dismissed."""
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
                (
                    found[record_id].resolutions
                    if record_id in found
                    else early.setdefault(record_id, [])
                ).append(event)
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
    """The run of a record that can't be read: there are topics that tell it."""
    named = topics.parse_ready_batches(topic)
    if named is not None:
        return named[0]
    text = (key or b"").decode("ascii", "replace")
    return text if topic == topics.candidates and RUN_ID.fullmatch(text) else None


def read_entries(
    cluster: Cluster, decoder: Decoder, topics: Topics
) -> dict[RecordId, DeadLetterEntry]:
    """Read all dead letters, including those behind an open transaction. Raises Unavailable."""
    if topics.dead_letters not in cluster.topics(topics.dead_letters):
        return {}

    def events() -> Iterator[tuple[int, Event]]:
        for record in cluster.read_all(topics.dead_letters, await_open=True):
            with suppress(
                Undecodable, UnknownSchema
            ):  # unreadable: the lake writes a dead letter for it
                yield record.offset, decoder.decode(record.value)

    return entries_in(events(), decoder.decode, topics)


# -- choosing


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Selects entries; None matches everything.

    topic: With or without the prefix. since: Microseconds, of any occurrence.
    """

    topic: str | None = None
    process: str | None = None
    reason: str | None = None
    run: str | None = None
    since: int | None = None
    resolved: bool = False
    """Those too that something was done about."""

    def matches(self, entry: DeadLetterEntry, topics: Topics) -> bool:
        named = self.topic is None or self.topic in (
            entry.record_id.topic,
            entry.record_id.topic.removeprefix(topics.prefix + "."),
        )
        return (
            named
            and (self.resolved or not entry.resolutions)
            and (self.run is None or self.run == entry.run)
            and any(self._matches_occurrence(b) for b in entry.occurrences)
        )

    def _matches_occurrence(self, occurrence: Occurrence) -> bool:
        return (
            (self.process is None or self.process == occurrence.process)
            and (self.reason is None or self.reason == occurrence.reason)
            and (self.since is None or self.since <= occurrence.created_at)
        )


def find_entry(entries: Mapping[RecordId, DeadLetterEntry], name: str) -> DeadLetterEntry:
    """The entry of an id, short or full. Raises NoSuchEntry."""
    found = [s for s in entries if name in (s.short, s.full)]
    if len(found) > 1:
        raise NoSuchEntry(
            f"{name} is a dead letter in {len(found)} topics of that name: "
            f"{', '.join(s.full for s in found)}"
        )
    if not found:
        raise NoSuchEntry(f"no dead letter {name}: `clawstream dlq list --all` has them all")
    return entries[found[0]]


# -- the records themselves


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


def originals(
    cluster: Cluster, decoder: Decoder, topics: Topics, entries: Sequence[DeadLetterEntry]
) -> Iterator[Original]:
    """Yield the original records of entries, in the order of the dead-letters topic.

    Key and value are in the dead letter. Headers and oversized values are read from the original
    position, if it still exists.
    """
    inside = {entry.at: entry for entry in entries}
    said = InputLog(cluster, decoder, topics.dead_letters, 0)
    at_place = _read_in_place(cluster, decoder, topics, entries)
    for record in said.records(sorted(inside)):
        entry, event = inside[record.offset], decoder.decode(record.value)
        there = at_place.get(entry.record_id)
        key, value = event.key, event.value
        if there is not None:
            key, value = there.key if key is None else key, there.value if value is None else value
        yield Original(
            entry, key, value, there.headers if there is not None else None, event.detail
        )


def _read_in_place(
    cluster: Cluster, decoder: Decoder, topics: Topics, entries: Sequence[DeadLetterEntry]
) -> dict[RecordId, Record]:
    """The records that must be looked at where they lie, as far as they do."""
    wanted: dict[tuple[str, int], list[RecordId]] = {}
    ids = cluster.topic_ids(sorted({entry.record_id.topic for entry in entries}))
    for entry in entries:
        record_id = entry.record_id
        if ids.get(record_id.topic) == record_id.topic_id and (
            entry.size is None or record_id.topic == topics.candidates
        ):
            wanted.setdefault((record_id.topic, record_id.partition), []).append(record_id)
    found = {}
    for (topic, partition), record_ids in wanted.items():
        log = InputLog(cluster, decoder, topic, partition)
        for record in log.records(sorted(s.offset for s in record_ids)):
            found[RecordId(topic, ids[topic], partition, record.offset)] = record
    return found
