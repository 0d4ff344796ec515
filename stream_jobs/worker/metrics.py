"""Prometheus metrics of a worker of assemble, reward or compare."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BATCH_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


class JobMetrics:
    """All metrics, with the prefix clawstream_job_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.records = Counter(
            "clawstream_job_records",
            "Records that the worker has processed, ticks included",
            registry=self.registry,
        )
        self.batch = Histogram(
            "clawstream_job_batch_seconds",
            "Time to process the fetched records of one partition",
            buckets=BATCH_BUCKETS_S,
            registry=self.registry,
        )
        self.partitions = Gauge(
            "clawstream_job_partitions",
            "Partitions that the worker has; 0 during a rebalance",
            registry=self.registry,
        )
