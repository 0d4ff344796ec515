"""What the operations page shows of an installation at one time, and its samples for the charts.

The composition root observes; this package keeps and shows what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

SILENT_INTERVALS = 5
"""A worker is silent when it has left out this many reports."""


class Consumer(NamedTuple):
    """A consumer group on a topic.

    exact: False: `records` is an upper bound. waiting_s: Age of the oldest record left. status: By
    Burrow's rules; None: not judged. is_problem: It does not read, and is one of the problems.
    """

    group: str
    topic: str
    records: int
    exact: bool
    waiting_s: float
    status: str | None
    is_problem: bool


class Process(NamedTuple):
    """A process of `clawstream up`.

    has_ended: It did its work, or was asked to stop. is_problem: It is one of the problems.
    """

    name: str
    state: str
    ready: bool
    has_ended: bool
    restarts: int
    status: str
    error: str | None
    is_problem: bool


class Worker(NamedTuple):
    """A rollout worker by its last report.

    version: None: boot weights. behind: Versions to the newest one. age_s: Of the report.
    """

    worker_id: str
    state: str
    version: str | None
    behind: int
    age_s: float
    interval_s: float
    failed_loads: int
    error: str | None

    @property
    def is_silent(self) -> bool:
        """Whether it has left out reports."""
        return self.age_s > SILENT_INTERVALS * self.interval_s


class Weights(NamedTuple):
    """The newest weight version. created_s: Seconds since the epoch."""

    version_id: str
    created_s: float


class Spool(NamedTuple):
    """Bytes in the spools of this machine's gateways."""

    waiting: int
    quarantined: int
    damaged: int


class Disk(NamedTuple):
    """Space of the file system that has the data directory, in bytes."""

    free: int
    size: int


@dataclass(frozen=True, slots=True)
class Observation:
    """An installation at one time.

    Attributes:
        at_s: Seconds since the epoch.
        kafka_error: Why Kafka does not answer; None: it does. Without it there are no consumers
            and workers.
        problems: What is wrong, and what to do about it.
        consumers: Those that are a problem first, then from the worst status to the best.
        processes: None: no `clawstream up` runs on the data directory.
        dead_letters: Number of open ones; None: unknown.
    """

    at_s: float
    kafka_error: str | None = None
    problems: Sequence[tuple[str, str]] = ()
    consumers: Sequence[Consumer] = ()
    processes: Sequence[Process] | None = None
    workers: Sequence[Worker] = ()
    weights: Weights | None = None
    dead_letters: int | None = None
    disk: Disk | None = None
    spool: Spool | None = None

    @property
    def notes(self) -> list[str]:
        """What to look at, though nothing is wrong with the processes."""
        lagging = [
            f"{c.status}: {c.group} has {c.records} records of {c.topic} left"
            for c in self.consumers
            if not c.is_problem and c.status not in (None, "ok")
        ]
        workers = [
            f"worker {w.worker_id} is {'silent' if w.is_silent else w.state}"
            + (f": {w.error}" if w.error else "")
            for w in self.workers
            if w.is_silent or w.state == "failed"
        ]
        lost = 0 if self.spool is None else self.spool.quarantined + self.spool.damaged
        return [*lagging, *workers, *([f"the spool has {lost} bytes aside"] if lost else [])]


class Observe(Protocol):
    """Observes an installation."""

    def __call__(self) -> Observation:
        """Observe now, in seconds at most. An absent broker is part of the observation."""

    def close(self) -> None:
        """Release the clients."""


def samples_of(observation: Observation) -> Mapping[tuple[str, str], float]:
    """Return the values to keep, by kind and name: lag of judged consumers, versions behind."""
    return dict(_samples(observation))


def _samples(observation: Observation) -> Iterator[tuple[tuple[str, str], float]]:
    groups: dict[str, list[Consumer]] = {}
    for c in observation.consumers:
        if c.status is not None:
            groups.setdefault(c.group, []).append(c)
            yield ("consumer", consumer_name(c)), c.waiting_s
    for group, parts in groups.items():
        yield ("lag_seconds", group), max(c.waiting_s for c in parts)
        yield ("lag_records", group), sum(c.records for c in parts)
    for worker in observation.workers:
        yield ("versions_behind", worker.worker_id), worker.behind


def consumer_name(consumer: Consumer) -> str:
    """Return the name of a consumer's series in the history."""
    return f"{consumer.group} {consumer.topic}"
