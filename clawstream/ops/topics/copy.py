"""Copy `claw.steps`, `claw.rewards` and the schemas to another prefix, with timestamps and ticks.

With the same number of partitions each is copied as is. Otherwise the records of all partitions are
merged by time and partitioned by key again, and the source's ticks, at most one a second, are
written to every new partition after all earlier records, so that time means the same there. No
other process may write ticks to the copy (`jobs.write_ticks=false`).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clawstream.ops.topics.target_prefix import TargetPrefix
from clawstream.runtime.errors import PlumbingError
from clawstream.runtime.kafka import Cluster, Producer, Record
from clawstream.runtime.kafka.window import Window, merge_by_time, window_of
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.errors import SettingsError, Undecodable, UnknownSchema
from clawstream.schemas.ids import check_run_id, parse_version
from clawstream.schemas.records import Assessment, Reward, Tick
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.reward_models import SOURCES
from clawstream.schemas.topics import partition_of

PREFIX = re.compile(r"[a-z0-9_-]{1,32}")
TICK_MS = 1000
FLUSH_BYTES = 32 << 20
FLUSH_RECORDS = 20_000
REWARDER = "clawstream.reward"
"""Field `by` of the reward job's rewards."""


class CopyFailed(PlumbingError):
    """The copy differs from what was written: another process writes to it. Use another prefix."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records are copied.

    run: Of this run only; None: of all. as_run: Another run id for the copies. rewards,
    assessments: Whether those of the reward job are included. trajectory_keys: Of these
    trajectories only; None: of all.
    """

    run: str | None = None
    as_run: str | None = None
    rewards: bool = True
    assessments: bool = True
    trajectory_keys: frozenset[str] | None = None

    @property
    def passes_all(self) -> bool:
        """Whether every record is copied unchanged."""
        return self == RecordFilter()

    def apply(self, event: Any) -> Any | None:
        """Return the record of the copy, or None when the record is omitted."""
        if self.run is not None and event.run_id != self.run:
            return None
        if self.trajectory_keys is not None and event.trajectory_key not in self.trajectory_keys:
            return None
        if isinstance(event, Reward) and not self.rewards:
            if event.by == REWARDER and event.source in {"rule", "next_state", *SOURCES.values()}:
                return None
        elif isinstance(event, Assessment) and not self.assessments:
            return None
        return event if self.as_run is None else renamed(event, self.as_run)


def renamed(event: Any, run_id: str) -> Any:
    """Return a copy of a record under another run id; version ids of its run are renamed, too."""
    old = event.run_id
    changes: dict[str, Any] = {"run_id": run_id}
    for name in ("version_first", "version_last"):
        if (version := getattr(event, name, None)) is not None:
            changes[name] = _version(version, old, run_id)
    if spans := getattr(event, "versions", ()):
        changes["versions"] = tuple(
            dataclasses.replace(s, version=_version(s.version, old, run_id)) for s in spans
        )
    return dataclasses.replace(event, **changes)


def _version(version: str, old: str, new: str) -> str:
    parsed = parse_version(version)
    if parsed is None or parsed.run_id != old:
        return version
    return str(parsed._replace(run_id=new))


class Writer:
    """Writes records with a bounded number in flight and counts offsets as the only writer."""

    def __init__(self, cluster: Cluster) -> None:
        self._producer: Producer = cluster.producer()
        self._cluster = cluster
        self.ends: Counter[tuple[str, int]] = Counter()
        """Next offset of each partition written to."""
        self._bytes = self._records = 0

    def put(
        self, topic: str, partition: int, key: bytes | None, value: bytes | None, time: int,
        headers: Mapping[str, bytes] | None = None,
    ) -> None:  # fmt: skip
        """Write a record."""
        self._producer.put(topic, key, value, headers, partition, time)
        self.ends[topic, partition] += 1
        self._bytes, self._records = self._bytes + len(value or b""), self._records + 1
        if self._bytes > FLUSH_BYTES or self._records > FLUSH_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Wait until everything is acknowledged."""
        self._producer.flush()
        self._bytes = self._records = 0

    def close(self) -> None:
        """Flush; raise CopyFailed unless the topics hold exactly the written records."""
        self.flush()
        self._producer.close()
        for topic in {t for t, _ in self.ends}:
            for partition, (low, high) in self._cluster.watermarks(topic).items():
                if (low, high) != (0, self.ends[topic, partition]):
                    raise CopyFailed(
                        f"{topic}-{partition} holds offsets {low} to {high - 1}, not "
                        f"{self.ends[topic, partition]} records"
                    )


def copied_settings(settings: Settings, prefix: str, partitions: int) -> Settings:
    """Return the settings of the copy: other prefix, partitions and tick writer.

    Raises:
        SettingsError: The prefix is wrong.
    """
    if prefix == settings.kafka.topic_prefix or not PREFIX.fullmatch(prefix):
        raise SettingsError(f"prefix {prefix!r}: must be another one, of 1 to 32 of a-z 0-9 _ -")
    kafka = settings.kafka.model_copy(update={"topic_prefix": prefix, "partitions": partitions})
    return settings.model_copy(
        update={"kafka": kafka, "jobs": settings.jobs.model_copy(update={"write_ticks": False})}
    )


def copy_topics(
    cluster: Cluster,
    settings: Settings,
    prefix: str,
    partitions: int | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    record_filter: RecordFilter | None = None,
) -> dict[str, Any]:
    """Copy the topics and return counts of copied and omitted records.

    A killed copy starts over; a finished one only reports again. Raises InvalidId, SettingsError,
    PrefixTaken, WindowGone, CopyFailed.

    Args:
        partitions: Of the copy; default: as many as the source has.
        since_ms: Start in log time.
        until_ms: End in log time, exclusive.
    """
    record_filter, topics = record_filter or RecordFilter(), settings.kafka.topics
    for run in (record_filter.run, record_filter.as_run):
        if run is not None:
            check_run_id(run)
    source = (topics.steps, topics.rewards)
    for topic in source:
        cluster.topic_id(topic)  # or an error that says what is missing
    count = partitions or cluster.topics(topics.steps)[topics.steps]
    target = copied_settings(settings, prefix, count)
    target_prefix = TargetPrefix(cluster, prefix, settings.data_dir / "copies" / f"{prefix}.json")
    request = {
        "source": settings.kafka.topic_prefix,
        "partitions": count,
        "since_ms": since_ms,
        "until_ms": until_ms,
        **dataclasses.asdict(record_filter),
    }
    copies = (target.kafka.topics.steps, target.kafka.topics.rewards)
    with target_prefix.held():
        begun = target_prefix.begin(
            request,
            lambda: {t: window_of(cluster, t, since_ms, until_ms).as_dict() for t in source},
        )
        if begun.result is not None:
            return {**begun.result, "was_done": True}
        target_prefix.make(target, copies)
        windows = [Window.from_dict(begun.plan[t]) for t in source]
        result = _copy(cluster, settings, target, windows, copies, record_filter)
        target_prefix.done(result)
    return {**result, "was_done": False}


def _copy(
    cluster: Cluster,
    settings: Settings,
    target: Settings,
    windows: list[Window],
    copies: tuple[str, str],
    record_filter: RecordFilter,
) -> dict[str, Any]:
    _copy_schemas(cluster, settings.kafka.topics.schemas, target.kafka.topics.schemas)
    writer, decoder = Writer(cluster), Decoder(cluster, settings.kafka.topics.schemas)
    result: dict[str, Any] = {
        "partitions": target.kafka.partitions,
        "records": {},
        "ticks": 0,
        "left_out": 0,
        "unreadable": 0,
    }
    for window, topic in zip(windows, copies, strict=True):
        copier = Copier(decoder, record_filter, target.kafka.partitions, len(window.ranges))
        for time, record in merge_by_time(cluster, [window]):
            for partition, key, value in copier.places(time, record):
                at = record.timestamp_ms if copier.same else time
                # The headers mark records that were sent again on purpose.
                writer.put(topic, partition, key, value, at, record.headers)
        for partition, key, value in copier.end():
            writer.put(topic, partition, key, value, copier.time)
        result["records"][topic] = copier.copied
        for name in ("ticks", "left_out", "unreadable"):
            result[name] += getattr(copier, name)
    writer.close()
    return result


def _copy_schemas(cluster: Cluster, source: str, target: str) -> None:
    """Copy the announced schemas; the target is compacted, so duplicates are harmless."""
    producer = cluster.producer()
    for record in cluster.read_all(source):
        producer.put(target, record.key, record.value)
    producer.flush()
    producer.close()


class Copier:
    """Where each record of one topic goes. Pure. partitions: Of the copy; before: of the source."""

    def __init__(
        self, decoder: Decoder, record_filter: RecordFilter, partitions: int, before: int
    ) -> None:
        self.same = partitions == before
        self.copied = self.ticks = self.left_out = self.unreadable = 0
        self.time = 0
        self._decoder, self._record_filter, self._partitions = decoder, record_filter, partitions
        self._ticked = -TICK_MS

    def places(self, time: int, record: Record) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """Yield the copies of a record as (partition, key, value)."""
        self.time = time
        if self._decoder.codec.is_tick(record.value):
            if self.same:
                self.ticks += 1
                yield record.partition, record.key, record.value
            else:
                yield from self._everywhere(time)
            return
        value = self._value(record)
        if value is not None or (record.value is None and self._record_filter.passes_all):
            self.copied += 1
            yield self._partition(record), record.key, value

    def end(self) -> Iterator[tuple[int, None, bytes]]:
        """Yield the ticks that end the copy, at the time of the last record."""
        if not self.same and self._ticked >= 0:
            self._ticked = -TICK_MS
            yield from self._everywhere(self.time)

    def _everywhere(self, time: int) -> Iterator[tuple[int, None, bytes]]:
        if time < self._ticked + TICK_MS:
            return
        self._ticked = time
        for partition in range(self._partitions):
            self.ticks += 1
            yield partition, None, self._decoder.codec.encode(Tick(partition=partition))

    def _value(self, record: Record) -> bytes | None:
        if self._record_filter.passes_all:
            return record.value
        try:
            event = self._decoder.decode(record.value)
        except (Undecodable, UnknownSchema):
            self.unreadable += 1
            return None
        chosen = self._record_filter.apply(event) if hasattr(event, "run_id") else None
        if chosen is None:
            self.left_out += 1
            return None
        return record.value if chosen is event else self._decoder.codec.encode(chosen)

    def _partition(self, record: Record) -> int:
        if self.same:
            return record.partition
        if record.key is None:
            return record.partition % self._partitions
        return partition_of(record.key, self._partitions)
