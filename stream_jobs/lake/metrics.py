"""Prometheus metrics of the lake writer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

FLUSH_BUCKETS_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class LakeMetrics:
    """All metrics, with the prefix clawstream_lake_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.rows = Counter("clawstream_lake_rows", "New rows", ("table",), registry=self.registry)
        self.flush = Histogram(
            "clawstream_lake_flush_seconds",
            "Time of one flush of all tables",
            buckets=FLUSH_BUCKETS_S,
            registry=self.registry,
        )
        self.flushed_at = Gauge(
            "clawstream_lake_last_flush_timestamp_seconds",
            "When everything read was last in the tables; its age is the age of the lake",
            registry=self.registry,
        )
        self.damaged = Gauge(
            "clawstream_lake_damaged_tables",
            "Tables that take no rows: see `clawstream status`",
            registry=self.registry,
        )
