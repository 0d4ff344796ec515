"""What is wrong with an installation, and what to do about it: the only place that decides it.

`clawstream status`, the monitor with the alerts, and the operations page show these problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from clawstream.gateway.durability.quarantine import Damage
from clawstream.ops.lag import Backlog, by_topic
from clawstream.ops.monitoring.rules import PROBLEMS
from clawstream.ops.position_check import SERIOUS, Diagnosis
from clawstream.ops.processes import (
    Rows,
    has_ended,
    left_running,
    processes_of,
    suspended_of,
)
from clawstream.runtime.exit_codes import EXIT_FAILED, EXIT_KAFKA
from clawstream.runtime.process.table import read_table
from clawstream.schemas.settings import Settings

Kind = Literal["up", "kafka", "consumer", "process", "not_ready", "position", "spool"]
"""What a problem is about: the supervisor, the brokers, a group that does not read, a process of
`up` that does not run, one that is not ready, a stored position, a damaged spool."""


class Problem(NamedTuple):
    """One problem. subject: The process, group and topic, or file."""

    kind: Kind
    subject: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of an installation at one time; what was not looked at is empty.

    Attributes:
        supervisor: Pid of `clawstream up` on the data directory, or None.
        processes: Rows of its table by process; empty without a supervisor.
        suspended: Process, or `up`, to the pid that a signal has stopped.
        left: Processes that the last supervisor, which has ended, had not stopped. None: one runs,
            or none has ever run here.
        kafka_error: Why Kafka does not answer; None: it does.
        backlogs: With the status of each consumer that is judged.
    """

    supervisor: int | None = None
    processes: Rows = field(default_factory=dict)
    suspended: Mapping[str, int] = field(default_factory=dict)
    left: Sequence[str] | None = None
    kafka_error: str | None = None
    backlogs: Sequence[Backlog] = ()
    positions: Sequence[Diagnosis] = ()
    damaged: Sequence[Damage] = ()


def observed_here(settings: Settings) -> Observed:
    """Return the processes of this machine, without anything from Kafka."""
    directory = settings.data_dir
    supervisor, processes = processes_of(directory)
    return Observed(
        supervisor=supervisor,
        processes=processes,
        suspended=suspended_of(supervisor, processes),
        left=left_running(directory) if supervisor is None and read_table(directory) else None,
    )


def problems_of(observed: Observed, settings: Settings, now_s: float) -> list[Problem]:
    """Return all problems. A problem comes before the problems that it explains. Pure.

    A process that explains why a consumer does not read is no second problem.

    Args:
        now_s: Seconds since the epoch.
    """
    consumers = list(_consumers(observed, settings, now_s))
    explained = {problem.remedy for problem in consumers}
    return [
        *_supervisor(observed, settings),
        *consumers,
        *(p for p in _processes(observed, settings) if p.remedy not in explained),
        *(
            Problem("position", f"{d.position.process} {d.position.topic}", d.what, d.to_do)
            for d in observed.positions
            if d.verdict in SERIOUS
        ),
        *(Problem("spool", str(d.path), d.what, d.to_do) for d in observed.damaged),
    ]


def exit_code_of(problems: Sequence[Problem]) -> int:
    """Return the exit code of `clawstream status`."""
    kinds = {problem.kind for problem in problems}
    if "kafka" in kinds and "up" not in kinds:
        return EXIT_KAFKA
    return EXIT_FAILED if kinds else 0


def process_of(group: str, settings: Settings) -> str:
    """Return the process that a consumer group belongs to."""
    return group.removeprefix(f"{settings.kafka.topic_prefix}-").partition(".")[0]


def _supervisor(observed: Observed, settings: Settings) -> Iterator[Problem]:
    if observed.left is not None:
        died = f"`clawstream up` has died before it had stopped {', '.join(observed.left)}"
        yield Problem(
            "up",
            "up",
            died if observed.left else f"nothing runs on {settings.data_dir}",
            "start `clawstream up`: every process continues where it stopped",
        )
    if (pid := observed.suspended.get("up")) is not None:
        what = f"`clawstream up` (pid {pid}) is suspended by a signal"
        yield Problem("up", "up", what, f"kill -CONT {pid}")
    if observed.kafka_error is not None:
        yield Problem(
            "kafka",
            "kafka",
            observed.kafka_error,
            f"start Kafka at {settings.bootstrap_servers}, or correct kafka.bootstrap_servers",
        )


def _consumers(observed: Observed, settings: Settings, now_s: float) -> Iterator[Problem]:
    """Yield the groups that do not read a topic on which records wait.

    One that has never read is a problem only if its process is meant to run here.
    """
    stalled = [
        backlog
        for backlog in observed.backlogs
        if backlog.status in PROBLEMS
        or (
            backlog.status == "absent" and process_of(backlog.group, settings) in observed.processes
        )
    ]
    for lag in by_topic(stalled, now_s):
        partitions = ", ".join(
            str(b.partition) for b in stalled if (b.group, b.topic) == (lag.group, lag.topic)
        )
        process = process_of(lag.group, settings)
        yield Problem(
            "consumer",
            f"{lag.group} {lag.topic}",
            f"{lag.status}: {lag.group} does not read {lag.topic} (partition {partitions}): "
            f"{'' if lag.exact else 'at most '}{lag.records} records wait, the oldest for "
            f"{lag.waiting_s:.0f} s",
            _remedy(process, settings, observed),
        )


def _processes(observed: Observed, settings: Settings) -> Iterator[Problem]:
    for name, row in observed.processes.items():
        if has_ended(row):
            continue
        kind: Kind = "process"
        if row["state"] != "running":
            what = f"{name} is {row['state']}"
        elif name in observed.suspended:
            what = f"{name} is suspended"
        elif not row["ready"]:
            kind, what = "not_ready", f"{name} is not ready"
        else:
            continue
        yield Problem(kind, name, what, _remedy(name, settings, observed))


def _remedy(process: str, settings: Settings, observed: Observed) -> str:
    """Return what to do about a process that does not read or run."""
    row: Mapping[str, Any] | None = observed.processes.get(process)
    log = settings.data_dir / "logs" / f"{process}.log"
    if row is None:
        return f"start {process}, or look at its log where it runs; it continues where it stopped"
    if row["state"] != "running":
        return f"{process} is {row['state']}: {row['error'] or 'no error was logged'}; see {log}"
    if (stopped := observed.suspended.get(process)) is not None:
        return f"{process} (pid {stopped}) is suspended by a signal: kill -CONT {stopped}"
    if not row["ready"]:
        return f"{process} (pid {row['pid']}) is not ready: {row['status'] or f'see {log}'}"
    return (
        f"{process} (pid {row['pid']}) runs without progress: see {log}; "
        f"kill -9 {row['pid']} restarts it without loss"
    )
