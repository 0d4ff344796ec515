"""The metrics of versions for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from clawstream.trainer.metrics.definitions import LABELS, METRICS, label_of

PREFIX = "clawstream_trainer_"
NEWEST = (PREFIX + "sync_index", "Sync index of the newest version.")
VALIDATED = (
    PREFIX + "val_sync_index",
    "Sync index of the version that the val metrics are about.",
)


class VersionMetrics(Collector):
    """A sink of the monitor. Totals are counters over the versions of this process, others
    gauges of the newest version, and of the newest validation. A metric without a value is absent.
    """

    def __init__(self) -> None:
        # Replaced, never changed: the thread of the server reads them.
        self._totals: Mapping[str, float] = {}
        self._version: Mapping[str, float] = {}
        self._validation: Mapping[str, float] = {}
        self._indexes: Mapping[tuple[str, str], int] = {}

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a version."""
        totals = {name: v for name, v in metrics.items() if METRICS[label_of(name)[0]].total}
        gauges = {name: value for name, value in metrics.items() if name not in totals}
        self._totals = {
            **self._totals,
            **{name: self._totals.get(name, 0.0) + value for name, value in totals.items()},
        }
        if any(name.startswith("val/") for name in metrics):
            self._validation, index = gauges, VALIDATED
        else:
            self._version, index = gauges, NEWEST
        self._indexes = {**self._indexes, index: sync_index}

    def describe(self) -> Iterator[PrometheusMetric]:
        """Yield every metric, without values."""
        for name, text in (NEWEST, VALIDATED):
            yield GaugeMetricFamily(name, text)
        for name, metric in METRICS.items():
            if metric.total:
                yield CounterMetricFamily(*_named(name))
            else:
                yield GaugeMetricFamily(*_named(name), labels=_labels(name))

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield what a scrape shows, in the thread of the server."""
        for (name, text), index in self._indexes.items():
            yield GaugeMetricFamily(name, text, index)
        for name, total in self._totals.items():
            yield CounterMetricFamily(*_named(name), total)
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in {**self._version, **self._validation}.items():
            general, label = label_of(name)
            if general not in families:
                families[general] = GaugeMetricFamily(*_named(general), labels=_labels(general))
            families[general].add_metric([] if label is None else [label], value)
        yield from families.values()

    def close(self) -> None:
        """Do nothing: the values stay until the process ends."""


def _labels(name: str) -> list[str]:
    return [label for begin, label in LABELS.items() if name.startswith(begin)]


def _named(name: str) -> tuple[str, str]:
    """Return name and description of a metric on the endpoint."""
    metric = METRICS[name]
    unit = f" ({metric.unit})" if metric.unit else ""
    plain = name.replace("<name>/", "").replace("/<name>", "").replace("/", "_")
    return PREFIX + plain, metric.text + unit
