"""A receiver of spans: what an OpenTelemetry collector does with OTLP/HTTP, kept in memory."""

from __future__ import annotations

import gzip
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

SpanKey = tuple[str, str]
"""Trace id and span id, in hex."""


class Receiver:
    """Keeps every span that it answered with success.

    Attributes:
        status: Of the next answers.
        refuses: Name of a span; requests with one are answered with 400.
        contents: Of each span, the bytes of each different content, with its service.
        spans: The last content of each span.
    """

    def __init__(self) -> None:
        self.status, self.refuses = 200, ""
        self.headers: list[dict[str, str]] = []
        self.contents: dict[SpanKey, set[bytes]] = defaultdict(set)
        self.spans: dict[SpanKey, Span] = {}
        self.services: dict[SpanKey, str] = {}
        self.requests = self.received = 0
        self.answer = ExportTraceServiceResponse()
        self._lock = threading.Lock()

    def take(self, request: ExportTraceServiceRequest) -> int:
        """Keep the spans of a request; return the status of the answer."""
        with self._lock:
            self.requests += 1
            found = [
                (of_resource.resource.attributes[0].value.string_value, span)
                for of_resource in request.resource_spans
                for of_scope in of_resource.scope_spans
                for span in of_scope.spans
            ]
            if self.refuses and any(span.name == self.refuses for _, span in found):
                return 400
            if self.status == 200:
                for service, span in found:
                    self.received += 1
                    key = span.trace_id.hex(), span.span_id.hex()
                    content = span.SerializeToString(deterministic=True)
                    self.contents[key].add(service.encode() + content)
                    self.spans[key], self.services[key] = span, service
            return self.status

    def named(self, name: str) -> list[Span]:
        """Return the spans with a name, by their start."""
        found = [span for span in list(self.spans.values()) if span.name == name]
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    @property
    def differing(self) -> list[SpanKey]:
        """The spans that came with two contents."""
        return [key for key, contents in self.contents.items() if len(contents) > 1]


def attributes(span: Span) -> dict[str, object]:
    """Return the attributes of a span as plain values."""
    found: dict[str, object] = {}
    for attribute in span.attributes:
        ((kind, value),) = MessageToDict(attribute.value).items()
        if kind == "arrayValue":
            value = [next(iter(item.values())) for item in value["values"]]
        found[attribute.key] = int(value) if kind == "intValue" else value
    return found


@contextmanager
def receiving(receiver: Receiver, port: int = 0) -> Iterator[int]:
    """Serve a receiver, and yield its port. Outside of the block connections are refused."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
            is_path = self.path == "/v1/traces"
            status = receiver.take(ExportTraceServiceRequest.FromString(body)) if is_path else 404
            answer = receiver.answer.SerializeToString() if status == 200 else b""
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
