"""Spans of records: a list of records in, a list of spans out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from support.traced_records import (
    AT,
    batch,
    candidate,
    failed_call,
    member,
    refused,
    reward,
    step,
    traceparent,
    version,
    worker,
)

from clawstream.ops.tracing.calls import failed_call_spans, step_spans
from clawstream.ops.tracing.pipeline import (
    REVISIONS_MAX,
    batch_spans,
    candidate_spans,
    loaded_spans,
    refused_spans,
    trained_spans,
    version_spans,
)
from clawstream.ops.tracing.spans import LINKS_MAX, RecordPlace, Span, SpanId
from clawstream.schemas.ids import anonymous_session_key, call_span_id
from clawstream.schemas.records import (
    Candidate,
    FailedCall,
    ReadyBatch,
    Refused,
    Step,
    WeightVersion,
)

PLACE = RecordPlace("claw.x", "topic", 2, 7, AT + 3000)
TRACE, CLIENT = f"{1:032x}", f"{1:016x}"
CONTEXT = traceparent(0)


def spans_of(*events: Any, own_traces: bool = False) -> list[Span]:
    """Return the spans of records that follow each other on a partition."""
    found: list[Span] = []
    batches: list[ReadyBatch] = []
    for offset, event in enumerate(events):
        at = PLACE._replace(offset=offset)
        match event:
            case Step():
                found += step_spans(event, at, own_traces)
            case FailedCall():
                found += failed_call_spans(event, own_traces)
            case Candidate():
                found += candidate_spans(event, at, own_traces)
            case ReadyBatch():
                batches.append(event)
                found += batch_spans(event, at, own_traces)
            case Refused():
                found += refused_spans(event, at, own_traces)
            case WeightVersion():
                found += version_spans(event)
                found += trained_spans(event, batches, own_traces)
    return found


def one(spans: Iterable[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


def test_a_call_is_a_child_of_the_clients_span() -> None:
    call, sent = spans_of(step("k", traceparent=CONTEXT))
    assert call.id == SpanId(TRACE, call_span_id("k~C0"))
    assert (call.parent_id, call.is_remote, call.kind, call.part) == (
        CLIENT,
        True,
        "server",
        "gateway",
    )
    assert (call.name, call.start_us, call.end_us, call.error) == (
        "chat policy",
        AT * 1000,
        AT * 1000 + 250_000,
        None,
    )
    said = call.attributes
    assert said["gen_ai.response.time_to_first_chunk"] == 0.04
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (11, 5)
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert (said["clawstream.version"], said["clawstream.group_id"]) == ("run/3.0", "g")
    assert None not in said.values()
    assert (sent.id.trace_id, sent.parent_id) == (TRACE, call.id.span_id)
    assert (sent.name, sent.kind) == ("send claw.x", "producer")
    assert (sent.start_us, sent.end_us) == (call.end_us, (AT + 3000) * 1000)


@pytest.mark.parametrize("flags", [0, 2])
def test_calls_of_unsampled_traces_have_no_spans(flags: int) -> None:
    """Not even where calls without a context have a trace of their own."""
    context = traceparent(0, flags)
    events = [
        step("k", traceparent=context),
        failed_call("k", traceparent=context),
        candidate("k", traceparent=context),
        refused(("k", context)),
    ]
    assert spans_of(*events) == spans_of(*events, own_traces=True) == []
    whole = spans_of(batch(0, member("k", context)), own_traces=True)
    assert [(s.name, s.links) for s in whole] == [("batch", ())]


def test_calls_without_a_context_have_none_unless_they_get_their_own() -> None:
    events = [step("k"), step("k", "C1"), failed_call("k"), candidate("k"), refused(("k", None))]
    assert spans_of(*events) == []
    own = spans_of(*events, own_traces=True)
    assert len({span.id.trace_id for span in own}) == 1
    whole = one(own, "trajectory")
    assert whole.parent_id is None
    calls = [span for span in own if span.name == "chat policy"]
    assert [call.parent_id for call in calls] == [whole.id.span_id] * 3


def test_in_an_anonymous_session_only_the_first_call_is_known_to_be_of_a_trajectory() -> None:
    key = anonymous_session_key(b"key", b"turn")
    first, second = step(key, "C0"), step(key, "C1")
    closed = candidate(key, trajectory_id=f"{key}~C0")
    own = spans_of(first, second, closed, failed_call(None), own_traces=True)
    calls = [span for span in own if span.name == "chat policy"]
    assert [call.parent_id for call in calls] == [None, None]
    assert calls[0].id.trace_id == one(own, "trajectory").id.trace_id != calls[1].id.trace_id


def test_a_step_that_is_sent_again_adds_where_it_lies_and_changes_nothing() -> None:
    sent = step("k", traceparent=CONTEXT)
    first, again = spans_of(sent, sent)[:2], spans_of(sent, sent)[2:]
    assert first[0] == again[0] and first[1].id != again[1].id


def test_further_choices_are_children_of_the_call() -> None:
    one_, _, two, _ = spans_of(
        step("k", traceparent=CONTEXT), step("k", choice=1, traceparent=CONTEXT, usage=None)
    )
    assert (two.name, two.parent_id, two.is_remote) == ("choice", one_.id.span_id, False)
    assert two.id.span_id != one_.id.span_id and "gen_ai.usage.input_tokens" not in two.attributes


def test_calls_that_fail_say_why() -> None:
    aborted = spans_of(step("k", traceparent=CONTEXT, status="aborted", finish_reason=None))[0]
    assert (aborted.error, aborted.attributes["error.type"]) == ("aborted", "aborted")
    (failed,) = spans_of(failed_call("k", traceparent=CONTEXT))
    assert failed.id == SpanId(TRACE, call_span_id("k~F0")) and failed.error == "slow down"
    assert failed.end_us - failed.start_us == 12_500
    assert failed.attributes["http.response.status_code"] == 429


def test_no_span_ends_before_it_starts() -> None:
    """Clocks of gateways, brokers and event time differ."""
    early = PLACE._replace(timestamp_ms=1)
    found = [
        *step_spans(step("k", traceparent=CONTEXT, finished_at=1), early, False),
        *candidate_spans(candidate("k", 1, traceparent=CONTEXT, closed_at=2), early, False),
        *candidate_spans(candidate("k", traceparent=CONTEXT, closed_at=2), early, False),
        *batch_spans(batch(0, member("k", CONTEXT)), early, False),
        *refused_spans(refused(("k", CONTEXT)), early, False),
    ]
    assert len(found) == 8 and all(span.start_us <= span.end_us for span in found)


def test_a_trajectory_closes_and_gets_its_rewards() -> None:
    whole, first, second = spans_of(
        candidate("k", traceparent=CONTEXT), candidate("k", 1, traceparent=CONTEXT)
    )
    assert (whole.name, whole.parent_id, whole.is_remote) == ("trajectory", CLIENT, True)
    assert (whole.start_us, whole.end_us) == (AT * 1000, (AT + 1000) * 1000)
    assert whole.attributes["clawstream.outcome"] == "completed"
    assert first.parent_id == second.parent_id == whole.id.span_id and first.id != second.id
    assert (second.start_us, second.end_us) == ((AT + 1000) * 1000, (AT + 3000) * 1000)
    (event,) = second.events
    assert (event.name, event.at_us) == ("gen_ai.evaluation.result", second.end_us)
    assert event.attributes["gen_ai.evaluation.name"] == "rule/exact"
    assert event.attributes["gen_ai.evaluation.score.value"] == 0.5


def test_the_spans_of_a_trajectory_are_bounded() -> None:
    revisions = [candidate("k", n, traceparent=CONTEXT) for n in range(REVISIONS_MAX + 50)]
    assert len(spans_of(*revisions)) == REVISIONS_MAX + 2
    many = candidate("k", 1, traceparent=CONTEXT, rewards=(reward(),) * 1000)
    assert len(spans_of(many)[0].events) == 128
    whole = spans_of(batch(0, *(member(str(i), traceparent(i)) for i in range(200))))
    assert len(whole) == 201 and len(one(whole, "batch").links) == LINKS_MAX


def test_a_batch_and_its_trajectories_name_each_other() -> None:
    closed = spans_of(candidate("k", traceparent=CONTEXT))[0]
    whole, admitted = spans_of(batch(5, member("k", CONTEXT), member("untraced", None)))
    assert whole.parent_id is None and whole.links == (closed.id,)
    assert (admitted.id.trace_id, admitted.parent_id) == (TRACE, closed.id.span_id)
    assert admitted.links == (whole.id,) and whole.attributes["clawstream.members"] == 2
    assert whole.id.trace_id != TRACE


def test_a_refusal_says_why_in_the_trace_of_each_member() -> None:
    found = spans_of(refused(("k", CONTEXT), ("untraced", None)))
    assert [(span.name, span.id.trace_id) for span in found] == [("refuse", TRACE)]
    assert found[0].attributes["clawstream.reason"] == "zero_variance"


def test_a_version_is_in_the_traces_of_what_it_was_trained_on() -> None:
    batches = [batch(4, member("k", CONTEXT)), batch(5, member("other", traceparent(1)))]
    found = spans_of(*batches, version(3, "topic", 4, 5))
    whole = one(found, "version")
    made = [span.id for span in found if span.name == "batch"]
    assert [link.trace_id for link in whole.links[1:]] == [span.trace_id for span in made]
    trained = [span for span in found if span.name == "train"]
    parents = {span.id.span_id for span in found if span.name in ("batch", "admit")}
    assert {span.parent_id for span in trained} == parents and len(trained) == 4
    assert {span.links for span in trained} == {(whole.id,)}
    assert whole.end_us - whole.start_us == 2_000_000 and whole.parent_id is None
    (before,) = spans_of(version(2, None, None, None))
    assert whole.links[0] == before.id


def test_every_report_of_a_loading_gives_the_same_span() -> None:
    (whole,) = spans_of(version(3, None, None, None))
    first, again = [list(loaded_spans(worker("run/3.0", at))) for at in (1, 2)]
    assert first == again and (first[0].id.trace_id, first[0].parent_id) == whole.id
    assert first[0].end_us - first[0].start_us == 300_000
    boot = replace(worker("run/3.0", 1), loaded_at=None)
    assert list(loaded_spans(boot)) == list(loaded_spans(worker(None, 1))) == []
