"""Observe an installation for the inspector, with the watch of `clawstream monitor`."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from clawstream.gateway.errors import GatewayError
from clawstream.inspector.operations.observation import (
    Consumer,
    Disk,
    Observation,
    Process,
    Spool,
    Weights,
    Worker,
)
from clawstream.ops.health import Problem, observed_here, problems_of, process_of
from clawstream.ops.lag import Backlog, by_topic
from clawstream.ops.monitoring.rules import STATUSES
from clawstream.ops.monitoring.topic_follower import FollowedState, TopicFollower
from clawstream.ops.monitoring.watch import LagWatch
from clawstream.ops.processes import Rows, has_ended
from clawstream.ops.spool_drain import spooled
from clawstream.runtime.kafka import Cluster, KafkaError
from clawstream.runtime.logs import logger
from clawstream.schemas.settings import Settings

ASK_S = 2.0
"""How long a broker is waited for."""
RETRY_S = 10.0
"""A broker that did not answer is asked again after this time."""


class Operations:
    """Observes one installation: implements `clawstream.inspector.operations.observation.Observe`.

    Only one thread may call it.
    """

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self._settings, self._cluster = settings, cluster
        self._lags, self._topics = LagWatch(cluster, settings), TopicFollower(cluster, settings)
        self._error: str | None = "not asked yet"
        self._asked_s = float("-inf")

    def __call__(self) -> Observation:
        """Observe what Kafka, the supervisor and the disk say. An absent broker is asked rarely."""
        backlogs, followed = self._of_kafka()
        observed = replace(observed_here(self._settings), backlogs=backlogs)
        at_s = time.time()
        problems = problems_of(observed, self._settings, at_s)
        return Observation(
            at_s,
            kafka_error=self._error,
            # An ended run is no problem of its pages.
            problems=[(p.what, p.remedy) for p in problems if p.kind != "up"],
            consumers=consumers_of(backlogs, problems, at_s),
            processes=None
            if observed.supervisor is None
            else processes_of(observed.processes, problems, self._settings),
            workers=[] if followed is None else workers_of(followed, at_s),
            weights=None if followed is None else weights_of(followed),
            dead_letters=None if followed is None else followed.open_letters,
            disk=self._disk(),
            spool=self._spool(),
        )

    def close(self) -> None:
        """Release the reader of the topics."""
        self._topics.close()

    def _of_kafka(self) -> tuple[list[Backlog], FollowedState | None]:
        now_s = time.monotonic()
        if self._error is not None and now_s - self._asked_s < RETRY_S:
            return [], None
        try:
            if self._error is not None:
                self._asked_s = now_s
                self._cluster.ask(ASK_S)
            found, followed = self._lags.poll(), self._topics.poll()
        except KafkaError as error:
            if str(error) != self._error:
                logger().info("operations_without_kafka", error=str(error))
            self._error, self._asked_s = str(error), now_s
            return [], None
        self._error = None
        return found, followed

    def _disk(self) -> Disk | None:
        try:
            usage = shutil.disk_usage(self._settings.data_dir)
        except OSError:
            return None
        return Disk(usage.free, usage.total)

    def _spool(self) -> Spool | None:
        try:
            found = spooled(self._settings)
        except GatewayError:
            return None
        return None if found is None else Spool(*found)


def processes_of(rows: Rows, problems: Sequence[Problem], settings: Settings) -> list[Process]:
    """Return the processes of `up`, those marked that are a problem or do not read. Pure."""
    wrong = {p.subject for p in problems if p.kind == "process"} | {
        process_of(p.subject.split()[0], settings) for p in problems if p.kind == "consumer"
    }
    return [
        Process(
            name, row["state"], row["ready"], has_ended(row), row["restarts"],
            row["status"] or "", row["error"], name in wrong,
        )
        for name, row in rows.items()
    ]  # fmt: skip


def consumers_of(
    backlogs: Sequence[Backlog], problems: Sequence[Problem], now_s: float
) -> list[Consumer]:
    """Return all consumers: problems first, then the others from the worst to the best. Pure.

    Args:
        now_s: Seconds since the epoch.
    """
    wrong = {problem.subject for problem in problems if problem.kind == "consumer"}
    consumers = [
        Consumer(
            lag.group, lag.topic, lag.records, lag.exact, lag.waiting_s, lag.status,
            f"{lag.group} {lag.topic}" in wrong,
        )
        for lag in by_topic(backlogs, now_s)
    ]  # fmt: skip
    return sorted(consumers, key=_urgency, reverse=True)


def _urgency(consumer: Consumer) -> tuple[bool, int]:
    rank = -1 if consumer.status is None else STATUSES.index(consumer.status)
    return consumer.is_problem, rank


def workers_of(followed: FollowedState, now_s: float) -> list[Worker]:
    """Return the rollout workers, by id. Pure."""
    return sorted(
        Worker(
            report.worker_id, report.state, report.weight_version, behind, age_s,
            report.heartbeat_interval_ms / 1000, report.failed_loads, report.error,
        )
        for report, behind, age_s in followed.workers(now_s)
    )  # fmt: skip


def weights_of(followed: FollowedState) -> Weights | None:
    """Return the newest weight version. Pure."""
    newest = followed.newest
    return None if newest is None else Weights(newest.version_id, newest.created_at / 1e6)
