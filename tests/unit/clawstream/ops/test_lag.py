"""Test the lag of groups whose topics come and go."""

from __future__ import annotations

from typing import Any, cast

from clawstream.ops.lag import data_lag
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
