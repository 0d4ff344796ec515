"""Types of fields, and parts that several records share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

Int32 = Annotated[int, "Avro's int"]  # a plain int is Avro's long, of 64 bits
Millis = Annotated[int, "Avro's timestamp-millis"]
Micros = Annotated[int, "Avro's timestamp-micros"]
PackedInts = Annotated[bytes, "i32le"]  # as `clawstream.schemas.tokens` packs them
PackedFloats = Annotated[bytes, "f32le"]

# A field of one of these types has the string below the type as its doc, unless it has its own.
RunId = str
"""Run the record belongs to, `[a-z0-9-]{1,64}`; all state is keyed by (run_id, trajectory_key)."""
TrajectoryKey = str
"""What routes the record: a stateless function of the request. UTF-8 of it is the Kafka key."""
EventId = str
"""Unique id of this event; a second record with the same id is a producer retry and changes
nothing.
"""
CreatedAt = Micros
"""Writer's wall clock, microseconds since the epoch. Information only: nothing is decided by it."""
Channel = Literal["train", "val"]
"""Channel: train or val."""
Outcome = Literal["completed", "failed", "abandoned", "timed_out", "lost", "replaced"]
"""How it ended: completed, failed, abandoned, timed_out, lost, or replaced (by another trajectory
of its group).
"""
RewardSource = Literal["env", "rule", "model", "judge", "human", "next_state"]
"""Kind of origin: env, rule, model, judge, human or next_state."""

NAME_CHARS = 200
"""Most characters of a name, a version or a tag."""
TAGS_MAX = 50
"""Most tags of a step, or of a mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Which weight version sampled response tokens [start, end)."""

    version: str
    """Version id `<run>/<sync_index>.<attempt>`, as the engine itself reported it."""
    start: Int32
    """First token index, counted in response tokens of one step."""
    end: Int32
    """One past the last token index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Half-open range of token indexes."""

    start: Int32
    """Index of the first token."""
    end: Int32
    """One past the last index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A label with what it was concluded from."""

    name: str
    """Label, e.g. `sub_agent`, `title`, `compaction`."""
    evidence: str
    """The header or prompt marker that was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A field kept outside the record because of its size, content-addressed."""

    field: str
    """Name of the field it stands for."""
    url: str
    """Where the bytes are: a URL that fsspec opens."""
    sha256: str
    """Hex digest of the bytes."""
    size_bytes: int
    """Length of the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record lies: positions always name the topic's id."""

    topic_id: str
    """Kafka's topic id (UUID): the same name with another id is another topic."""
    partition: Int32
    """Partition."""
    first_offset: int
    """Offset of the first part."""
    last_offset: int
    """Offset of the last part, inclusive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValue:
    """One reward in one candidate revision: the current value of its (target, source, name)."""

    source: RewardSource
    name: str
    """Name of the function, judge or person's role."""
    function_version: str
    """Version of what computed it."""
    step_id: str | None = None
    """Step it is about; null: the whole trajectory."""
    value: float | None = None
    """The reward; null: an explicit `no_reward`, never to be read as 0.0."""
    reason: str | None = None
    """Why there is no value; null: there is one."""
    reward_revision: int
    """Revision set by its writer; the highest counts."""
