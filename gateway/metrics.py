"""Prometheus metrics of the gateway, one registry per application."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from clawstream.schemas.records import StepStatus

ENDINGS = ("answered", "refused", "upstream_error", "aborted", "error", "not_recorded")
ACK_BUCKETS_S = (*(0.001 * 2**i for i in range(10)), 1.0, 2.0, 5.0, 10.0)
CALL_BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
PREFIX = "clawstream_gateway_"


class Metrics:
    """All metrics, with the prefix clawstream_gateway_."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=self.registry)

        self.calls = counter(
            "calls",
            "Model calls by outcome: answered; refused (no engine got the request); upstream_error "
            "(engine error forwarded); aborted (client left); error (engine failed midway); "
            "not_recorded",
            "status",
        )
        self.failed_calls = counter(
            "failed_calls",
            "Authenticated calls that ended with an error: recorded (a FailedCall is on Kafka), "
            "lost (Kafka was unreachable or slow)",
            "fate",
        )
        self.steps_recorded = counter(
            "steps_recorded", "Steps made durable, on Kafka or in the spool", "status"
        )
        self.steps_answered = counter("steps_answered", "Steps whose call was answered in full")
        self.steps_spooled = counter(
            "steps_spooled", "Steps made durable in the spool, not on Kafka"
        )
        self.continuations = counter(
            "continuations",
            "Steps of runs with gateway.exact_continuation: kept (the prompt continues the ids of "
            "the earlier turn), or why the prompt was rendered (see exact-continuation.md)",
            "outcome",
        )
        self.not_recorded = counter(
            "not_recorded", "Attempts to record that both Kafka and the spool refused"
        )
        self.spool_full = counter("spool_full", "Calls refused because the spool is full")
        self.keys_refused = counter(
            "keys_refused",
            "Requests refused: unknown (missing or unknown key), scope (the key lacks the scope)",
            "reason",
        )
        self.spool_bytes = gauge("spool_bytes", "Bytes waiting in the spool")
        self.spool_quarantined_bytes = gauge(
            "spool_quarantined_bytes", "Bytes too old to be sent: run `clawstream spool drain`"
        )
        self.spool_damaged_bytes = gauge(
            "spool_damaged_bytes", "Bytes of damaged spool segments, see `clawstream status`"
        )
        self.spool_unreadable_bytes = counter(
            "spool_unreadable_bytes",
            "Unreadable bytes of spool segments, lost by the disk or truncated by a crash",
        )
        self.redaction_failed = counter(
            "redaction_failed", "Records kept without contents because redaction failed"
        )
        self._in_flight = gauge("in_flight", "Model calls in flight")
        self.engines = gauge(
            "engines",
            "1 for the current state of each engine: ready, open (its calls or probes failed), "
            "half_open (one call tests it), cooldown (it replied 429), unknown (not probed yet); "
            "or the state that it reports: starting, loading, draining, failed, absent",
            "engine",
            "state",
        )
        self.engine_outages = counter("engine_outages", "Times an engine was taken out", "engine")
        self.failed_loads = gauge(
            "engine_failed_loads",
            "Failed attempts of a worker to load a weight version since its engine's start",
            "engine",
        )
        self.upstream_retries = counter(
            "upstream_retries",
            "Calls sent again because an engine was unreachable, busy (502, 503), limited (429), "
            "or broken (connection lost before the first byte of the body; it may have sampled)",
            "reason",
        )
        self.waiting = gauge("waiting", "Model calls waiting for an engine")

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=self.registry)

        self.ack_wait = histogram(
            "ack_wait_seconds", "From the last token to a durable record", ACK_BUCKETS_S
        )
        self.call = histogram(
            "call_seconds", "From the request's head to the end of an answered call", CALL_BUCKETS_S
        )
        self.first_token = histogram(
            "first_token_seconds",
            "From the request's head to the first bytes of a stream",
            CALL_BUCKETS_S,
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
