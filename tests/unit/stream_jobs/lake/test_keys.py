"""A dead letter that is sent again much later: only the table still contains its id."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.small_lake import SmallLake

from clawstream.schemas.records import Reward
from clawstream.schemas.settings import Settings
from clawstream.stream_jobs.lake.delta.table import dataset, open_table
from clawstream.stream_jobs.lake.keys import existing_keys


def reward(n: int) -> Reward:
    return Reward(
        event_id=f"e{n}", run_id="r", trajectory_key="k", source="env", name="n",
        function_version="1", value=1.0, reward_revision=0, created_at=1,
    )  # fmt: skip


@pytest.mark.slow
def test_what_comes_again_is_looked_up_in_all_of_the_table(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    lake = SmallLake(settings, window=5)
    for first in range(0, 40, 10):
        assert lake.put("rewards", "RR", *map(reward, range(first, first + 10))) == 10
    assert lake.put("rewards", "RR", reward(1)) == 1, "the window knows the newest ids only"
    lake.lake.redelivered.update({("RR", 0, 41), ("RR", 0, 42), ("RR", 0, 43)})
    assert lake.put("rewards", "RR", reward(2), reward(99), reward(3), reward(98)) == 2
    lake.lake.redelivered.clear()
    table = dataset(open_table(settings.lake_uri, "rewards", {}), {})
    assert existing_keys(
        table, ("run_id", "event_id"), {("r", "e2"), ("r", "e77"), ("s", "e2")}
    ) == {("r", "e2")}
    assert sorted(table.to_table(columns=["event_id"]).column(0).to_pylist()) == sorted(
        [f"e{n}" for n in (*range(40), 1, 98, 99)]
    )
