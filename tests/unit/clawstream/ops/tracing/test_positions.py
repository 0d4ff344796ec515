"""Where spans are read from, and what the process remembers of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytest

from clawstream.ops.tracing.batches import KNOWN_MAX, TOPICS_MAX, BatchFinder
from clawstream.ops.tracing.topics import TracedTopics
from clawstream.runtime.kafka import Unavailable
from clawstream.schemas.settings import Settings
from clawstream.schemas.topics import Topics


class LosesALeader:
    """A cluster with a group's positions whose topic loses its leader after it was listed."""

    def topics(self, name: str | None = None) -> dict[str, int]:
        return {"claw.steps": 1} if name is None else {}

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        return dict.fromkeys(names, "id")

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        return {("claw.steps", 0): 7}

    def watermarks(
        self, topic: str, partitions: Iterable[int] | None = None
    ) -> dict[int, tuple[int, int]]:
        if list(self.topics(topic) if partitions is None else partitions):
            raise Unavailable("no leader")
        return {}

    def reader(self, *_: Any, **__: Any) -> LosesALeader:
        return self

    def add(self, start: object) -> None:
        """Read nothing."""

    def close(self) -> None:
        """Close nothing."""


def test_a_topic_that_loses_its_leader_is_not_taken_for_one_without_partitions() -> None:
    """Else none of its records would be read until the next start."""
    with pytest.raises(Unavailable):
        TracedTopics(cast(Any, LosesALeader()), Settings())


def test_what_is_remembered_of_batches_is_bounded() -> None:
    finder = BatchFinder(cast(Any, None), cast(Any, None), Topics("claw"))
    for run in range(2 * TOPICS_MAX):
        finder.note(str(run), 0, 0)
        finder.note("of all the time", run, run)
    for seq in range(2 * KNOWN_MAX):
        finder.note("long", seq, seq)
    assert len(finder.known) == TOPICS_MAX and len(finder.known["long"]) <= KNOWN_MAX
    assert len(finder.known["of all the time"]) == 2 * TOPICS_MAX
