"""Prometheus metrics of the inspector. They name routes, nothing that pages show."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class PageMetrics:
    """All metrics, with the prefix clawstream_inspector_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.pages = Histogram(
            "clawstream_inspector_page_seconds",
            "From a request to the first byte of its reply, by the route",
            ["route", "status"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.watching = Gauge(
            "clawstream_inspector_live_pages",
            "Open pages that wait for changes",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
