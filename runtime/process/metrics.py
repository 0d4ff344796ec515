"""Serve the metrics of a process to Prometheus, at /metrics, from a thread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from clawstream.runtime.process.ports import taken
from clawstream.schemas.settings import Settings


class DiskSpace(Collector):
    """Space of the file system that has the data directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics without values."""
        yield GaugeMetricFamily(
            "clawstream_disk_free_bytes", "Free space of the file system of data_dir"
        )
        yield GaugeMetricFamily("clawstream_disk_size_bytes", "Its size")

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; none while the directory does not exist."""
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return
        for metric, blocks in zip(self.describe(), (found.f_bavail, found.f_blocks), strict=True):
            metric.add_sample(metric.name, {}, blocks * found.f_frsize)
            yield metric


def add_process_metrics(registry: CollectorRegistry, settings: Settings) -> None:
    """Add what every process has: CPU, memory, files (`process_*`) and the space of its disk."""
    ProcessCollector(registry=registry)
    registry.register(DiskSpace(settings.data_dir))


@contextmanager
def serving_metrics(
    settings: Settings, process: str, registry: CollectorRegistry
) -> Iterator[None]:
    """Serve a registry while the block runs; nothing without `metrics.port`.

    Raises:
        PortTaken: Another process listens on the port.
    """
    host, port = settings.metrics.host, settings.metrics.port_of(process)
    if port is None:
        yield
        return
    add_process_metrics(registry, settings)
    try:
        server, thread = start_http_server(port, host, registry=registry)
    except OSError as error:
        raise taken(host, port, f"the metrics of {process}", "metrics.port", error) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
