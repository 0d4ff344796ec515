"""Any float, any text and any size in records of agents, people and reward functions, while all
processes run.

No process ends, each record has a row or a dead letter, each trajectory is admitted or refused, and
good groups are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.feed import GROUP_SIZE, POLICY, Feed, reward, session, step
from support.hostile import Hostile, recordable
from support.up import Up, up

from clawstream.schemas.records import (
    Assessment,
    Candidate,
    Curation,
    Refused,
    Reward,
    TrainedTokens,
)
from clawstream.schemas.settings import Settings

RUN = "hostile"
TESTS = Path(__file__).parent.parent / "support"
PROCESSES = ("assemble", "reward", "admit", "lake", "trainer")
TABLES = {
    "steps": "step_id", "session_events": "event_id", "failed_calls": "event_id",
    "rewards": "event_id", "curation": "event_id", "assessments": "event_id",
}  # fmt: skip


class Installation:
    """Hostile groups, each followed by a good one."""

    def __init__(self, running: Up, feed: Feed) -> None:
        self.up, self.feed = running, feed

    def put(self, seed: int) -> None:
        """Write a hostile group."""
        hostile, feed = Hostile(seed, RUN), self.feed
        for number in range(GROUP_SIZE):
            for event in hostile.member(f"bad-{seed}", number, GROUP_SIZE):
                if recordable(feed.codec, event):
                    mark = isinstance(event, Reward | Curation | Assessment)
                    topic = feed.topics.rewards if mark else feed.topics.steps
                    key = event.trajectory_key or event.event_id  # a failed call may have no key
                    feed.producer.put(topic, key.encode(), feed.codec.encode(event))
                    feed.producer.flush()

    def trains(self, group: str) -> None:
        self.feed.group(group)
        self.up.until(lambda: group in self.feed.groups(), f"{group} is admitted")

    def settled(self) -> None:
        """Wait until every record and every trajectory has its end."""
        self.up.until(lambda: not self._without_row(), "each record has a row or a dead letter")
        self.up.until(lambda: not self._undecided(), "each trajectory is admitted or refused")
        batches = self.feed.batches()
        self.up.until(
            lambda: max((v.sync_index for v in self.feed.versions()), default=0) >= len(batches),
            "each batch has its version",
        )
        assert {name: self.up.table[name]["restarts"] for name in PROCESSES} == dict.fromkeys(
            PROCESSES, 0
        )

    def _without_row(self) -> list[Any]:
        topics = (self.feed.topics.steps, self.feed.topics.rewards)
        dead = {(d.topic, d.partition, d.offset) for d in self.feed.dead()}
        there = {i for table, name in TABLES.items() for i in self.feed.column(table, name)}
        return [
            (topic, record.offset)
            for topic in topics
            for record in self.feed.records(topic)
            if (topic, record.partition, record.offset) not in dead
            and (found := self._id(record.value)) is not None
            and found not in there
        ]

    def _id(self, value: bytes | None) -> str | None:
        """Return the id of a record; None for a tick."""
        event: Any = self.feed.codec.decode(value)
        return (
            getattr(event, "step_id", None)
            if hasattr(event, "call_id")
            else getattr(event, "event_id", None)
        )

    def _undecided(self) -> set[str]:
        topic = self.feed.topics.ready_batches(RUN, "train")
        decided = {
            m.trajectory_id for b in self.feed.batches() for g in b.groups for m in g.members
        }
        for refused in self.feed.events(topic, Refused):
            decided |= set(refused.trajectory_ids)
        closed = self.feed.events(self.feed.topics.candidates, Candidate)
        return {c.trajectory_id for c in closed if c.channel == "train"} - decided


@pytest.fixture(scope="module")
def there(
    kafka: str, tmp_path_factory: pytest.TempPathFactory, model_dir: Path
) -> Iterator[Installation]:
    policy = POLICY | {"reward_deadline_s": 3, "group_deadline_s": 3, "drop_zero_variance": False}
    settings = Settings.model_validate(
        {
            "run_id": RUN,
            "data_dir": tmp_path_factory.mktemp("hostile") / "data",
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 1,
            },
            "functions": {"dirs": [TESTS], "processes": 1},
            "jobs": {
                "reward_functions": {"*": ["own_functions.py:anything@1", "exact_match@1"]},
                "tick_interval_s": 0.3,
                "orphan_after_s": 5,
            },
            "admit": {"policy": policy},
            "trainer": {"model_path": model_dir, "device": "cpu"},
            "lake": {"flush_interval_s": 0.2},
            "up": {"processes": list(PROCESSES)},
        }
    )
    feed = Feed(settings)
    with up(settings) as running:
        yield Installation(running, feed)
        running.stop()
    feed.close()


def test_a_version_that_an_agent_invents_costs_only_its_batch(there: Installation) -> None:
    for number in range(GROUP_SIZE):
        key, version = f"invented-{number}", f"{RUN}/5.7"
        said = replace(step(RUN, key), version_first=version, version_last=version)
        opened = session(RUN, key, "opened", group_id="invented", group_size=GROUP_SIZE)
        there.feed.put(opened, said, session(RUN, key, "completed"), reward(RUN, key, number))
    there.trains("after-invented")
    there.settled()
    (letter,) = (d for d in there.feed.dead() if d.reason == "untrainable")
    assert letter.process == "trainer" and f"tokens of {RUN}/5.7" in letter.detail
    trained = there.feed.events(there.feed.topics.trained_tokens, TrainedTokens)
    assert {t.batch_seq for t in trained} == {1}


def test_hostile_values_end_no_process(there: Installation) -> None:
    for number in range(GROUP_SIZE):
        key = f"worst-{number}"
        there.feed.put(
            session(RUN, key, "opened", group_id="worst", group_size=GROUP_SIZE),
            step(RUN, key),
            reward(RUN, key, -sys.float_info.max),
            session(RUN, key, "completed"),
        )
    for seed in range(12):
        there.put(seed)
    there.trains("good")
    there.settled()
    assert any(group.startswith("bad-") for group in there.feed.groups()), "some get that far"
    assert "worst" not in there.feed.groups()
    assert "-1.79769e+308 is not in [-1e+06, 1e+06]" in {
        d.detail.partition(": ")[2].partition(";")[0] for d in there.feed.dead()
    }


@pytest.mark.long
def test_many_hostile_values_end_no_process(there: Installation) -> None:
    for round_ in range(10):
        for seed in range(1000 + 40 * round_, 1040 + 40 * round_):
            there.put(seed)
        there.trains(f"good-{round_}")
    there.settled()
