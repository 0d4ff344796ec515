"""The export over OTLP/HTTP, to a receiver that decodes it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2
from support.otlp import Receiver, attributes, receiving
from support.traced_records import batch, candidate, member, step, traceparent

from clawstream.ops.tracing.calls import step_spans
from clawstream.ops.tracing.metrics import TraceMetrics
from clawstream.ops.tracing.otlp import Collector
from clawstream.ops.tracing.pipeline import batch_spans, candidate_spans
from clawstream.ops.tracing.process import SpanSender
from clawstream.ops.tracing.spans import RecordPlace, Span
from clawstream.runtime.process.config import load
from clawstream.schemas.ids import call_span_id

PLACE = RecordPlace("claw.steps", "topic", 2, 7, 1_700_000_000_500)
CONTEXT = traceparent(0)


def spans() -> list[Span]:
    return [
        *step_spans(step("k", traceparent=CONTEXT, status="aborted"), PLACE, False),
        *candidate_spans(candidate("k", 1, traceparent=CONTEXT), PLACE, False),
        *batch_spans(batch(0, member("k", CONTEXT)), PLACE, False),
    ]


@contextmanager
def sending(
    receiver: Receiver, *words: str
) -> Iterator[tuple[SpanSender, TraceMetrics, threading.Event]]:
    """Yield a sender to a receiver that serves."""
    with receiving(receiver) as port:
        settings = load(None, [f"traces.endpoint=http://127.0.0.1:{port}", *words], {})
        assert settings.traces.url is not None
        metrics, stop = TraceMetrics(), threading.Event()
        with Collector(settings) as collector:
            yield SpanSender(collector, settings.traces.url, metrics, stop), metrics, stop


def value(metrics: TraceMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"clawstream_traces_{name}", labels)


def test_a_collector_gets_spans_with_all_that_they_say() -> None:
    receiver = Receiver()
    words = ("traces.headers={Authorization: Basic abc}", "traces.service_name=lab")
    with sending(receiver, *words) as (sender, metrics, _):
        assert sender.send([]) and sender.send(spans())
    assert receiver.headers[0]["authorization"] == "Basic abc" and receiver.requests == 1
    (call,) = receiver.named("chat policy")
    assert call.span_id.hex() == call_span_id("k~C0")
    assert (call.trace_id.hex(), call.parent_span_id.hex()) == (f"{1:032x}", f"{1:016x}")
    assert call.flags & trace_pb2.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert call.kind == trace_pb2.Span.SPAN_KIND_SERVER
    assert call.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    assert call.end_time_unix_nano - call.start_time_unix_nano == 250_000_000
    said = attributes(call)
    assert said["gen_ai.usage.input_tokens"] == 11 and said["gen_ai.request.stream"] is True
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    (assembled,), (whole,), (admitted,) = map(receiver.named, ("assemble", "batch", "admit"))
    assert assembled.events[0].name == "gen_ai.evaluation.result"
    assert admitted.links[0].span_id == whole.span_id and not whole.parent_span_id
    assert set(receiver.services.values()) == {"lab-gateway", "lab-assemble", "lab-admit"}
    assert value(metrics, "spans_total", fate="exported") == len(spans())


def test_only_the_span_is_dropped_that_a_collector_refuses() -> None:
    receiver = Receiver()
    receiver.refuses = "assemble"
    with sending(receiver) as (sender, metrics, _):
        assert sender.send(spans())
    assert {span.name for span in receiver.spans.values()} == {
        *("chat policy", "send claw.steps", "batch", "admit")
    }
    assert value(metrics, "spans_total", fate="rejected") == 1
    assert value(metrics, "spans_total", fate="exported") == 4


def test_what_a_collector_rejects_of_a_request_is_counted() -> None:
    receiver = Receiver()
    receiver.answer.partial_success.rejected_spans = 2
    receiver.answer.partial_success.error_message = "too old"
    with sending(receiver) as (sender, metrics, _):
        assert sender.send(spans())
    assert value(metrics, "spans_total", fate="rejected") == 2
    assert value(metrics, "spans_total", fate="exported") == 3


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 400, 401, 404, 500, 503])
def test_a_collector_that_takes_nothing_is_asked_again_until_the_process_stops(
    status: int,
) -> None:
    """Also one that redirects, which the exporter takes for a success, or calls all data bad."""
    receiver = Receiver()
    receiver.status = status
    with sending(receiver) as (sender, metrics, stop):
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(sender.send(spans())))
        thread.start()
        while receiver.requests < 2 and thread.is_alive():
            thread.join(0.01)
        receiver.status = 200
        thread.join()
        assert found == [True] and len(receiver.spans) == len(spans())
        receiver.status = status
        stop.set()
        assert not sender.send(spans())
    if status != 503:  # which the exporter itself sends again
        assert value(metrics, "failed_exports_total") >= 1  # type: ignore[operator]


def test_the_url_of_a_receiver() -> None:
    for endpoint in ("http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"):
        assert load(None, [f"traces.endpoint={endpoint}"], {}).traces.url == (
            "http://c:4318/v1/traces"
        )
    langfuse = load(None, ["traces.endpoint=https://langfuse.example/api/public/otel"], {})
    assert langfuse.traces.url == "https://langfuse.example/api/public/otel/v1/traces"
