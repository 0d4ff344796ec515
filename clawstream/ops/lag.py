"""Compute the lag of every consumer group, in offsets, in records and in seconds.

The name of a group defines its inputs, so a group without commits lags by the whole log:

    <prefix>-assemble                    steps, rewards
    <prefix>-reward                      trajectories
    <prefix>-compare                     candidates; from the first group that waits for members
    <prefix>-admit.<run>.<channel>       its run's candidates partition; only records of that run
    <prefix>-trainer.<run>.<channel>     ready batches of that run and channel
    <prefix>-lake                        every topic that the lake keeps
    <prefix>-traces                      steps, candidates, weights, workers, ready batches
    any other group of the prefix        what it has committed

Offsets include control records of transactions and the Ticks of every second, so an idle
installation is rarely at 0. Records do not: when few offsets are left, they are read and counted.
The end of a partition is that of `read_committed` readers: it excludes open transactions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from clawstream.ops.monitoring.rules import Status, worst
from clawstream.ops.tracing.topics import followed_topics
from clawstream.runtime.kafka import Cluster, Record
from clawstream.schemas.codec.single_object import Codec
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics, partition_of
from clawstream.text_table import text_table

SCAN_RECORDS = 2_000
SCAN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class GroupLag:
    """One group on one topic, summed over partitions.

    Attributes:
        committed: Sum of the positions, with the log's start for partitions without a commit; None
            without any commit.
        records: Data records left, an upper bound if `exact` is False.
        waiting_s: Age of the oldest record left, in seconds; 0 without any.
        status: The worst of its partitions; None: not watched.
    """

    group: str
    topic: str
    partitions: int
    committed: int | None
    end: int
    offsets: int
    records: int
    exact: bool
    waiting_s: float
    status: Status | None


@dataclass(slots=True)
class Backlog:
    """One group on one partition: offsets [position, end) are left.

    Attributes:
        start: First offset of the log.
        committed: Whether the group has committed a position; without one it is `start`.
        key: Only records with this key are work for the group; None: all.
        records: Data records left, an upper bound if `exact` is False.
        oldest_ms: Log timestamp of the oldest one; None: none is left, or it is unknown.
        status: None: not watched.
        handled: The offset below which the group has handled all records, if that is beyond its
            position, which stays before some of them by rule.
        unhandled: Records from there on, Ticks included; may be an upper bound above zero.
        metadata: Of the commit.
    """

    group: str
    topic: str
    partition: int
    position: int
    start: int
    end: int
    committed: bool
    key: bytes | None
    records: int = 0
    exact: bool = True
    oldest_ms: int | None = None
    status: Status | None = None
    handled: int | None = None
    unhandled: int = 0
    metadata: str = ""

    @property
    def left(self) -> int:
        """Records that the group has to handle; may be an upper bound above zero."""
        return self.records if self.handled is None else self.unhandled


def expected_groups(settings: Settings) -> list[str]:
    """The groups of an installation that runs everything, for the settings' run."""
    prefix, run = settings.kafka.topic_prefix, settings.run_id
    admits = (f"admit.{run}.{channel}" for channel in settings.admit.channels)
    compare = ("compare",) if settings.jobs.compares_groups else ()
    traces = ("traces",) if settings.traces.endpoint is not None else ()
    roles = ("assemble", "reward", *compare, *admits, f"trainer.{run}.train", "lake", *traces)
    return [f"{prefix}-{role}" for role in roles]


def inputs(topics: Topics, role: str, there: Mapping[str, int]) -> dict[str, range]:
    """Return the topics and partitions that a group must read.

    role: The group's name without the prefix. there: Existing topics with partition counts.
    """
    name, _, rest = role.partition(".")
    run, _, channel = rest.partition(".")
    match name:
        case "assemble":
            wanted = [topics.steps, topics.rewards]
        case "reward":
            wanted = [topics.trajectories]
        case "compare":
            wanted = [topics.candidates]
        case "admit" if topics.candidates in there:
            p = partition_of(run.encode(), there[topics.candidates])
            return {topics.candidates: range(p, p + 1)}
        case "trainer":
            wanted = [f"{topics.ready_batches_prefix}{run}.{channel}"]
        case "lake":
            wanted = [
                *(topics.steps, topics.rewards, topics.trajectories, topics.candidates),
                *(topics.weights, topics.trained_tokens, topics.schemas, topics.dead_letters),
                *(t for t in there if topics.parse_ready_batches(t)),
            ]
        case "traces":
            wanted = followed_topics(topics, there)
        case _:
            wanted = []
    return {t: range(there[t]) for t in wanted if t in there}


def lag(cluster: Cluster, settings: Settings, scan_records: int = SCAN_RECORDS) -> list[GroupLag]:
    """Return the lag of every group on every topic it reads, sorted by group and topic.

    Includes expected groups that do not exist yet. A partition with more than `scan_records`
    offsets left is not read: its lag in offsets is the upper bound of its lag in records.
    """
    return by_topic(backlogs(cluster, settings, scan_records), time.time())


def data_lag(cluster: Cluster, settings: Settings, group: str) -> int:
    """Return the records left for a group (full name), without Ticks and control records.

    It is an upper bound when large.
    """
    found = _measure(cluster, settings, [group])
    _count_records(cluster, found, SCAN_RECORDS)
    return sum(b.records for b in found)


def backlogs(
    cluster: Cluster, settings: Settings, scan_records: int = SCAN_RECORDS
) -> list[Backlog]:
    """Return the backlog of every group on every partition, as `lag` does for topics."""
    prefix = f"{settings.kafka.topic_prefix}-"
    seen = (g for g in cluster.groups() if g.startswith(prefix))
    found = _measure(cluster, settings, sorted({*seen, *expected_groups(settings)}))
    _count_records(cluster, found, scan_records)
    for b in found:
        if b.records and b.oldest_ms is None:  # too many to be counted
            times = cluster.timestamps_at(b.topic, {b.partition: b.position})
            b.oldest_ms = times.get(b.partition)
    return found


def by_topic(found: Iterable[Backlog], now_s: float) -> list[GroupLag]:
    """Sum the partitions of each group and topic. Pure.

    Args:
        now_s: Seconds since the epoch.
    """
    rows: dict[tuple[str, str], list[Backlog]] = {}
    for b in found:
        rows.setdefault((b.group, b.topic), []).append(b)
    return [
        GroupLag(
            group=group,
            topic=topic,
            partitions=len(parts),
            committed=sum(b.position for b in parts) if any(b.committed for b in parts) else None,
            end=sum(b.end for b in parts),
            offsets=sum(b.end - b.position for b in parts),
            records=sum(b.records for b in parts),
            exact=all(b.exact for b in parts),
            waiting_s=max(waiting_s(b, now_s) for b in parts),
            status=worst([b.status for b in parts if b.status is not None])
            if any(b.status for b in parts)
            else None,
        )
        for (group, topic), parts in sorted(rows.items())
    ]


def waiting_s(backlog: Backlog, now_s: float) -> float:
    """Return the age of the oldest record left, in seconds; 0 without any."""
    return 0.0 if backlog.oldest_ms is None else max(0.0, now_s - backlog.oldest_ms / 1000)


def _measure(cluster: Cluster, settings: Settings, groups: Iterable[str]) -> list[Backlog]:
    """Return the positions and ends of some groups, without records."""
    topics, prefix = settings.kafka.topics, settings.kafka.topic_prefix
    there = {t: n for t, n in cluster.topics().items() if t.startswith(f"{prefix}.")}
    # All positions before any end: a group that continues to read would otherwise be past an end.
    commits = {group: cluster.commits(group) for group in groups}
    ends = cache(cluster.watermarks)
    out = []
    for group, everything in commits.items():
        role = group.removeprefix(f"{prefix}-")
        committed = {tp: commit for tp, commit in everything.items() if tp[0] in there}
        wanted = {(t, p) for t, ps in inputs(topics, role, there).items() for p in ps}
        key = role.split(".")[1].encode() if role.startswith("admit.") else None
        for topic, partition in sorted(wanted or committed.keys()):
            if partition not in ends(topic):  # deleted, or without a leader, since it was listed
                continue
            low, high = ends(topic)[partition]
            commit = committed.get((topic, partition))
            # A position past the end belongs to a deleted topic of the same name.
            if commit is None or commit.offset > high:
                out.append(Backlog(group, topic, partition, low, low, high, False, key))
                continue
            b = Backlog(group, topic, partition, max(commit.offset, low), low, high, True, key)
            b.metadata = commit.metadata
            if b.position < commit.handled <= high:
                b.handled = commit.handled
            out.append(b)
    return out


def _count_records(cluster: Cluster, backlogs: Iterable[Backlog], scan_records: int) -> None:
    """Fill in the numbers of records by one pass over the rest of each partition for all groups.

    Of a long rest only the part behind `handled` is read, if that is short.
    """
    by_partition: dict[tuple[str, int], list[tuple[Backlog, int]]] = {}
    for b in backlogs:
        b.records, b.exact = b.end - b.position, b.end == b.position
        b.unhandled = 0 if b.handled is None else b.end - b.handled
        first = b.position if b.records <= scan_records else b.handled
        if first is not None and 0 < b.end - first <= scan_records:
            b.records, b.unhandled = first - b.position, 0
            by_partition.setdefault((b.topic, b.partition), []).append((b, first))
    if not by_partition:
        return
    codec, deadline = Codec(), time.monotonic() + SCAN_TIMEOUT_S
    ends = {tp: max(b.end for b, _ in waiting) for tp, waiting in by_partition.items()}
    starts = {tp: min(first for _, first in waiting) for tp, waiting in by_partition.items()}
    reader = cluster.reader("clawstream-lag", starts)

    def all_read() -> bool:
        return all(reader.positions[tp] >= end for tp, end in ends.items())

    try:
        while not all_read() and time.monotonic() < deadline:
            for record in reader.poll(2_000, 0.1):
                for b, first in by_partition[record.topic, record.partition]:
                    if first <= record.offset < b.end:
                        _count(codec, record, b, whole=first == b.position)
        for tp, waiting in by_partition.items():
            for b, first in waiting:
                unread = max(0, b.end - max(first, reader.positions[tp]))
                b.records, b.exact = b.records + unread, not unread and first == b.position
                b.unhandled += 0 if b.handled is None else min(unread, b.end - b.handled)
    finally:
        reader.close()


def _count(codec: Codec, record: Record, b: Backlog, *, whole: bool) -> None:
    """Count a record of a backlog. whole: All of its records are counted, from the oldest on."""
    if b.handled is not None and record.offset >= b.handled:
        b.unhandled += 1
    if _counts(codec, record, b.key):
        b.records += 1
        if whole:
            b.oldest_ms = b.oldest_ms or record.timestamp_ms


def _counts(codec: Codec, record: Record, key: bytes | None) -> bool:
    """Return whether a record is work for a group: no tombstone or Tick, and of the group's key."""
    return (
        record.value is not None and key in (None, record.key) and not codec.is_tick(record.value)
    )


def format_lag(rows: Iterable[GroupLag]) -> str:
    """Return a table with a line for each group and topic."""
    head = (
        *("GROUP", "TOPIC", "PARTITIONS", "COMMITTED", "END"),
        *("OFFSETS", "RECORDS", "SECONDS"),
    )
    body = (
        (
            *(r.group, r.topic, r.partitions, "-" if r.committed is None else r.committed),
            *(r.end, r.offsets, r.records if r.exact else f"<={r.records}"),
            f"{r.waiting_s:.0f}",
        )
        for r in rows
    )
    return text_table(head, body, right=range(2, len(head)))
