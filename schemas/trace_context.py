"""Trace contexts (https://www.w3.org/TR/trace-context/) and the ids of Clawstream's spans. Pure.

The ids are hashes of the ids of the records, so that every process knows the span of a call, a
trajectory, a batch and a version without asking, and a span that is exported twice is the same.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from schemas.ids import is_anonymous_session

# version, trace id, span id, flags. The version ff and ids of zeros alone are invalid. Version 00
# ends here; a later one may go on behind another dash.
_TRACEPARENT = re.compile(
    "(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
TRACEPARENT_CHARS = 55
"""Length of a `traceparent` of version 00, and of that part of a later one."""
SAMPLED, RANDOM = 0x01, 0x02
"""Bits of the flags: the caller records its trace; the right half of the trace id is random."""


class TraceContext(NamedTuple):
    """A span of a trace, as another process names it.

    Attributes:
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        flags: `SAMPLED` and `RANDOM`; others are not known.
    """

    trace_id: str
    span_id: str
    flags: int = SAMPLED

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    @property
    def header(self) -> str:
        """The value of `traceparent`, in version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags & (SAMPLED | RANDOM):02x}"


def parse_traceparent(header: str | None) -> TraceContext | None:
    """Return the context of a `traceparent`, None for an invalid one or none."""
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is None or (found[5] is not None and found[1] == "00"):
        return None
    return TraceContext(found[2], found[3], int(found[4], 16) & (SAMPLED | RANDOM))


def trace_id_of(kind: str, *parts: str) -> str:
    """Return the id of a trace that no client began. kind: Of the thing that the parts name."""
    return _hash(16, b"claw-trace", kind, parts)


def span_id_of(kind: str, *parts: str) -> str:
    """Return the id of a span. kind: What the span shows, e.g. `call`; parts: Of what."""
    return _hash(8, b"claw-span", kind, parts)


def call_span_id(call_id: str) -> str:
    """Return the id of the gateway's span of a call: the parent of the engine's own spans."""
    return span_id_of("call", call_id)


def own_trace_id(run_id: str, trajectory_key: str, first_call_id: str) -> str:
    """Return the id of the trace of a call or trajectory whose client sends no context.

    It is that of the trajectory key. An anonymous session is shared by unrelated conversations, so
    there a trajectory is known by its first call alone: the trace is that of the call.

    Args:
        first_call_id: Of a call its own id; of a trajectory its id, which in an anonymous session
            is the id of its first call.
    """
    named = first_call_id if is_anonymous_session(trajectory_key) else trajectory_key
    return trace_id_of("trajectory", run_id, named)


def _hash(size: int, person: bytes, kind: str, parts: tuple[str, ...]) -> str:
    """Return hex digits of `size` bytes."""
    text = "\x1f".join((kind, *parts)).encode()
    return hashlib.blake2b(text, digest_size=size, person=person).hexdigest()
