"""The committed position of a consumer group, with the metadata that Kafka keeps beside it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import orjson


@dataclass(frozen=True, slots=True)
class CommitMetadata:
    """What a consumer says beside its position, for those who judge its lag.

    A position alone does not distinguish a consumer that works for long between two positions from
    a stalled one.

    Attributes:
        handled: One past the last record that it has handled, where its position has to stay before
            it, for example because a group waits for members.
        heartbeat_s: When it said that its work goes on, in seconds since the epoch.
    """

    handled: int | None = None
    heartbeat_s: int | None = None

    def __str__(self) -> str:
        """Return the metadata as Kafka keeps it: JSON, or nothing."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return orjson.dumps(said).decode() if said else ""


NO_METADATA = CommitMetadata()


def heartbeat(metadata: CommitMetadata = NO_METADATA) -> CommitMetadata:
    """Return metadata with a heartbeat of now, which differs from those of other seconds."""
    return replace(metadata, heartbeat_s=int(time.time()))


class Commit(NamedTuple):
    """A committed position. metadata: Any text, of any client."""

    offset: int
    metadata: str = ""

    @property
    def handled(self) -> int:
        """The offset below which the consumer has handled all records."""
        try:
            handled = orjson.loads(self.metadata)["handled"]
        except (ValueError, LookupError, TypeError):
            return self.offset
        return max(self.offset, handled) if isinstance(handled, int) else self.offset
