"""Watch the lag of every consumer group by repeated samples."""

from __future__ import annotations

import time
from collections import deque

from clawstream.ops.health import process_of
from clawstream.ops.lag import Backlog, backlogs, expected_groups
from clawstream.ops.monitoring.rules import PATIENCE_S, Sample, Status, status_of
from clawstream.ops.processes import Rows, has_ended, processes_of
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.settings import Settings

INTERVAL_S = 5.0
SCAN_RECORDS = 100
"""Records of a partition that each poll may read: more are counted by their offsets."""
JUDGE_POLL_S = 2.0


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
        measured = backlogs(self._cluster, self._settings, SCAN_RECORDS)
        now_s = time.monotonic()
        processes = processes_of(self._settings.data_dir)[1]
        ended = {name for name, row in processes.items() if has_ended(row)}
        for backlog in measured:
            if process_of(backlog.group, self._settings) in ended:
                self._windows.pop(_key(backlog), None)
            elif backlog.group in self._judged:
                backlog.status = self._judge(backlog, now_s)
        return measured

    def poll_until_judged(self, processes: Rows) -> list[Backlog]:
        """Poll until every consumer has moved, has nothing to read, or has stood still for long.

        Args:
            processes: Rows of the supervisor's table: only their consumers must have begun to read.
        """
        first = {_key(b): (b.position, b.metadata) for b in self.poll() if b.status}

        def is_open(backlog: Backlog) -> bool:
            expected = backlog.committed or process_of(backlog.group, self._settings) in processes
            moved = first.get(_key(backlog)) != (backlog.position, backlog.metadata)
            return bool(backlog.left) and expected and not moved

        while True:
            measured = self.poll()
            if not any(is_open(b) and b.status in ("ok", "behind") for b in measured):
                return measured
            time.sleep(JUDGE_POLL_S)

    def _judge(self, backlog: Backlog, now_s: float) -> Status:
        window = self._windows.setdefault(_key(backlog), deque())
        position = backlog.position if backlog.committed else None
        window.append(Sample(now_s, position, backlog.left, backlog.metadata))
        # Twice the patience: long enough to tell a consumer that stopped from one that never read.
        while now_s - window[0].time_s > 2 * PATIENCE_S + INTERVAL_S:
            window.popleft()
        return status_of(window)


def _key(backlog: Backlog) -> tuple[str, str, int]:
    return backlog.group, backlog.topic, backlog.partition
