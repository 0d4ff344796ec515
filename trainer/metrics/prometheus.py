"""The metrics on an HTTP endpoint for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector

from schemas.errors import SettingsError
from schemas.settings import TrainerSettings
from trainer.metrics.definitions import METRICS, environment_of

PREFIX = "clawstream_trainer_"
NEWEST = (PREFIX + "sync_index", "Sync index of the newest version.")
VALIDATED = (
    PREFIX + "val_sync_index",
    "Sync index of the version that the val metrics are about.",
)


class PrometheusEndpoint(Collector):
    """Serves /metrics in a thread. Totals are counters over the versions of this process, others
    gauges of the newest version, and of the newest validation. A metric without a value is absent.
    """

    def __init__(self, host: str, port: int) -> None:
        """Start to serve.

        Raises:
            SettingsError: the port cannot be used.
        """
        # Replaced, never changed: the thread of the server reads them.
        self._totals: Mapping[str, float] = {}
        self._version: Mapping[str, float] = {}
        self._validation: Mapping[str, float] = {}
        self._indexes: Mapping[tuple[str, str], int] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry=registry)
        except OSError as e:
            raise SettingsError(
                f"setting trainer.metrics_port={port}: {host}:{port} can't be used: {e}"
            ) from e

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a version."""
        totals = {name: v for name, v in metrics.items() if METRICS[environment_of(name)[0]].total}
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

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield what a scrape shows, in the thread of the server."""
        for (name, text), index in self._indexes.items():
            yield GaugeMetricFamily(name, text, index)
        for name, total in self._totals.items():
            yield CounterMetricFamily(*_named(name), total)
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in {**self._version, **self._validation}.items():
            general, environment = environment_of(name)
            labels = {} if environment is None else {"environment": environment}
            if general not in families:
                families[general] = GaugeMetricFamily(*_named(general), labels=[*labels])
            families[general].add_metric([*labels.values()], value)
        yield from families.values()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def endpoint_of(settings: TrainerSettings) -> PrometheusEndpoint | None:
    """Return the endpoint of the settings; None without a port.

    Raises:
        SettingsError: the port cannot be used.
    """
    if settings.metrics_port is None:
        return None
    return PrometheusEndpoint(settings.metrics_host, settings.metrics_port)


def _named(name: str) -> tuple[str, str]:
    """Return name and description of a metric on the endpoint."""
    metric = METRICS[name]
    unit = f" ({metric.unit})" if metric.unit else ""
    return PREFIX + name.replace("<name>/", "").replace("/", "_"), metric.text + unit
