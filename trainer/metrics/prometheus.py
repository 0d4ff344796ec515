"""The metrics on an HTTP endpoint for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from schemas.errors import SettingsError
from schemas.settings import TrainerSettings
from trainer.metrics.definitions import METRICS

PREFIX = "clawstream_trainer_"
NEWEST = (PREFIX + "sync_index", "Sync index of the newest version.")
VALIDATED = (
    PREFIX + "val_sync_index",
    "Sync index of the version that the val metrics are about.",
)


class PrometheusEndpoint:
    """Serves /metrics in a thread. Totals are counters over the versions of this process, others
    gauges of the newest version. A metric appears with its first value.
    """

    def __init__(self, host: str, port: int) -> None:
        """Start to serve.

        Raises:
            SettingsError: the port cannot be used.
        """
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        try:
            self._server, self._thread = start_http_server(port, host, registry=self._registry)
        except OSError as e:
            raise SettingsError(
                f"setting trainer.metrics_port={port}: {host}:{port} can't be used: {e}"
            ) from e

    def write(self, sync_index: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a version."""
        validation = any(name.startswith("val/") for name in metrics)
        self._gauge(*(VALIDATED if validation else NEWEST)).set(sync_index)
        for name, value in metrics.items():
            if METRICS[name].total:
                self._counter(name).inc(value)
            else:
                self._gauge(*_named(name)).set(value)

    def _counter(self, name: str) -> Counter:
        if name not in self._counters:
            self._counters[name] = Counter(*_named(name), registry=self._registry)
        return self._counters[name]

    def _gauge(self, name: str, text: str) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, text, registry=self._registry)
        return self._gauges[name]

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
    return PREFIX + name.replace("/", "_"), metric.text + unit
