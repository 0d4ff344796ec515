"""The rewards of the pages are those of admission and training, whatever comes later."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from support.admit import cand
from support.admit import policy as policy_with
from support.inspector import Inspected, inspected

from clawstream.inspector.queries.group import group_of
from clawstream.inspector.queries.listing import open_rows
from clawstream.inspector.queries.overview import runs, series, totals
from clawstream.schemas.records import (
    BatchGroup,
    BatchMember,
    Place,
    PolicyApplied,
    ReadyBatch,
    RewardValue,
)
from clawstream.schemas.settings import Settings

pytestmark = pytest.mark.slow


def value(name: str, number: float, source: str = "env") -> RewardValue:
    return RewardValue(
        source=source, name=name, function_version="1", value=number, reward_revision=0
    )


AT = Place(topic_id="TT", partition=0, first_offset=0, last_offset=0)
A = cand("a", rewards=(value("tests", 0.0), value("format", 1.3)))
B = cand("b", rewards=(value("tests", 1.0), value("format", 0.1)))
C = cand("c", group="h", rewards=(value("tests", 0.5), value("format", 9.0)))
RATED = replace(A, revision=1, rewards=(*A.rewards, value("rating", 4.0, "human")))
BATCH = ReadyBatch(
    run_id="r", channel="train", batch_seq=7, policy_version=1, sync_every=1, algorithm="grpo",
    groups=(
        BatchGroup(group_id="g", round=0, n=2, members=tuple(
            BatchMember(
                trajectory_id=c.trajectory_id, trajectory_key=c.trajectory_id, revision=0, place=AT,
                rewards=c.rewards, untrainable_steps=(), trainable_tokens=5, oldest_sync_index=0,
            )
            for c in (A, B)
        )),
    ),
    reward_weights={"env/tests": 1.0}, input_topic_id="C", input_partition=0, input_from=0,
    input_to=1, content_hash="", trainable_tokens=10, created_at_event_time=0,
)  # fmt: skip


@pytest.fixture
def shown(tmp_path: Path) -> Inspected:
    return inspected(Settings(data_dir=tmp_path))


def applied(version: int, **weights: float) -> PolicyApplied:
    policy = policy_with(
        policy_version=version, reward_weights={f"env/{n}": w for n, w in weights.items()}
    )
    return PolicyApplied(
        run_id="r", channel="train", policy=policy, input_topic_id="C", from_offset=0
    )


def put(shown: Inspected, table: str, topic: str, *records: Any) -> None:
    shown.written.lake.put(table, topic, *records)
    assert shown.lake.refresh()


def rewards(shown: Inspected) -> dict[str, float | None]:
    found = shown.lake.rows("SELECT trajectory_id, reward FROM closed WHERE run_id = 'r'")
    return {row["trajectory_id"]: row["reward"] for row in found}


def test_they_follow_the_policy_and_then_the_batch_in_whatever_order_these_come(
    tmp_path: Path,
) -> None:
    events = [
        ("candidates", "DD", A, B, C), ("run_events", "EE", applied(1, tests=1.0)),
        ("groups", "BB", BATCH),
    ]  # fmt: skip
    for number, order in enumerate(permutations(events)):
        shown = inspected(Settings(data_dir=tmp_path / str(number)))
        for event in order:
            put(shown, *event)
        assert rewards(shown) == {"a": 0.0, "b": 1.0, "c": 0.5}


def test_they_are_the_sum_before_there_is_a_policy_and_change_with_it_until_the_batch(
    shown: Inspected,
) -> None:
    put(shown, "candidates", "DD", A, B, C)
    assert rewards(shown) == {"a": 1.3, "b": 1.1, "c": 9.5}
    assert "Mean sum of rewards" in shown.client.get("/runs/r").text
    put(shown, "run_events", "EE", applied(1, tests=1.0))
    assert rewards(shown) == {"a": 0.0, "b": 1.0, "c": 0.5}
    put(shown, "groups", "BB", BATCH)
    put(shown, "run_events", "EE", applied(2, tests=2.0))
    assert rewards(shown) == {"a": 0.0, "b": 1.0, "c": 1.0}


def test_a_late_rating_moves_nothing_that_was_trained_and_stands_beside_it(
    shown: Inspected,
) -> None:
    put(shown, "candidates", "DD", A, B)
    put(shown, "groups", "BB", BATCH)

    def told() -> Any:
        group = group_of(shown.lake, "r", "g", lambda *_: None)
        assert group is not None
        (members,) = group["rounds"].values()
        run = next(run for run in runs(shown.lake) if run["run_id"] == "r")
        return (
            rewards(shown), group["rewards"], [(m["advantage"], m["normalized"]) for m in members],
            run["reward"], totals(shown.lake, "r"), series(shown.lake, "r", "version", "train"),
            {row["trajectory_id"]: row["reward"] for row in open_rows(shown.lake, 9)},
        )  # fmt: skip

    before = told()
    assert before[0] == {"a": 0.0, "b": 1.0} and before[3] == 0.5
    assert before[2] == [(-0.5, pytest.approx(-(0.5**0.5))), (0.5, pytest.approx(0.5**0.5))]
    assert before[5]["reward"] == [0.5]
    put(shown, "candidates", "DD", RATED)
    assert told() == before
    listed = shown.client.get("/trajectories?run_id=r").text
    assert re.findall(r'title="human/(\w+)">([^<]*)<', listed) == [("rating", "4")]
    assert "training reward of batch 7" in listed
    page = shown.client.get("/t/r/a").text
    assert "came after batch 7" in page


def test_only_members_of_the_batch_are_compared(shown: Inspected) -> None:
    put(shown, "candidates", "DD", A, B, replace(C, group_id="g", round=0))
    put(shown, "groups", "BB", BATCH)
    found = group_of(shown.lake, "r", "g", lambda *_: None)
    assert found is not None
    members = [m for round_ in found["rounds"].values() for m in round_]
    assert {m["trajectory_id"]: m["advantage"] for m in members} == {"a": -0.5, "b": 0.5, "c": None}


def test_the_list_of_a_point_of_a_chart_has_its_trajectories_and_mean(shown: Inspected) -> None:
    more = [
        replace(cand(f"v{n}", rewards=(value("tests", n / 10),)), oldest_sync_index=n % 3,
                newest_sync_index=2, channel="val" if n % 5 == 4 else "train")
        for n in range(12)
    ]  # fmt: skip
    put(shown, "candidates", "DD", *more)
    page = shown.client.get("/runs/r").text
    (address,) = re.findall(r'data-list="([^"]*)"', page)
    found = shown.client.get("/runs/r/series.json?by=version").json()
    for version, mean in zip(found["x"], found["reward"], strict=True):
        listed = shown.client.get(address.replace("&amp;", "&") + str(version)).text
        shown_rewards = [
            float(text)
            for text in re.findall(r'class="num">([\d.]+)</span>\n<td class="r num"><span', listed)
        ]
        mine = [c for c in more if c.channel == "train" and c.oldest_sync_index == version]
        assert f'id="total">{len(mine)}<' in listed and len(shown_rewards) == len(mine)
        assert sum(shown_rewards) / len(shown_rewards) == pytest.approx(mean)
    assert json.dumps(found["x"]) == "[0, 1, 2]"
