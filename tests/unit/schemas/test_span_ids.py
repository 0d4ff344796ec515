"""Trace contexts of clients, and the ids of our spans."""

from __future__ import annotations

import pytest

from clawstream.schemas.ids import (
    TraceContext,
    anonymous_session_key,
    call_span_id,
    new_call_id,
    own_trace_id,
    parse_traceparent,
    span_id_of,
    trace_id_of,
)

TRACE, SPAN = "ab" * 16, "cd" * 8


@pytest.mark.parametrize(
    ("flags", "kept", "is_sampled"),
    [("00", "00", False), ("01", "01", True), ("02", "02", False), ("03", "03", True),
     ("fe", "02", False), ("ff", "03", True)],
)  # fmt: skip
def test_bit_0_says_whether_a_trace_is_sampled(flags: str, kept: str, is_sampled: bool) -> None:
    """Of the other bits only the one of a random trace id has a meaning that is kept."""
    found = parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}")
    assert found is not None and found.is_sampled is is_sampled
    assert found.header == f"00-{TRACE}-{SPAN}-{kept}"


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
        (f"cc-{TRACE}-{SPAN}-01.what-the-future-will-be-like", False),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f" 00-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
        (None, False),
    ],
)
def test_what_is_a_trace_context(header: str | None, is_valid: bool) -> None:
    """The cases of section 3.2 of the specification, with version 00 and later ones."""
    found = parse_traceparent(header)
    assert found == (TraceContext(TRACE, SPAN) if is_valid else None)


def test_ids_depend_on_what_they_name_alone() -> None:
    ids = [call_span_id("k~1"), call_span_id("k~2"), span_id_of("admit", "k~1")]
    ids += [span_id_of("a", "b", "c"), span_id_of("a", "bc"), span_id_of("ab", "c")]
    assert len(set(ids)) == len(ids) and {len(i) for i in ids} == {16}
    assert call_span_id("k~1") == ids[0] and len(trace_id_of("batch", "t", "1")) == 32


def test_a_trajectory_and_its_calls_share_a_trace_of_their_own() -> None:
    first, second = new_call_id("task-1"), new_call_id("task-1")
    shared = own_trace_id("r", "task-1", "task-1")
    assert own_trace_id("r", "task-1", first) == own_trace_id("r", "task-1", second) == shared
    assert own_trace_id("other", "task-1", first) != shared
    key = anonymous_session_key(b"key", b"turn")
    first, second = new_call_id(key), new_call_id(key)
    assert own_trace_id("r", key, first) != own_trace_id("r", key, second)
