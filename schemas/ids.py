"""Ids of calls, steps, trajectories, weight versions and spans. Stateless and cheap to parse.

trajectory key   routes a record; the Kafka key is its UTF-8
call id          <trajectory key>~<ulid>
step id          <call id>.<choice index>
anonymous        anonymous-<32 hex digits>, a trajectory key: calls that name no trajectory;
session          assemble splits it into trajectories
agent session    agent-<agent>-<32 hex digits>, a trajectory key: the session of a known agent;
                 assemble splits it at pauses
trajectory id    the key; in an anonymous or agent session <key>~<ulid> of its first call
version id       <run id>/<sync index>.<attempt>
trace context    a span of a client (W3C, https://www.w3.org/TR/trace-context/)
span id, trace   hashes of the ids above, so that every process knows the span of a call, and a span
id of our own    that is exported twice is the same
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from functools import lru_cache
from typing import NamedTuple

from clawstream.schemas.errors import InvalidId

_BASE32 = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(a + b for a in _BASE32 for b in _BASE32)
_LETTERS = bytes(ord(_BASE32[byte & 31]) for byte in range(256))
"""Letter of each byte: each of the 32 letters is equally likely for a random byte."""
RUN_ID = re.compile(r"[a-z0-9-]{1,64}")
# A key travels in URLs, headers and file names, where `.` and `..` are no names; `~` separates the
# call's ulid, `/` and `,` separate ids elsewhere.
TRAJECTORY_KEY = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._:@=+-]{1,200}")
ANONYMOUS_PREFIX = "anonymous-"
ANONYMOUS_KEY = re.compile(ANONYMOUS_PREFIX + "[0-9a-f]{32}")
AGENT_PREFIX = "agent-"
AGENT_KEY = re.compile(AGENT_PREFIX + "[a-z0-9-]{1,64}-[0-9a-f]{32}")
GATEWAY_ASSIGNED_KEY = re.compile(f"{ANONYMOUS_KEY.pattern}|{AGENT_KEY.pattern}")
# Any text, but half a surrogate pair is none: JSON can spell it, UTF-8 cannot.
GROUP_ID = re.compile(r"(?!\.\.?\Z)[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
# version, trace id, span id, flags. The version ff and ids of zeros alone are invalid. Version 00
# ends here; a later one may go on behind another dash.
_TRACEPARENT = re.compile(
    "(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
TRACEPARENT_CHARS = 55
"""Length of a `traceparent` of version 00, and of that part of a later one."""
SAMPLED, RANDOM = 0x01, 0x02
"""Bits of the flags: the caller records its trace; the right half of the trace id is random."""
VERSION_ID = re.compile(r"([a-z0-9-]{1,64})/(\d{1,18})\.(\d{1,18})")


class Version(NamedTuple):
    """A parsed version id."""

    run_id: str
    sync_index: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.run_id}/{self.sync_index}.{self.attempt}"


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


def check_run_id(run_id: str) -> str:
    """Return `run_id`, or raise InvalidId."""
    if not RUN_ID.fullmatch(run_id):
        raise InvalidId(f"run id {run_id[:80]!r}: must match [a-z0-9-]{{1,64}}")
    return run_id


def is_run(key: bytes) -> bool:
    """Whether the key of a record is a run id."""
    return RUN_ID.fullmatch(key.decode(errors="replace")) is not None


def check_trajectory_key(key: str) -> str:
    """Return `key`, or raise InvalidId."""
    if not TRAJECTORY_KEY.fullmatch(key):
        raise InvalidId(
            f"trajectory key {key[:80]!r}: must be 1 to 200 of A-Z a-z 0-9 . _ : @ = + -, "
            "and neither . nor .."
        )
    return key


def check_group_id(group_id: str) -> str:
    """Return `group_id`, or raise InvalidId."""
    if not GROUP_ID.fullmatch(group_id):
        raise InvalidId(
            f"group id {group_id[:80]!r}: must be 1 to 200 printable characters, "
            "and neither . nor .."
        )
    return group_id


def new_ulid() -> str:
    """Return a new ulid (https://github.com/ulid/spec): 48 bits of milliseconds, 80 random bits.

    Implemented here for speed: every call needs one.
    """
    ms, pairs = time.time_ns() // 1_000_000, _PAIRS
    random = os.urandom(16).translate(_LETTERS).decode()
    return (
        f"{pairs[ms >> 40]}{pairs[ms >> 30 & 1023]}{pairs[ms >> 20 & 1023]}"
        f"{pairs[ms >> 10 & 1023]}{pairs[ms & 1023]}{random}"
    )


def new_call_id(trajectory_key: str) -> str:
    """A fresh call id; ulids sort by time of creation."""
    return f"{trajectory_key}~{new_ulid()}"


def new_event_id() -> str:
    """A fresh event id."""
    return new_ulid()


def step_id(call_id: str, choice_index: int) -> str:
    """Step id of the choice_index-th choice of a call."""
    return f"{call_id}.{choice_index}"


def key_of_step(step: str) -> str:
    """Trajectory key inside a step or call id; InvalidId when there is none."""
    key, sep, rest = step.rpartition("~")
    if not sep or not key or not rest:
        raise InvalidId(f"step id {step[:80]!r}: must be <trajectory key>~<ulid>.<choice>")
    return check_trajectory_key(key)


def anonymous_session_key(secret_part: bytes, first_user_turn: bytes) -> str:
    """Return the trajectory key of a call that names no trajectory.

    Args:
        secret_part: Distinguishes clients, e.g. the API key; cannot be derived from the result.
        first_user_turn: Canonical bytes of the first user message, shared by all calls of a
            conversation.
    """
    return ANONYMOUS_PREFIX + _hash(b"claw-anonymous", secret_part, first_user_turn)


def agent_key(agent: str, secret_part: bytes, session_id: str) -> str:
    """Return the trajectory key of a known agent's session.

    secret_part: As in `anonymous_session_key`. session_id: As the agent sends it.
    """
    hashed = _hash(b"claw-session", secret_part, session_id.encode("utf-8", "surrogateescape"))
    return f"{AGENT_PREFIX}{agent}-{hashed}"


def _hash(person: bytes, secret_part: bytes, rest: bytes) -> str:
    """32 hex digits."""
    begin = len(secret_part).to_bytes(8, "little") + secret_part
    return hashlib.blake2b(begin + rest, digest_size=16, person=person).hexdigest()


def is_anonymous_session(key: str) -> bool:
    """Return whether a key is an anonymous session: one client's conversations that began alike."""
    return ANONYMOUS_KEY.fullmatch(key) is not None


def is_gateway_assigned(key: str) -> bool:
    """Return whether the gateway assigned the key: an anonymous or an agent's session.

    Nothing ends such a trajectory but inactivity. The key may hold many trajectories, so a reward
    or completion must name a step.
    """
    return GATEWAY_ASSIGNED_KEY.fullmatch(key) is not None


def session_trajectory_id(key: str, ulid: str) -> str:
    """Return the trajectory id `<key>~<ulid>` in an anonymous or agent session.

    ulid: Of the trajectory's first call in log order.
    """
    return f"{key}~{ulid}"


def key_of_trajectory(trajectory_id: str) -> str:
    """The trajectory key of a trajectory id, which routes its records."""
    return trajectory_id.partition("~")[0]


def version_id(run_id: str, sync_index: int, attempt: int) -> str:
    """Version id `<run>/<sync_index>.<attempt>`."""
    return str(Version(check_run_id(run_id), sync_index, attempt))


@lru_cache(maxsize=4096)
def parse_version(version: str) -> Version | None:
    """The parts of a version id; None for any other label, such as the engine's `default`."""
    m = VERSION_ID.fullmatch(version)
    return Version(m[1], int(m[2]), int(m[3])) if m else None


def stable_id(*parts: str) -> str:
    """A deterministic event id: the same parts always give the same 32 hex digits."""
    return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()


def parse_traceparent(header: str | None) -> TraceContext | None:
    """Return the context of a `traceparent`, None for an invalid one or none."""
    found = _TRACEPARENT.fullmatch(header) if header is not None else None
    if found is None or (found[5] is not None and found[1] == "00"):
        return None
    return TraceContext(found[2], found[3], int(found[4], 16) & (SAMPLED | RANDOM))


def trace_id_of(kind: str, *parts: str) -> str:
    """Return the id of a trace that no client began. kind: Of the thing that the parts name."""
    return _hash_of_parts(16, b"claw-trace", kind, parts)


def span_id_of(kind: str, *parts: str) -> str:
    """Return the id of a span. kind: What the span shows, e.g. `call`; parts: Of what."""
    return _hash_of_parts(8, b"claw-span", kind, parts)


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


def _hash_of_parts(size: int, person: bytes, kind: str, parts: tuple[str, ...]) -> str:
    """Return hex digits of `size` bytes."""
    text = "\x1f".join((kind, *parts)).encode()
    return hashlib.blake2b(text, digest_size=size, person=person).hexdigest()
