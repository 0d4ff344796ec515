"""Prometheus metrics of the gateway, one registry per application."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from schemas.records import StepStatus

ENDINGS = ("answered", "refused", "upstream_error", "aborted", "error", "not_recorded")
ACK_BUCKETS_S = (
    0.001,
    0.002,
    0.004,
    0.008,
    0.016,
    0.032,
    0.064,
    0.128,
    0.256,
    0.512,
    1.0,
    2.0,
    5.0,
    10.0,
)


class Metrics:
    """All metrics, with the prefix clawstream_gateway_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name, registry = "clawstream_gateway_", self.registry
        self.calls = Counter(
            name + "calls",
            "Model calls by outcome: answered; refused (no engine got the request); upstream_error "
            "(engine error forwarded); aborted (client left); error (engine failed midway); "
            "not_recorded",
            ["status"],
            registry=registry,
        )
        self.failed_calls = Counter(
            name + "failed_calls",
            "Authenticated calls that ended with an error: recorded (a FailedCall is on Kafka), "
            "lost (Kafka was unreachable or slow)",
            ["fate"],
            registry=registry,
        )
        self.steps_recorded = Counter(
            name + "steps_recorded",
            "Steps made durable, on Kafka or in the spool",
            ["status"],
            registry=registry,
        )
        self.steps_answered = Counter(
            name + "steps_answered", "Steps whose call was answered in full", registry=registry
        )
        self.steps_spooled = Counter(
            name + "steps_spooled",
            "Steps made durable in the spool, not on Kafka",
            registry=registry,
        )
        self.not_recorded = Counter(
            name + "not_recorded",
            "Attempts to record that both Kafka and the spool refused",
            registry=registry,
        )
        self.spool_full = Counter(
            name + "spool_full", "Calls refused because the spool is full", registry=registry
        )
        self.keys_refused = Counter(
            name + "keys_refused",
            "Requests refused: unknown (missing or unknown key), scope (the key lacks the scope)",
            ["reason"],
            registry=registry,
        )
        self.spool_bytes = Gauge(
            name + "spool_bytes", "Bytes waiting in the spool", registry=registry
        )
        self.spool_quarantined_bytes = Gauge(
            name + "spool_quarantined_bytes",
            "Bytes too old to be sent: run `clawstream spool drain`",
            registry=registry,
        )
        self.spool_damaged_bytes = Gauge(
            name + "spool_damaged_bytes",
            "Bytes of damaged spool segments, see `clawstream doctor`",
            registry=registry,
        )
        self.spool_unreadable_bytes = Counter(
            name + "spool_unreadable_bytes",
            "Unreadable bytes of spool segments, lost by the disk or truncated by a crash",
            registry=registry,
        )
        self.redaction_failed = Counter(
            name + "redaction_failed",
            "Records kept without contents because redaction failed",
            registry=registry,
        )
        self._in_flight = Gauge(name + "in_flight", "Model calls in flight", registry=registry)
        self.engines = Gauge(
            name + "engines",
            "1 for the current state of each engine: ready, out (its calls or probes failed), "
            "trying (one call tests it), resting (it replied 429), unknown (not probed yet); or "
            "the state that it reports: starting, loading, draining, failed, absent",
            ["engine", "state"],
            registry=registry,
        )
        self.engine_outages = Counter(
            name + "engine_outages", "Times an engine was taken out", ["engine"], registry=registry
        )
        self.upstream_retries = Counter(
            name + "upstream_retries",
            "Calls sent again because an engine was unreachable, busy (502, 503), limited (429), "
            "or broken (connection lost before the first byte of the body; it may have sampled)",
            ["reason"],
            registry=registry,
        )
        self.waiting = Gauge(
            name + "waiting", "Model calls waiting for an engine", registry=registry
        )
        self.ack_wait = Histogram(
            name + "ack_wait_seconds",
            "From the last token to a durable record",
            buckets=ACK_BUCKETS_S,
            registry=registry,
        )

        # Looked up once: a label lookup costs as much as the increment.
        self.ended = {ending: self.calls.labels(ending) for ending in ENDINGS}
        self.recorded = {
            status: self.steps_recorded.labels(status) for status in get_args(StepStatus)
        }

    def count_in_flight(self, count: Callable[[], float]) -> None:
        """Set the source of the gauge of calls in flight."""
        self._in_flight.set_function(count)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
