"""`clawstream monitor`: what Kafka and the supervisor know of all processes, for Prometheus.

It only reads. The lag of a consumer comes from here and not from the consumer itself, because one
that is stalled reports nothing. The names of `kafka_*` are those of kafka_exporter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clawstream.ops.health import Problem, observed_here, problems_of
from clawstream.ops.lag import Backlog, waiting_s
from clawstream.ops.monitoring.rules import STATUSES, worst
from clawstream.ops.monitoring.topic_follower import TopicFollower
from clawstream.ops.monitoring.watch import INTERVAL_S, SCAN_RECORDS, LagWatch
from clawstream.ops.processes import has_ended
from clawstream.runtime.kafka import KafkaError
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import run_sync
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import not_ready, ready
from clawstream.runtime.topics.records import cluster_of
from clawstream.schemas.errors import SettingsError
from clawstream.schemas.settings import Settings

PROCESS = "monitor"
CONSUMER = ("consumergroup", "topic", "partition")
PARTITION = ("topic", "partition")
GAUGES: Mapping[str, tuple[str, Sequence[str]]] = {
    "kafka_consumergroup_lag": (
        "Offsets between the committed position and the end; without a position, from the start",
        CONSUMER,
    ),
    "kafka_consumergroup_current_offset": ("Committed position, if there is one", CONSUMER),
    "kafka_topic_partition_current_offset": ("One past the last offset", PARTITION),
    "kafka_topic_partition_oldest_offset": ("First offset", PARTITION),
    "clawstream_consumergroup_lag_records": (
        "Data records left, without ticks and transaction markers; an upper bound above "
        f"{SCAN_RECORDS}",
        CONSUMER,
    ),
    "clawstream_consumergroup_lag_seconds": ("Age of the oldest data record left", CONSUMER),
    "clawstream_consumergroup_status": (
        "1 for the status of each consumer of a topic: ok, behind, absent, stopped, stalled",
        ("consumergroup", "topic", "status"),
    ),
    "clawstream_newest_version": ("Sync index of the run's newest weight version", ()),
    "clawstream_worker_lag_versions": (
        "Versions between the newest one and the one that a rollout worker serves",
        ("worker",),
    ),
    "clawstream_worker_heartbeat_age_seconds": (
        "Time since a worker's last report; absent after an hour",
        ("worker",),
    ),
    "clawstream_worker_heartbeat_interval_seconds": ("Time between its reports", ("worker",)),
    "clawstream_dead_letters_open": (
        "Records that a process could not handle and nobody has resolved",
        (),
    ),
    "clawstream_problem": (
        "1 for each problem that `clawstream status` names: up, kafka, consumer (by group and "
        "topic), process (down or suspended), not_ready",
        ("kind", "subject"),
    ),
    "clawstream_process_up": (
        "1 if a process of `clawstream up` runs; absent after it ended as asked",
        ("process",),
    ),
    "clawstream_process_ready": ("1 if it says that it is ready", ("process",)),
    "clawstream_monitor_last_poll_timestamp_seconds": (
        "When Kafka last answered the monitor; nothing else is shown while it does not",
        (),
    ),
}
RESTARTS = (
    "clawstream_process_restarts",
    "Restarts of a process since the start of `clawstream up`",
)
Value = tuple[str, tuple[str, ...], float]
"""Name of a metric, values of its labels, value."""


class MonitorMetrics(Collector):
    """Shows the values of the last poll."""

    def __init__(self) -> None:
        self._metrics: Sequence[Metric] = ()

    def describe(self) -> Iterable[Metric]:
        """Yield every metric, without values."""
        for name, (text, labels) in GAUGES.items():
            yield GaugeMetricFamily(name, text, labels=labels)
        yield CounterMetricFamily(*RESTARTS, labels=("process",))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of the last poll."""
        return self._metrics

    def show(self, values: Iterable[Value]) -> None:
        """Replace the values, all at once: scrapes come from another thread."""
        metrics = {metric.name: metric for metric in self.describe()}
        for name, labels, value in values:
            metric = metrics[name]
            assert isinstance(metric, GaugeMetricFamily | CounterMetricFamily)
            metric.add_metric(labels, value)
        self._metrics = tuple(metrics.values())


def lag_values(found: Sequence[Backlog], now_s: float) -> Iterator[Value]:
    """Yield the metrics of consumers and partitions. Pure.

    Args:
        now_s: Seconds since the epoch.
    """
    for b in found:
        at = (b.group, b.topic, str(b.partition))
        yield "kafka_consumergroup_lag", at, b.end - b.position
        if b.committed:
            yield "kafka_consumergroup_current_offset", at, b.position
        yield "clawstream_consumergroup_lag_records", at, b.records
        yield "clawstream_consumergroup_lag_seconds", at, waiting_s(b, now_s)
    for (topic, partition), b in {(b.topic, b.partition): b for b in found}.items():
        yield "kafka_topic_partition_current_offset", (topic, str(partition)), b.end
        yield "kafka_topic_partition_oldest_offset", (topic, str(partition)), b.start
    for group, topic in dict.fromkeys((b.group, b.topic) for b in found):
        statuses = [b.status for b in found if (b.group, b.topic) == (group, topic) and b.status]
        for status in STATUSES if statuses else ():
            labels = (group, topic, status)
            yield "clawstream_consumergroup_status", labels, status == worst(statuses)


def process_values(processes: Mapping[str, Mapping[str, Any]]) -> Iterator[Value]:
    """Yield the metrics of the rows of the supervisor's table. Pure."""
    for name, row in processes.items():
        if not has_ended(row):
            yield "clawstream_process_up", (name,), row["state"] == "running"
            yield "clawstream_process_ready", (name,), bool(row["ready"])
        yield RESTARTS[0], (name,), row["restarts"]


def problem_values(problems: Iterable[Problem]) -> list[Value]:
    """Return the metrics of problems. Pure."""
    return [("clawstream_problem", (p.kind, p.subject), 1) for p in problems]


def watch(settings: Settings, stop: threading.Event) -> None:
    """Poll and show until `stop` is set.

    Raises:
        PortTaken: Another process listens on the port.
        SettingsError: `metrics.port` is not set.
    """
    if settings.metrics.port is None:
        raise SettingsError("setting metrics.port: set it, the monitor has nothing else to do")
    cluster, shown, registry = cluster_of(settings), MonitorMetrics(), CollectorRegistry()
    registry.register(shown)
    lags, topics = LagWatch(cluster, settings), TopicFollower(cluster, settings)
    url = f"http://{settings.metrics.host}:{settings.metrics.port}/metrics"
    with serving_metrics(settings, PROCESS, registry):
        while not stop.is_set():
            observed = observed_here(settings)
            values = [*process_values(observed.processes)]
            try:
                backlogs, now_s = lags.poll(), time.time()
                observed = replace(observed, backlogs=backlogs)
                values += [*lag_values(backlogs, now_s), *topics.poll().values(now_s)]
                values.append(("clawstream_monitor_last_poll_timestamp_seconds", (), now_s))
            except KafkaError as e:
                logger().warning("monitor_sees_no_kafka", error=str(e))
                observed = replace(observed, kafka_error=str(e))
                not_ready(str(e))
            else:
                ready(url)
            values += problem_values(problems_of(observed, settings, time.time()))
            shown.show(values)
            stop.wait(INTERVAL_S)
    topics.close()


def main(settings: Settings) -> None:
    """Run the process. Never returns."""
    run_sync(PROCESS, settings, watch)
