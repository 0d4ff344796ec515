"""Test the lag of groups whose topics come and go."""

from __future__ import annotations

from typing import Any, cast

from clawstream.ops.lag import Backlog, by_topic, data_lag, format_lag
from clawstream.runtime.kafka import Commit
from clawstream.schemas.settings import Settings


class LosesALeader:
    """A cluster whose topic loses its leader after it was listed."""

    def topics(self) -> dict[str, int]:
        return {"claw.trajectories": 1}

    def commits(self, group: str) -> dict[tuple[str, int], Commit]:
        return {}

    def watermarks(self, topic: str) -> dict[int, tuple[int, int]]:
        return {}


def test_a_partition_without_a_leader_is_left_out() -> None:
    assert data_lag(cast(Any, LosesALeader()), Settings(), "claw-reward") == 0


def test_partitions_of_a_topic_are_one_line() -> None:
    rows = [
        Backlog("g", "t", partition, 4, 0, 7, True, None, 3 + partition, True, 1_000)
        for partition in range(2)
    ]
    (line,) = format_lag(by_topic(rows, 11.0)).splitlines()[1:]
    assert line.split() == ["g", "t", "2", "8", "14", "6", "7", "10"]
