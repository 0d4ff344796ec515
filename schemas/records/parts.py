"""Parts that several records share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Channel = Literal["train", "val"]
Outcome = Literal["completed", "failed", "abandoned", "timed_out", "lost", "replaced"]
NAME_CHARS = 200
"""Most characters of a name, a version or a tag."""
TAGS_MAX = 50
"""Most tags of a step, or of a mark."""
RewardSource = Literal["env", "rule", "model", "judge", "human", "next_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Which weight version sampled response tokens [start, end)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Half-open range of token indexes."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A label with what it was concluded from."""

    name: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A field kept outside the record because of its size, content-addressed."""

    field: str
    url: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a record lies: positions always name the topic's id."""

    topic_id: str
    partition: int
    first_offset: int
    last_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValue:
    """One reward in one candidate revision: the current value of its (target, source, name)."""

    source: RewardSource
    name: str
    function_version: str
    step_id: str | None = None
    value: float | None = None
    reason: str | None = None
    reward_revision: int
