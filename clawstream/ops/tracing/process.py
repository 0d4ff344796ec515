"""The process: read records, export their spans, commit. The protocol is in the package."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence

from clawstream.ops.tracing.batches import BatchFinder
from clawstream.ops.tracing.calls import failed_call_spans, step_spans
from clawstream.ops.tracing.metrics import TraceMetrics
from clawstream.ops.tracing.otlp import Collector, Exported
from clawstream.ops.tracing.pipeline import (
    batch_spans,
    candidate_spans,
    loaded_spans,
    refused_spans,
    trained_spans,
    version_spans,
)
from clawstream.ops.tracing.spans import RecordPlace, Span
from clawstream.ops.tracing.topics import TracedTopics
from clawstream.runtime.kafka import Cluster, Record, SourceTruncated, Unavailable
from clawstream.runtime.logs import logger
from clawstream.runtime.process.lifecycle import run_sync
from clawstream.runtime.process.metrics import serving_metrics
from clawstream.runtime.process.readiness import not_ready, ready
from clawstream.runtime.topics.access import check_access
from clawstream.runtime.topics.records import Decoder, cluster_of, create_topics
from clawstream.schemas.errors import SettingsError, Undecodable, UnknownSchema
from clawstream.schemas.records import (
    Candidate,
    FailedCall,
    ReadyBatch,
    Refused,
    Step,
    WeightVersion,
    WorkerStatus,
)
from clawstream.schemas.settings import Settings

PROCESS = "traces"
EXPORT_SPANS = 512
"""Spans of one request at most."""
MAX_RETRY_WAIT_S = 30.0
LOG_INTERVAL_S = 60.0
"""How often a collector that does not take spans is logged again."""


class SpanSender:
    """Sends spans until the collector has them. Spans that it refuses for good are dropped."""

    def __init__(
        self, collector: Collector, url: str, metrics: TraceMetrics, stop: threading.Event
    ) -> None:
        self._collector, self._url, self._metrics, self._stop = collector, url, metrics, stop
        self._failing_since: float | None = None
        self._logged_at = float("-inf")

    def send(self, spans: Sequence[Span]) -> bool:
        """Send some spans; False if `stop` was set before the collector had them."""
        if not spans:
            return True
        wait_s = 1.0
        while not self._stop.is_set():
            outcome = self._collector.export(spans)
            if outcome.taken:
                self._taken(len(spans), outcome)
                return True
            self._metrics.failures.inc()
            # A collector that refuses even an empty request does not refuse these spans.
            if outcome.refuses_data and self._collector.export([]).taken:
                return self._halve(spans, outcome)
            self._failed(outcome)
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_WAIT_S)
        return False

    def _halve(self, spans: Sequence[Span], outcome: Exported) -> bool:
        """Send both halves, so that only the span is lost that the collector refuses."""
        middle = len(spans) // 2
        if middle:
            return self.send(spans[:middle]) and self.send(spans[middle:])
        (span,) = spans
        self._metrics.spans.labels("rejected").inc()
        logger().error("span_rejected", span=span.name, id=span.id, error=outcome.detail)
        return True

    def _taken(self, count: int, outcome: Exported) -> None:
        self._metrics.spans.labels("exported").inc(count - outcome.rejected)
        if outcome.rejected:
            self._metrics.spans.labels("rejected").inc(outcome.rejected)
            logger().error("spans_rejected", spans=outcome.rejected, error=outcome.detail)
        if self._failing_since is not None:
            seconds = round(time.monotonic() - self._failing_since)
            logger().info("collector_is_back", url=self._url, after_s=seconds)
            self._failing_since, self._logged_at = None, float("-inf")
            ready(self._url)

    def _failed(self, outcome: Exported) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            not_ready(f"{self._url} takes no spans: {outcome.detail}")
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger().warning(
                "collector_takes_no_spans", url=self._url, error=outcome.detail,
                hint="nothing is lost: positions stay until it takes them",
            )  # fmt: skip


class SpanReader:
    """Derives the spans of records. Repeats a look-up that Kafka does not answer."""

    def __init__(
        self, cluster: Cluster, settings: Settings, metrics: TraceMetrics, stop: threading.Event
    ) -> None:
        self._decoder = Decoder(cluster, settings.kafka.topics.schemas)
        self._batches = BatchFinder(cluster, self._decoder, settings.kafka.topics)
        self._own_traces = settings.traces.gives_own_traces
        self._metrics, self._stop = metrics, stop
        self._loaded: dict[str, tuple[str | None, int | None]] = {}

    def spans(self, record: Record, at: RecordPlace) -> list[Span]:
        """Return the spans of a record. Empty if `stop` is set while Kafka is away."""
        if record.value is None or self._decoder.codec.is_tick(record.value):
            return []
        while not self._stop.is_set():
            try:
                return list(self._spans(record.value, at))
            except (Undecodable, UnknownSchema):  # its owner reports it
                self._metrics.unreadable.inc()
                return []
            except Unavailable as error:
                logger().warning("traces_wait_for_kafka", error=str(error))
                self._stop.wait(1.0)
        return []

    def _spans(self, value: bytes, at: RecordPlace) -> Iterator[Span]:
        match self._decoder.decode(value):
            case Step() as step:
                yield from step_spans(step, at, self._own_traces)
            case FailedCall() as call:
                yield from failed_call_spans(call, self._own_traces)
            case Candidate() as candidate:
                yield from candidate_spans(candidate, at, self._own_traces)
            case ReadyBatch() as batch:
                self._batches.note(at.topic_id, batch.batch_seq, at.offset)
                yield from batch_spans(batch, at, self._own_traces)
            case Refused() as refused:
                yield from refused_spans(refused, at, self._own_traces)
            case WeightVersion() as version:
                yield from version_spans(version)
                batches = self._batches.batches_of(version)
                yield from trained_spans(version, batches, self._own_traces)
            case WorkerStatus() as status:
                loaded = (status.weight_version, status.loaded_at)
                if self._loaded.get(status.worker_id) != loaded:  # not at every heartbeat
                    self._loaded[status.worker_id] = loaded
                    yield from loaded_spans(status)


def trace(settings: Settings, stop: threading.Event) -> None:
    """Export spans until `stop`.

    Raises:
        SettingsError: `traces.endpoint` is not set.
    """
    url = settings.traces.url
    if url is None:
        raise SettingsError("setting traces.endpoint: set it, nothing takes the spans")
    cluster, metrics = cluster_of(settings), TraceMetrics()
    create_topics(cluster, settings)
    check_access(cluster, settings, PROCESS)
    with serving_metrics(settings, PROCESS, metrics.registry), Collector(settings) as collector:
        sender = SpanSender(collector, url, metrics, stop)
        while not stop.is_set():
            topics = TracedTopics(cluster, settings)
            ready(url)
            try:
                _follow(topics, SpanReader(cluster, settings, metrics, stop), sender, metrics, stop)
            except SourceTruncated as error:  # read from what the log still has
                logger().warning("traces_topic_changed", error=str(error))
            finally:
                topics.close()


def _follow(
    topics: TracedTopics,
    reader: SpanReader,
    sender: SpanSender,
    metrics: TraceMetrics,
    stop: threading.Event,
) -> None:
    while not stop.is_set():
        spans: list[Span] = []
        for record in topics.poll():
            spans += reader.spans(record, topics.place(record))
            while len(spans) >= EXPORT_SPANS:
                if not sender.send(spans[:EXPORT_SPANS]):
                    return
                del spans[:EXPORT_SPANS]
        if stop.is_set() or not sender.send(spans):
            return
        metrics.exported_at.set_to_current_time()
        topics.commit()
    topics.commit(now=True)


def main(settings: Settings) -> None:
    """Run the process. Never returns."""
    # The exporter logs each failure; `SpanSender` does so at a bounded rate.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    run_sync(PROCESS, settings, trace)
