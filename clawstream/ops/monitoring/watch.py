"""Watch the lag of every consumer group, and name the stalled ones."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawstream.ops.lag import Backlog, backlogs, expected_groups, waiting_s
from clawstream.ops.monitoring.rules import (
    PATIENCE_S,
    PROBLEMS,
    Sample,
    Status,
    status_of,
    worst,
)
from clawstream.ops.processes import has_ended, processes_of, suspended
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.settings import Settings

INTERVAL_S = 5.0
SCAN_RECORDS = 100
"""Records of a partition that each poll may read: more are counted by their offsets."""
DOCTOR_POLL_S = 2.0


class LagWatch:
    """Judges the consumers of this run, and those of all runs, by repeated samples of their lag.

    Groups of other runs have no status: whether somebody still runs them is not known. Nor have
    groups of processes that ended as asked.
    """

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings
        self._judged = frozenset(expected_groups(settings))
        self._windows: dict[tuple[str, str, int], deque[Sample]] = {}

    def poll(self) -> list[Backlog]:
        """Measure all backlogs and judge each. Raises KafkaError."""
        found = backlogs(self._cluster, self._settings, SCAN_RECORDS)
        now_s = time.monotonic()
        processes = processes_of(self._settings.data_dir)[1]
        ended = {name for name, row in processes.items() if has_ended(row)}
        for b in found:
            if _process_of(b, self._settings) in ended:
                self._windows.pop(_place(b), None)
            elif b.group in self._judged:
                b.status = self._judge(b, now_s)
        return found

    def _judge(self, b: Backlog, now_s: float) -> Status:
        window = self._windows.setdefault(_place(b), deque())
        position = b.position if b.committed else None
        window.append(Sample(now_s, position, b.left, b.metadata))
        # Twice the patience: long enough to tell a consumer that stopped from one that never read.
        while now_s - window[0].time_s > 2 * PATIENCE_S + INTERVAL_S:
            window.popleft()
        return status_of(window)


@dataclass(frozen=True, slots=True)
class StalledConsumer:
    """A consumer group that does not read a topic on which records wait."""

    group: str
    topic: str
    partitions: Sequence[int]
    records: int
    waiting_s: float
    status: Status
    remedy: str

    def __str__(self) -> str:
        where = ", ".join(map(str, self.partitions))
        return (
            f"{self.status}: {self.group} does not read {self.topic} (partition {where}): "
            f"{self.records} records wait, the oldest for {self.waiting_s:.0f} s; {self.remedy}"
        )


def stalled_consumers(
    found: Sequence[Backlog],
    settings: Settings,
    processes: Mapping[str, Mapping[str, Any]],
    now_s: float,
) -> list[StalledConsumer]:
    """Return the stalled consumers of a poll, one for each group and topic.

    One that has never read is a problem only if its process is meant to run here.

    Args:
        processes: Rows of the supervisor's table by process; empty without a supervisor.
        now_s: Seconds since the epoch.
    """
    stalled: dict[tuple[str, str], list[Backlog]] = {}
    for b in found:
        if b.status in PROBLEMS or (b.status == "absent" and _process_of(b, settings) in processes):
            stalled.setdefault((b.group, b.topic), []).append(b)
    return [
        StalledConsumer(
            group=group,
            topic=topic,
            partitions=[b.partition for b in parts],
            records=sum(b.records for b in parts),
            waiting_s=max(waiting_s(b, now_s) for b in parts),
            status=worst([b.status for b in parts if b.status is not None]),
            remedy=_remedy(_process_of(parts[0], settings), settings, processes),
        )
        for (group, topic), parts in stalled.items()
    ]


def watch_for_stalled(
    cluster: Cluster, settings: Settings, processes: Mapping[str, Mapping[str, Any]]
) -> list[StalledConsumer]:
    """Watch until every consumer has moved, has nothing to read, or is judged."""
    watch = LagWatch(cluster, settings)
    first = {_place(b): (b.position, b.metadata) for b in watch.poll() if b.status}

    def is_open(b: Backlog) -> bool:
        expected = b.committed or _process_of(b, settings) in processes
        moved = first.get(_place(b)) != (b.position, b.metadata)
        return bool(b.left) and expected and not moved

    while True:
        found = watch.poll()
        if not any(is_open(b) and b.status in ("ok", "behind") for b in found):
            return stalled_consumers(found, settings, processes, time.time())
        time.sleep(DOCTOR_POLL_S)


def process_problems(
    processes: Mapping[str, Mapping[str, Any]], settings: Settings
) -> Iterator[str]:
    """Yield a line for each process of this machine that is suspended or does not run.

    Args:
        processes: Rows of the supervisor's table by process.
    """
    for name, row in processes.items():
        runs = row["state"] == "running" and suspended(row["pid"]) is None
        if not runs and not has_ended(row):
            yield _remedy(name, settings, processes)


def role_of(group: str, settings: Settings) -> str:
    """Return a group's name without the prefix of the installation."""
    return group.removeprefix(f"{settings.kafka.topic_prefix}-")


def _process_of(b: Backlog, settings: Settings) -> str:
    return role_of(b.group, settings).partition(".")[0]


def _place(b: Backlog) -> tuple[str, str, int]:
    return b.group, b.topic, b.partition


def _remedy(process: str, settings: Settings, processes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what to do about a process that does not read."""
    row, log = processes.get(process), settings.data_dir / "logs" / f"{process}.log"
    if row is None:
        return f"start {process}, or look at its log where it runs; it continues where it stopped"
    if row["state"] != "running":
        return f"{process} is {row['state']}: {row['error'] or 'no error was logged'}; see {log}"
    if (stopped := suspended(row["pid"])) is not None:
        return f"{process} (pid {stopped}) is suspended by a signal: kill -CONT {stopped}"
    if not row["ready"] and row["status"]:  # what it said last
        return f"{process} (pid {row['pid']}) is not ready: {row['status']}"
    return (
        f"{process} (pid {row['pid']}) runs without progress: see {log}; "
        f"kill -9 {row['pid']} restarts it without loss"
    )
