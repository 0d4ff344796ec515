"""Export spans over OTLP/HTTP. The only module that imports OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from clawstream.ops.tracing.spans import Part, Span, SpanId
from clawstream.schemas.settings import Settings

TIMEOUT_S = 10.0
"""Of one request, and of the exporter's own retries of it."""
KINDS = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "producer": SpanKind.PRODUCER,
}
SCOPE = InstrumentationScope("clawstream")
REFUSES_DATA = (400, 413, 422)
"""Statuses that mean the spans themselves, or their size: the same request fails again."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What became of a request.

    Attributes:
        taken: The collector has the spans, all but `rejected` ones.
        status: Of the HTTP reply; None: there was none.
        rejected: Spans that the collector does not accept, by its own count.
        detail: Its message, or the error.
    """

    taken: bool
    status: int | None
    rejected: int
    detail: str

    @property
    def refuses_data(self) -> bool:
        return self.status in REFUSES_DATA


class ObservedSession(requests.Session):  # type: ignore[misc]
    """Keeps the outcome of the last request: the exporter says no more than whether it failed."""

    outcome: requests.Response | Exception | None = None

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Send a request."""
        try:
            self.outcome = super().request(*args, **kwargs)
        except Exception as error:
            self.outcome = error
            raise
        return self.outcome


class Collector:
    """A receiver of spans, as a `with` block."""

    def __init__(self, settings: Settings) -> None:
        url = settings.traces.url
        assert url is not None
        self._name = settings.traces.service_name
        self._session = ObservedSession()
        self._exporter = OTLPSpanExporter(
            url,
            headers=dict(settings.traces.headers),
            timeout=TIMEOUT_S,
            compression=Compression.Gzip,
            session=self._session,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def export(self, spans: Iterable[Span]) -> Exported:
        """Send spans in one request, and wait for the answer."""
        self._session.outcome = None
        result = self._exporter.export(self.readable(spans))
        reply = self._session.outcome
        if not isinstance(reply, requests.Response):
            return Exported(False, None, 0, f"no answer: {reply}")
        # The exporter takes a redirection for a success.
        if result is not SpanExportResult.SUCCESS or reply.status_code >= 300:
            text = reply.text[:200].strip()
            detail = f"status {reply.status_code} {reply.reason}{f': {text}' if text else ''}"
            return Exported(False, reply.status_code, 0, detail)
        return Exported(True, reply.status_code, *_partial_success(reply))

    def readable(self, spans: Iterable[Span]) -> Sequence[ReadableSpan]:
        """Return spans as the SDK exports them."""
        return [_readable(span, _resource(self._name, span.part)) for span in spans]


@cache
def _resource(name: str, part: Part) -> Resource:
    return Resource({SERVICE_NAME: f"{name}-{part}"})


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    parent = None
    if span.parent_id is not None:
        parent = _context(SpanId(span.id.trace_id, span.parent_id), span.is_remote)
    return ReadableSpan(
        span.name,
        context=_context(span.id),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[
            Event(event.name, dict(event.attributes), event.at_us * 1000) for event in span.events
        ],
        links=[Link(_context(linked)) for linked in span.links],
        kind=KINDS[span.kind],
        status=Status() if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_us * 1000,
        end_time=span.end_us * 1000,
        instrumentation_scope=SCOPE,
    )


def _context(span: SpanId, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote, flags)


def _partial_success(reply: requests.Response) -> tuple[int, str]:
    """Return how many spans the collector rejected, and its message."""
    if "json" in reply.headers.get("content-type", "") or not reply.content:
        return 0, ""
    try:
        partial = ExportTraceServiceResponse.FromString(reply.content).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message
