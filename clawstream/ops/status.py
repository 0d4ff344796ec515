"""`clawstream status`: processes of a data directory, their readiness and the run's progress."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from clawstream.ops.lag import data_lag, expected_groups
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_KAFKA, NAMES
from clawstream.runtime.kafka import Cluster, Record
from clawstream.runtime.process.supervisor import supervisor_of
from clawstream.runtime.process.table import read_table
from clawstream.runtime.topics.records import Decoder
from clawstream.schemas.codec.single_object import Event
from clawstream.schemas.errors import Undecodable, UnknownSchema
from clawstream.schemas.records import Refused, RolloutBudget, WeightVersion, WorkerStatus
from clawstream.schemas.settings import Settings

NEWEST = 5000
"""Number of newest decisions whose refusals are shown by reason; a search reads as many at once."""
ALL_EQUAL = "zero_variance"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run according to its topics.

    version: Id of the newest weight version. reward_fall: Its metric of this name. serving: Worker
    to its state and version. lag: Consumer group to records left. batches, admitted, refused: Of
    the train channel, in all, with groups. newest_refusals: Refused groups by reason, among its
    `NEWEST` newest decisions.
    """

    version: str | None = None
    reward_fall: float | None = None
    serving: Mapping[str, str] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    batches: int = 0
    admitted: int = 0
    refused: int = 0
    newest_refusals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a data directory.

    supervisor: Pid of `clawstream up`, or None. processes: Rows of its table. progress: None when
    Kafka does not answer. suspended: Process to the pid of it, or of one that it started, that a
    signal has stopped.
    """

    data_dir: Path
    run_id: str
    supervisor: int | None
    processes: Mapping[str, Mapping[str, Any]]
    progress: Progress | None
    suspended: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        """Whether Kafka answers, and every process is ready and runs, or has done its work."""
        rows = self.processes.values()
        return (
            self.supervisor is not None
            and bool(rows)
            and all(r["ready"] or r["exit_code"] == 0 for r in rows)
            and not self.suspended
            and self.progress is not None
        )

    @property
    def exit_code(self) -> int:
        """Exit code of the command."""
        if self.is_up:
            return 0
        return EXIT_FAILED if self.supervisor is None or self.progress else EXIT_KAFKA


def processes_of(directory: Path) -> tuple[int | None, Mapping[str, Mapping[str, Any]]]:
    """Return the pid and table of a directory's running supervisor; ignores that of a dead one."""
    pid = supervisor_of(directory)
    rows: Mapping[str, Mapping[str, Any]] = (
        read_table(directory).get("processes", {}) if pid is not None else {}
    )
    return pid, rows


def suspended_of(
    supervisor: int | None, processes: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Return the processes of this machine that are suspended, each with the pid to continue."""
    found = {} if supervisor is None or not _is_stopped(supervisor) else {"up": supervisor}
    for name, row in processes.items():
        if row["pid"] is not None and (pid := suspended(row["pid"])) is not None:
            found[name] = pid
    return found


def suspended(pid: int) -> int | None:
    """Return a process of this machine that is stopped: this one, or one that it started, such as
    the broker's Java.
    """
    if _is_stopped(pid):
        return pid
    try:
        started = [
            int(child)
            for children in Path(f"/proc/{pid}/task").glob("*/children")
            for child in children.read_text().split()
        ]
    except OSError:  # it has ended
        return None
    return next((found for child in started if (found := suspended(child)) is not None), None)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is in state T of proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


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

    def decoded(records: Iterable[Record]) -> Iterator[Event]:
        """Yield the readable records."""
        for record in records:
            with suppress(Undecodable, UnknownSchema):
                if record.value is not None:
                    yield decoder.decode(record.value)

    def all_of(topic: str) -> Iterator[Event]:
        """Yield the readable records of a compacted topic with one partition."""
        return decoded(cluster.read_all(topic) if topic in there else ())

    serving = dict[str, str]()
    for event in all_of(topics.workers):
        if isinstance(event, WorkerStatus) and event.run_id == run:
            silent_s = time.time() - event.heartbeat_at / 1e6
            allowed_s = 5 * event.heartbeat_interval_ms / 1000
            silent = f", silent for {silent_s:.0f} s" if silent_s > allowed_s else ""
            serving[event.worker_id] = (
                f"{event.state}, {event.weight_version or 'boot weights'}{silent}"
            )
    batches = admitted = refused = 0
    for event in all_of(topics.budgets):
        if isinstance(event, RolloutBudget) and (event.run_id, event.channel) == (run, "train"):
            batches, admitted = event.next_batch_seq, event.groups_admitted
            refused = event.groups_refused
    reasons, decisions = Counter[str](), topics.ready_batches(run, "train")
    if decisions in there:
        low, end = cluster.watermarks(decisions, [0])[0]
        for event in decoded(cluster.read_all(decisions, first=max(low, end - NEWEST))):
            if isinstance(event, Refused) and event.whole_group:
                reasons[event.reason] += 1
    newest = None
    if topics.weights in there:
        newest = _newest_version(cluster, topics.weights, run, decoded)
    groups = {*cluster.groups()} & {*expected_groups(settings)}
    lag = {group: data_lag(cluster, settings, group) for group in sorted(groups)}
    return Progress(
        version=newest.version_id if newest else None,
        reward_fall=newest.metrics.get("reward_fall") if newest else None,
        serving=serving,
        lag=lag,
        batches=batches,
        admitted=admitted,
        refused=refused,
        newest_refusals=dict(reasons.most_common()),
    )


def _newest_version(
    cluster: Cluster, topic: str, run: str, decoded: Callable[[Iterable[Record]], Iterable[Event]]
) -> WeightVersion | None:
    """Return the newest version of a run. Runs share the log, so the search goes back in parts."""
    low, end = cluster.watermarks(topic, [0])[0]
    while end > low:
        first, version = max(low, end - NEWEST), None
        for event in decoded(_between(cluster, topic, first, end)):
            if isinstance(event, WeightVersion) and event.run_id == run:
                version = event
        if version is not None:
            return version
        end = first
    return None


def _between(cluster: Cluster, topic: str, first: int, end: int) -> Iterator[Record]:
    return takewhile(lambda record: record.offset < end, cluster.read_all(topic, first=first))


def format_status(status: Status) -> str:
    """Format a status for a terminal."""
    if status.supervisor is None:
        lines = [f"{status.data_dir}: nothing runs"]
    else:
        state = "up" if status.is_up else "not all is ready"
        lines = [f"{status.data_dir}: {state} (clawstream up, pid {status.supervisor})"]
    for name, row in status.processes.items():
        ready = "ready" if row["ready"] else str(row["state"])
        if name in status.suspended:
            ready = "suspended"
        if ready == "running":
            ready = "running, not ready"
        restarts = f"{row['restarts']} restarts" if row["restarts"] else None
        resume = f"kill -CONT {status.suspended[name]}" if name in status.suspended else None
        about = "; ".join(str(x) for x in (row["status"], resume, restarts, row["error"]) if x)
        lines.append(f"  {name:<10} {ready:<20} {about}".rstrip())
    if "up" in status.suspended:
        lines.append(f"  clawstream up is suspended: kill -CONT {status.suspended['up']}")
    lines.append(f"run {status.run_id}")
    progress = status.progress
    if progress is None:
        return "\n".join([*lines, "  Kafka does not answer"])
    lines.append(f"  version    {progress.version or 'none yet'}")
    if progress.reward_fall is not None:
        lines.append(
            f"  the mean reward of the last versions is {progress.reward_fall:.3g} below the best: "
            "training gets worse; see docs/training-gets-worse.md"
        )
    lines += [f"  worker     {worker}: {state}" for worker, state in progress.serving.items()]
    behind = [f"{group} {records}" for group, records in progress.lag.items() if records]
    lines.append(f"  lag        {', '.join(behind) or 'none'}")
    reasons = ", ".join(f"{why} {count}" for why, count in progress.newest_refusals.items())
    lines.append(
        f"  groups     {progress.admitted} admitted in {progress.batches} batches, "
        f"{progress.refused} refused{f'; newest refusals: {reasons}' if reasons else ''}"
    )
    if not progress.admitted and set(progress.newest_refusals) == {ALL_EQUAL}:
        lines.append(
            "  every group was refused as zero_variance: its members' rewards are all equal, so "
            "there is nothing to learn; check the reward functions and the task"
        )
    return "\n".join(lines)


def left_running(directory: Path) -> list[str]:
    """Return the processes that the last supervisor of a directory had not stopped at its end."""
    rows: Mapping[str, Mapping[str, Any]] = read_table(directory).get("processes", {})
    return [name for name, row in rows.items() if row["state"] in ("running", "restarting")]


def wait_until_down(directory: Path, timeout_s: float) -> bool:
    """Wait until no supervisor works on the directory; False after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while supervisor_of(directory) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
