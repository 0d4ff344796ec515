"""`clawstream status`: processes of a data directory, their readiness and the run's progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawstream.ops.lag import data_lag, expected_groups
from runtime.exit_codes import NAMES
from runtime.kafka import Cluster
from runtime.process.supervisor import supervisor_of
from runtime.process.table import read_table
from runtime.topics.records import Decoder
from schemas.codec.single_object import Event
from schemas.errors import Undecodable, UnknownSchema
from schemas.records import ReadyBatch, Refused, WeightVersion, WorkerStatus
from schemas.settings import Settings

DECISIONS = 5000
"""Number of newest records that are read of a topic."""
ALL_EQUAL = "zero_variance"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run according to its topics.

    version: Id of the newest weight version. serving: Worker to its state and version. lag:
    Consumer group to records left. admitted, refused: Groups of the train channel, refused ones by
    reason, in its last `DECISIONS` records.
    """

    version: str | None = None
    serving: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    admitted: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a data directory.

    supervisor: Pid of `clawstream up`, or None. processes: Rows of its table. progress: None when
    Kafka does not answer.
    """

    data_dir: Path
    run_id: str
    supervisor: int | None
    processes: Mapping[str, Mapping[str, Any]]
    progress: Progress | None

    @property
    def is_up(self) -> bool:
        """Whether every process is ready, or has done its work."""
        rows = self.processes.values()
        return (
            self.supervisor is not None
            and bool(rows)
            and all(r["ready"] or r["exit_code"] == 0 for r in rows)
        )


def processes_of(directory: Path) -> tuple[int | None, Mapping[str, Mapping[str, Any]]]:
    """Return the pid and table of a directory's running supervisor; ignores that of a dead one."""
    pid = supervisor_of(directory)
    rows: Mapping[str, Mapping[str, Any]] = (
        read_table(directory).get("processes", {}) if pid is not None else {}
    )
    return pid, rows


def has_ended(row: Mapping[str, Any]) -> bool:
    """Return whether a process was asked to stop, or has done its work.

    Args:
        row: Of the supervisor's table.
    """
    return row["state"] in ("stopped", NAMES[0])


def progress_of(settings: Settings, cluster: Cluster) -> Progress:
    """Read the progress from the topics. Raises KafkaError."""
    topics, run = settings.kafka.topics, settings.run_id
    there, decoder = cluster.topics(), Decoder(cluster, topics.schemas)

    def newest(topic: str) -> Iterator[Event]:
        """Yield the newest readable records of a topic with one partition."""
        if topic not in there:
            return
        low, end = cluster.watermarks(topic, [0])[0]
        for record in cluster.read_all(topic, first=max(low, end - DECISIONS)):
            with suppress(Undecodable, UnknownSchema):
                if record.value is not None:
                    yield decoder.decode(record.value)

    version = None
    for event in newest(topics.weights):
        if isinstance(event, WeightVersion) and event.run_id == run:
            version = event.version_id
    serving = dict[str, str]()
    for event in newest(topics.workers):
        if isinstance(event, WorkerStatus) and event.run_id == run:
            silent_s = time.time() - event.heartbeat_at / 1e6
            allowed_s = 5 * event.heartbeat_interval_ms / 1000
            silent = f", silent for {silent_s:.0f} s" if silent_s > allowed_s else ""
            serving[event.worker_id] = (
                f"{event.state}, {event.weight_version or 'boot weights'}{silent}"
            )
    batches = admitted = 0
    refused = Counter[str]()
    for event in newest(topics.ready_batches(run, "train")):
        if isinstance(event, ReadyBatch):
            batches, admitted = batches + 1, admitted + len(event.groups)
        elif isinstance(event, Refused) and event.whole_group:
            refused[event.reason] += 1
    groups = {*cluster.groups()} & {*expected_groups(settings)}
    lag = {group: data_lag(cluster, settings, group) for group in sorted(groups)}
    return Progress(version, serving, lag, batches, admitted, dict(refused.most_common()))


def format_status(status: Status) -> str:
    """Format a status for a terminal."""
    if status.supervisor is None:
        lines = [f"{status.data_dir}: nothing runs"]
    else:
        state = "up" if status.is_up else "not all is ready"
        lines = [f"{status.data_dir}: {state} (clawstream up, pid {status.supervisor})"]
    for name, row in status.processes.items():
        ready = "ready" if row["ready"] else str(row["state"])
        if ready == "running":
            ready = "running, not ready"
        restarts = f"{row['restarts']} restarts" if row["restarts"] else None
        about = "; ".join(str(x) for x in (row["status"], restarts, row["error"]) if x)
        lines.append(f"  {name:<10} {ready:<20} {about}".rstrip())
    lines.append(f"run {status.run_id}")
    progress = status.progress
    if progress is None:
        return "\n".join([*lines, "  Kafka does not answer"])
    lines.append(f"  version    {progress.version or 'none yet'}")
    lines += [f"  worker     {worker}: {state}" for worker, state in progress.serving.items()]
    behind = [f"{group} {records}" for group, records in progress.lag.items() if records]
    lines.append(f"  lag        {', '.join(behind) or 'none'}")
    refused = ", ".join(f"{reason} {count}" for reason, count in progress.refused.items())
    lines.append(
        f"  groups     {progress.admitted} admitted in {progress.batches} batches; refused: "
        f"{refused or 'none'}"
    )
    if progress.refused and not progress.admitted and set(progress.refused) == {ALL_EQUAL}:
        lines.append(
            "  every group was refused as zero_variance: its members' rewards are all equal, so "
            "there is nothing to learn; check the reward functions and the task"
        )
    return "\n".join(lines)


def wait_until_down(directory: Path, timeout_s: float) -> bool:
    """Wait until no supervisor works on the directory; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while supervisor_of(directory) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
