"""Pairwise judges: which members are compared, and what they get for it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.admit import cand
from support.model_endpoint import Reply, chat, model_endpoint
from support.trajectories import answered

from clawstream.rewards.judge.comparison import ALONE, Comparison, Undecided, pairs, share_of_wins
from clawstream.rewards.judge.reward import judge
from clawstream.rewards.registry import GroupRule
from clawstream.rewards.results import rewards_of_group
from clawstream.schemas.records import Trajectory
from clawstream.schemas.settings.reward_models import Judge

IDS = st.lists(st.text("ab~0123", min_size=1, max_size=9), unique=True, max_size=12)


@given(IDS, st.none() | st.integers(1, 14), st.randoms())
def test_each_member_has_its_opponents_whatever_the_order(
    ids: list[str], opponents: int | None, random: Any
) -> None:
    chosen = pairs(ids, opponents)
    met = [frozenset(ids[i] for i in pair) for pair in chosen]
    assert len(set(met)) == len(met) and all(len(pair) == 2 for pair in met)
    most = len(ids) - 1 if opponents is None else min(opponents, len(ids) - 1)
    counts = Counter(i for pair in chosen for i in pair)
    assert sum(counts.values()) == len(ids) * most + (max(most, 0) * len(ids)) % 2
    assert all(most <= counts[i] <= most + 1 for i in range(len(ids)))
    shuffled = random.sample(ids, len(ids))
    again = {frozenset(shuffled[i] for i in pair) for pair in pairs(shuffled, opponents)}
    assert again == set(met)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6))
def test_the_reward_is_the_mean_of_the_wins(wins: list[float]) -> None:
    won = [Comparison(0, i, win, 1) for i, win in enumerate(wins, start=1)]
    value, detail = share_of_wins(0, won)
    assert value == sum(wins) / len(wins) and detail["tokens"] == len(wins)
    assert [share_of_wins(i, won)[0] for i in range(1, len(wins) + 1)] == [1 - w for w in wins]


def test_more_than_half_of_the_comparisons_count() -> None:
    down = [Undecided(0, i, RuntimeError("down")) for i in (1, 2)]
    assert share_of_wins(0, [Comparison(0, 3, 1.0), *down[:1]]) == "RuntimeError: down"
    found = share_of_wins(0, [Comparison(0, 3, 1.0), Comparison(0, 4, 0.5), *down[:1]])
    assert found[0] == 0.75 and found[1]["undecided"] == 1
    assert share_of_wins(5, down) == ALONE


def compared(
    folder: Path, answer: Callable[[str, str], Any], *group: Trajectory, **settings: Any
) -> tuple[list[Any], list[Any]]:
    """Return the results of a group, and the requests; `answer` gets what A and B have said."""

    def reply(body: Any) -> Reply:
        material = body["messages"][1]["content"].removeprefix("Assistant A\n\n")
        said = answer(*material.split("\n\nAssistant B\n\n"))
        return said if isinstance(said, tuple) else chat(json.dumps({"score": said}))

    async def work() -> Any:
        reward: Any = judge(
            {
                "type": "genrm", "per": "group", "url": endpoint.url, "model": "m",
                "rubric": "Short is good.", "cache_file": str(folder / "judges.sqlite"),
                "attempts": 1, **settings,
            }
        )  # fmt: skip
        return await reward(group)

    with model_endpoint(reply) as endpoint:
        return asyncio.run(work()), endpoint.requests


def members(*answers: str) -> Sequence[Trajectory]:
    return [replace(answered(a, q="6 * 7?"), trajectory_id=f"t{i}") for i, a in enumerate(answers)]


def test_members_get_their_share_of_wins(tmp_path: Path) -> None:
    group = members("1", "22", "333")
    found, requests = compared(tmp_path, lambda a, b: int(len(a) < len(b)), *group)
    assert [value for value, _ in found] == [1.0, 0.5, 0.0]
    assert found[0][1] == {"wins": [1.0, 1.0], "undecided": 0, "tokens": 40, "explanation": ""}
    system = requests[0][1]["messages"][0]["content"]
    assert len(requests) == 6 and "Short is good." in system and "1 if A is better" in system
    again, requests = compared(tmp_path / "other", lambda a, b: 1, *group)
    assert [value for value, _ in again] == [0.5] * 3  # always A: the orders disagree
    assert {body["messages"][1]["content"].count('"6 * 7?"') for _, body in requests} == {2}


def test_equal_members_are_not_asked_about(tmp_path: Path) -> None:
    found, requests = compared(tmp_path, lambda a, b: 1, *members("1", "1"))
    assert [value for value, _ in found] == [0.5, 0.5] and not requests


def test_a_member_that_cannot_be_shown_or_judged_costs_the_others_nothing(tmp_path: Path) -> None:
    bare = replace(answered("1"), trajectory_id="t9", metadata_json=None)
    refused: Callable[[str, str], Any] = lambda a, b: (400, "no") if "bad" in a + b else 1  # noqa: E731
    group = [*members("1", "22", "bad"), bare]
    first, second, bad, blind = compared(tmp_path, refused, *group, opponents=9)[0]
    assert blind == "ValueError: no metadata" and bad.startswith("EndpointError: HTTP 400")
    assert first.startswith("EndpointError") and second.startswith("EndpointError")  # half is lost
    group = [*members("1", "22", "333", "bad"), bare]
    found = compared(tmp_path, refused, *group)[0]
    assert [one[0] for one in found[:3]] == [0.5] * 3 and isinstance(found[3], str)


def test_one_that_can_be_shown_is_alone(tmp_path: Path) -> None:
    bare = replace(answered("1"), trajectory_id="t9", metadata_json=None)
    assert compared(tmp_path, lambda a, b: 1, *members("1"), bare)[0][0] == ALONE


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"url": "http://127.0.0.1:1", "timeout_s": 0.1},
            "NotServed: no reply of .* in 0.1 s: ClientConnectorError",
        ),
        ({"timeout_s": 0.2}, "EndpointError: no reply of .* in 0.2 s$"),
        ({"budget_calls": 1}, "OverBudget: over budget: 1 of 1 calls in 3600 s"),
    ],
    ids=["down", "slow", "over_budget"],
)
def test_a_judge_without_verdicts_is_the_recorded_reason(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    go_on = threading.Event()

    def asked(group: Sequence[Trajectory]) -> list[Any]:
        try:
            return compared(tmp_path, lambda a, b: int(go_on.wait()), *group, **settings)[0]
        finally:
            go_on.set()

    group = [(cand(one.trajectory_id), one) for one in members("1", "22", "333")]
    found = rewards_of_group(group, GroupRule("best", "1", asked), 0)
    assert [one.trajectory_id for one in found] == ["t0", "t1", "t2"]
    assert all(one.value is None and re.match(reason, str(one.reason)) for one in found), found


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"per": "group", "scale": 5}, "scale"), ({"per": "step", "opponents": 2}, "opponents")],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Judge(type="genrm", url="http://j", model="m", rubric="r", **settings)
