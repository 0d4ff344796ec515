"""Spans as values, and the trace that a record belongs to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from clawstream.schemas.ids import is_gateway_assigned, own_trace_id, parse_traceparent, span_id_of

Attribute = str | bool | int | float | tuple[str, ...]
Part = Literal["gateway", "assemble", "admit", "trainer", "rollout"]
"""Whose work a span shows."""
LINKS_MAX = EVENTS_MAX = 128
"""Most links, and most events, of a span: the limits of OpenTelemetry's SDKs."""


class SpanId(NamedTuple):
    """A span of a trace."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEvent:
    """Something at a moment of a span. at_us: microseconds."""

    name: str
    at_us: int
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span. Times are microseconds since the epoch; an end is never before the start.

    Attributes:
        parent_id: Parent in the same trace; None: the trace begins here.
        is_remote: The parent is the client's.
        error: Why it failed; None: it did not.
    """

    id: SpanId
    parent_id: str | None = None
    is_remote: bool = False
    part: Part
    name: str
    kind: Literal["internal", "server", "producer"] = "internal"
    start_us: int
    end_us: int
    attributes: Mapping[str, Attribute]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanId, ...] = ()
    error: str | None = None


class RecordPlace(NamedTuple):
    """Where a record lies, and its log timestamp."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    timestamp_ms: int

    @property
    def at_us(self) -> int:
        return self.timestamp_ms * 1000


class Parent(NamedTuple):
    """The trace of a call or trajectory, and its parent span; None: it is the root."""

    trace_id: str
    parent_id: str | None
    is_remote: bool


def parent_of_call(
    traceparent: str | None, run_id: str, key: str | None, call_id: str, own_traces: bool
) -> Parent | None:
    """Return the parent of a call's span; None: the call has no spans.

    Args:
        key: Trajectory key; None: not known.
        own_traces: A call without a trace context has a trace, too.
    """
    context = parse_traceparent(traceparent)
    if context is not None:
        return Parent(context.trace_id, context.span_id, True) if context.is_sampled else None
    if not own_traces or key is None:
        return None
    # Which trajectory of a gateway-assigned key it belongs to is decided later.
    parent = None if is_gateway_assigned(key) else trajectory_span_id(run_id, key)
    return Parent(own_trace_id(run_id, key, call_id), parent, False)


def parent_of_trajectory(
    traceparent: str | None, run_id: str, key: str, trajectory_id: str, own_traces: bool
) -> Parent | None:
    """Return the parent of a trajectory's span; None: the trajectory has no spans.

    Args:
        traceparent: Of its first call that has one.
    """
    context = parse_traceparent(traceparent)
    if context is not None:
        return Parent(context.trace_id, context.span_id, True) if context.is_sampled else None
    return Parent(own_trace_id(run_id, key, trajectory_id), None, False) if own_traces else None


def trajectory_span_id(run_id: str, trajectory_id: str) -> str:
    """Return the id of the span of a trajectory."""
    return span_id_of("trajectory", run_id, trajectory_id)


def attributes(**found: Attribute | None) -> dict[str, Attribute]:
    """Return Clawstream's own attributes that have a value."""
    return present({f"clawstream.{name}": value for name, value in found.items()})


def present(found: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    """Return the attributes that have a value."""
    return {name: value for name, value in found.items() if value is not None and value != ()}
