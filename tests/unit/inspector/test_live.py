"""The newest trajectories, as a fold over records, and their reader."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from support.admit import cand
from support.export_lake import turn

from clawstream.inspector.live import feed, recent
from clawstream.inspector.live.feed import Live
from clawstream.inspector.live.recent import Recent, with_rewards
from clawstream.runtime.kafka import KafkaError
from clawstream.schemas.records import RewardValue, SessionEvent


class NoLake:
    """A lake without rows."""

    failed: ClassVar[dict[str, str]] = {}

    def rows(self, *_: Any) -> list[dict[str, Any]]:
        return []

    def find(self, search: str) -> tuple[tuple[()], float]:
        return (), 1.0

    def refresh(self) -> bool:
        return False

    def newest_commit_s(self) -> None:
        return None

    def close(self) -> None:
        """Nothing is open."""


OPENED = SessionEvent(
    event_id="e", run_id="run", trajectory_key="a", kind="opened", group_id="g", created_at=0
)


def test_a_trajectory_opens_grows_and_closes() -> None:
    seen = Recent()
    assert seen.fold(OPENED, 1000)
    seen.fold(turn("a", 0, [1], [2]), 2000)
    (row,) = seen.rows(5)
    assert (row["steps"], row["outcome"], row["group_id"], row["said"]) == (1, None, "g", "[2]")
    assert str(row["at"]) == "1970-01-01 00:00:02"
    reward = RewardValue(
        source="env", name="score", function_version="1", value=0.5, reward_revision=0
    )
    seen.fold(cand("a", run_id="run", trajectory_key="a", rewards=(reward,)), 3000)
    (row,) = with_rewards(seen.rows(5), {}, {})
    assert (row["outcome"], row["reward"]) == ("completed", 0.5)
    weights = {("run", "train"): {"env/score": 2.0}}
    assert with_rewards(seen.rows(5), {}, weights)[0]["reward"] == 1.0
    assert with_rewards(seen.rows(5), {("run", "a"): -1.0}, weights)[0]["reward"] == -1.0


def test_a_mark_of_a_closed_trajectory_is_no_news() -> None:
    seen = Recent()
    for number, key in enumerate("ab"):
        seen.fold(cand(key, trajectory_key=key), number)
    assert seen.fold(cand("a", trajectory_key="a", revision=1, rewards=()), 9)
    assert not seen.fold(cand("old", trajectory_key="old", revision=4), 10)
    assert [(row["trajectory_id"], len(row["rewards"])) for row in seen.rows(9)] == [
        ("b", 1), ("a", 0),
    ]  # fmt: skip


class Decided(NoLake):
    """A lake with the decided reward of trajectory a."""

    def rows(self, query: str, *_: Any) -> list[dict[str, Any]]:
        known = {"run_id": "r", "trajectory_id": "a", "reward": 0.25}
        return [known] if "FROM closed" in query else []


def test_the_live_list_shows_the_reward_of_admission() -> None:
    live = Live(Decided(), None)
    for number, key in enumerate("ab"):
        live.take(cand(key, trajectory_key=key), number)
    assert [row["reward"] for row in live.rows()] == [1.0, 0.25]
    live.take(cand("a", trajectory_key="a", revision=1, value=9.0), 9)
    assert [row["reward"] for row in live.rows()] == [1.0, 0.25]


def test_the_newest_comes_first_and_the_oldest_is_forgotten() -> None:
    seen = Recent()
    for number in range(recent.KEPT + 1):
        seen.fold(turn(f"k{number}", 0, [1], [2]), number)
    seen.fold(turn("k5", 1, [1], [2]), 10**6)
    rows = seen.rows(recent.KEPT + 1)
    assert [r["trajectory_id"] for r in rows[:2]] == ["k5", f"k{recent.KEPT}"]
    assert len(rows) == recent.KEPT and rows[-1]["trajectory_id"] == "k1"


def test_the_newest_of_one_run() -> None:
    seen = Recent()
    for number, run in enumerate(("a", "b", "a", "b")):
        seen.fold(turn(f"k{number}", 0, [1], [2], run_id=run), number)
    assert [row["trajectory_id"] for row in seen.rows(1, "a")] == ["k2"]
    assert [row["trajectory_id"] for row in seen.rows(9, "b")] == ["k3", "k1"]


def test_other_records_change_nothing() -> None:
    seen = Recent()
    assert not seen.fold(object(), 1) and seen.rows(1) == []


def test_a_step_that_is_read_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader begins a little before the end of its topics, also after a lost connection."""
    monkeypatch.setattr(feed, "RETRY_S", 0.0)
    ends = [lambda: None, _lose_the_broker]

    def follow(take: Callable[[Any, int], None], stop: threading.Event) -> None:
        take(turn("a", 0, [1], [2]), 1000)
        if len(ends) == 1:
            stop.set()
        ends.pop()()

    live = Live(NoLake(), follow)
    live._read()
    assert not ends and [row["steps"] for row in live._recent.rows(5)] == [1]


def _lose_the_broker() -> None:
    raise KafkaError("no broker answers")
