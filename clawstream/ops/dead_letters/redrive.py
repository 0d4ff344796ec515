"""Redrive dead letters: send their records again, each under the key that belongs to it.

1. `Redriver` starts a transactional producer, which fences any earlier one and aborts its open
   transaction.
2. It reads the dead letters to their end. A resolved entry is sent again only by force.
3. The record and the `DeadLetterResolved` with its new position are one transaction.

A command that is killed at any point and run again sends the rest, each record once. The record
carries the header `replays`, for which the lake searches the whole table instead of its window of
newest ids, so a record that the lake has is not written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from clawstream.ops.dead_letters.entries import (
    DeadLetterEntry,
    DeadLetterError,
    DeadLetterLog,
    Original,
)
from clawstream.runtime.kafka import Ack
from clawstream.runtime.topics.records import cluster_of, now_micros
from clawstream.runtime.user import current_user
from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    DeadLetterResolved,
    FailedCall,
    SchemaPublished,
)
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import REPLAYS, Topics
from clawstream.stream_jobs.admit.policy import policy_rejection
from clawstream.stream_jobs.assemble.fold import AssemblyFold
from clawstream.stream_jobs.assemble.limits import limits_of
from clawstream.stream_jobs.assemble.state.partition_state import PartitionState
from clawstream.stream_jobs.assemble.state.trajectories import REWARDS, STEPS, SourceTopic
from clawstream.stream_jobs.worker.payload import payload_place

TRANSACTION_MS = 10_000
"""Transaction time-out: an open transaction of a killed command blocks readers at most this long.
"""
SLICE_ENTRIES = 200
SLICE_BYTES = 16 << 20
"""Maximum size of one transaction."""


class NotSendable(DeadLetterError):
    """The record would fail again, or only its own writer may send it. The message says why."""


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """The result for one entry. why_not: None when it was sent or dismissed."""

    entry: DeadLetterEntry
    action: str
    place: Ack | None = None
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class _PendingSend:
    """A record to be sent, with the resolution that goes with it."""

    original: Original
    key: bytes | None
    value: bytes


# -- which records may be sent


def key_of(event: Event) -> bytes:
    """Return the Kafka key of a record of ours."""
    if isinstance(event, SchemaPublished):
        return event.fingerprint.encode()
    if isinstance(event, FailedCall) and event.trajectory_key is None:
        return event.event_id.encode()
    if isinstance(event, Candidate) or not hasattr(event, "trajectory_key"):
        return str(event.run_id).encode()
    return str(event.trajectory_key).encode()


def check_topic(topics: Topics, topic: str) -> None:
    """Raise NotSendable for a topic on which a second copy or another writer would do harm."""
    inputs = (topics.steps, topics.rewards, topics.trajectories, topics.candidates, topics.schemas)
    if topic not in inputs:
        raise NotSendable(
            f"only its own writer may write to {topic}: a record sent again there would be out "
            "of its sequence. Dismiss it"
        )


def check(
    settings: Settings, topic: str, event: Event, headers: Mapping[str, bytes] | None
) -> None:
    """Raise NotSendable for a record that the topic's consumer would certainly reject again."""
    topics, name = settings.kafka.topics, type(event).__name__
    spec = next(s for s in topics.specs(1, -1) if s.name == topic)
    if type(event) not in spec.records:
        raise NotSendable(f"a {name} does not belong on {topic}")
    if topic in (topics.steps, topics.rewards):
        _check_fold(settings, STEPS if topic == topics.steps else REWARDS, event)
    if isinstance(event, AdmissionPolicy) and (rejection := policy_rejection(event, None)):
        raise NotSendable(rejection)
    if isinstance(event, Candidate):
        if headers is None:
            raise NotSendable(
                "the position of its payload was in its headers, which are gone with its log. "
                "Dismiss it"
            )
        try:
            payload_place(headers)
        except ValueError as e:
            raise NotSendable(str(e)) from e


def _check_fold(settings: Settings, source: SourceTopic, event: Event) -> None:
    """Raise NotSendable if assemble's fold rejects the record on an empty partition."""
    fold = AssemblyFold(PartitionState(), limits_of(settings))
    fold.record(source, 0, 0, key_of(event), event)
    if letters := fold.state.pending.dead_letters:
        raise NotSendable(letters[0].detail)


# -- sending


class Redriver:
    """Redrives and dismisses dead letters. A new one fences all others at their next write."""

    def __init__(self, settings: Settings, by: str | None = None) -> None:
        self._settings, self._topics = settings, settings.kafka.topics
        self._by = by or current_user()
        self._cluster = cluster_of(settings)
        self._producer = self._cluster.producer(
            f"{self._topics.prefix}-dead-letters", transaction_timeout_ms=TRANSACTION_MS
        )
        self.log = DeadLetterLog(settings)
        self._ids: dict[str, str] = {}

    def __enter__(self) -> Redriver:
        return self

    def __exit__(self, *_: object) -> None:
        self._producer.close()

    def replay(
        self, entries: Sequence[DeadLetterEntry], force: bool = False, note: str | None = None
    ) -> Iterator[RedriveResult]:
        """Send records again, in log order; yield each result once it is durable.

        force: Include resolved entries and records that would fail again.
        """
        for some in _slices(sorted(entries, key=lambda x: x.at)):
            sends = list[_PendingSend]()
            for original in self.log.originals(some):
                try:
                    sends.append(self._pending(original, force))
                except NotSendable as e:
                    yield RedriveResult(original.entry, "replayed", why_not=str(e))
            yield from self._send(sends, note)

    def _pending(self, original: Original, force: bool) -> _PendingSend:
        """Raises NotSendable."""
        entry, topic, key = original.entry, original.entry.record_id.topic, original.key
        check_topic(self._topics, topic)
        self._topic_id(topic)
        if original.value is None:
            raise NotSendable("it has no value, so there is nothing to send. Dismiss it")
        if not force:
            _check_open(entry)
        try:
            event = self.log.decoder.decode(original.value)
        except (Undecodable, UnknownSchema) as e:
            if not force:
                raise NotSendable(f"still {e}") from e
        else:
            key = key_of(event)
            if not force:
                check(self._settings, topic, event, original.headers)
        return _PendingSend(original, key, original.value)

    def dismiss(
        self, entries: Sequence[DeadLetterEntry], note: str | None = None
    ) -> Iterator[RedriveResult]:
        """Resolve dead letters without sending them; resolved ones are refused."""
        for some in _slices(entries):
            todo = [entry for entry in some if not entry.resolutions]
            resolved = [(x, self._resolution(x, "dismissed", None, note)) for x in todo]
            asyncio.run(self._transact([], resolved))
            for entry in some:
                why_not = None if entry in todo else _done(entry)
                yield RedriveResult(entry, "dismissed", why_not=why_not)

    # -- writing

    def _send(self, sends: Sequence[_PendingSend], note: str | None) -> list[RedriveResult]:
        if not sends:
            return []
        places = asyncio.run(self._transact(sends, [], note))
        return [
            RedriveResult(p.original.entry, "replayed", place)
            for p, place in zip(sends, places, strict=True)
        ]

    async def _transact(
        self,
        sends: Sequence[_PendingSend],
        resolved: Sequence[tuple[DeadLetterEntry, DeadLetterResolved]],
        note: str | None = None,
    ) -> list[Ack]:
        """Write records, then their resolutions with the new positions, in one transaction."""
        send, encode = self._producer.send_soon, self.log.decoder.codec.encode
        mine = self._topics.dead_letters
        done = list(resolved)
        with self._producer.transaction():
            places = await asyncio.gather(
                *(
                    send(p.original.entry.record_id.topic, p.key, p.value, _headers(p.original))
                    for p in sends
                )
            )
            for pending, place in zip(sends, places, strict=True):
                entry = pending.original.entry
                done.append((entry, self._resolution(entry, "replayed", place, note)))
            await asyncio.gather(
                *(send(mine, entry.key, encode(resolution)) for entry, resolution in done)
            )
        for entry, resolution in done:
            entry.resolutions.append(resolution)
        return list(places)

    def _topic_id(self, topic: str) -> str:
        """Return the topic's current id. Raises KafkaError when the topic does not exist."""
        if topic not in self._ids:
            self._ids[topic] = self._cluster.topic_id(topic)
        return self._ids[topic]

    def _resolution(
        self, entry: DeadLetterEntry, action: str, place: Ack | None, note: str | None
    ) -> DeadLetterResolved:
        record_id = entry.record_id
        return DeadLetterResolved(
            topic=record_id.topic,
            topic_id=record_id.topic_id,
            partition=record_id.partition,
            offset=record_id.offset,
            action=action,
            sent_topic_id=self._topic_id(record_id.topic) if place is not None else None,
            sent_partition=place.partition if place is not None else None,
            sent_offset=place.offset if place is not None else None,
            by=self._by,
            note=note,
            created_at=now_micros(),
        )


def _headers(original: Original) -> dict[str, bytes]:
    return {**(original.headers or {}), REPLAYS: original.entry.record_id.full.encode()}


def _check_open(entry: DeadLetterEntry) -> None:
    if entry.resolutions:
        raise NotSendable(f"{_done(entry)}; --force does it again")


def _done(entry: DeadLetterEntry) -> str:
    last = entry.resolutions[-1]
    where = f" to {sent}" if (sent := sent_to(last)) is not None else ""
    return f"it was {last.action}{where} by {last.by}"


def sent_to(resolution: DeadLetterResolved) -> str | None:
    """Return the position of the sent record, or None for a resolution without one."""
    if resolution.sent_offset is None:
        return None
    return f"{resolution.topic}-{resolution.sent_partition}-{resolution.sent_offset}"


def _slices(entries: Sequence[DeadLetterEntry]) -> Iterator[list[DeadLetterEntry]]:
    """Split entries, in order, into as many as fit into one transaction."""
    some, used = list[DeadLetterEntry](), 0
    for entry in entries:
        size = entry.size or SLICE_BYTES
        if some and (len(some) == SLICE_ENTRIES or used + size > SLICE_BYTES):
            yield some
            some, used = [], 0
        some.append(entry)
        used += size
    if some:
        yield some
