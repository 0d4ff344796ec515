"""Prometheus metrics of a rollout worker, from its report."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from clawstream.rollout.status import Report

PREFIX = "clawstream_rollout_"


class WorkerMetrics(Collector):
    """All metrics, with the prefix clawstream_rollout_. Those of the engine are vLLM's own."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without values."""
        yield GaugeMetricFamily(
            PREFIX + "state",
            "1 for the state of the worker: starting, loading, ready, failed, draining",
            labels=["state"],
        )
        yield CounterMetricFamily(PREFIX + "loads", "Versions loaded since the engine's start")
        yield CounterMetricFamily(
            PREFIX + "failed_loads", "Failed attempts to load a version since the engine's start"
        )
        yield GaugeMetricFamily(PREFIX + "last_load_seconds", "Time of the last load")

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics of the current report."""
        status, (state, loads, failed, last) = self._report.status, self.describe()
        state.add_sample(state.name, {"state": status.state}, 1)
        loads.add_sample(loads.name + "_total", {}, status.loads)
        failed.add_sample(failed.name + "_total", {}, status.failed_loads)
        if status.last_load_ms is not None:
            last.add_sample(last.name, {}, status.last_load_ms / 1000)
        yield from (state, loads, failed, last)
