"""Prometheus metrics of the export of spans."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class TraceMetrics:
    """All metrics, with the prefix clawstream_traces_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.spans = Counter(
            "clawstream_traces_spans",
            "Spans by what became of them: exported, or rejected by the collector",
            ("fate",),
            registry=self.registry,
        )
        self.failures = Counter(
            "clawstream_traces_failed_exports",
            "Requests that the collector did not take; the spans are sent again",
            registry=self.registry,
        )
        self.unreadable = Counter(
            "clawstream_traces_unreadable_records",
            "Records without spans, because they cannot be decoded",
            registry=self.registry,
        )
        self.exported_at = Gauge(
            "clawstream_traces_last_export_timestamp_seconds",
            "When everything read was last with the collector",
            registry=self.registry,
        )
        for fate in ("exported", "rejected"):
            self.spans.labels(fate)
