"""The comparison job on a real Kafka: a group is compared, and a killed worker's group as well."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.jobs import Eventually, Jobs, running, session, step
from support.model_endpoint import Reply, chat, model_endpoint

from clawstream.ops.monitoring.rules import PATIENCE_S
from clawstream.ops.monitoring.watch import LagWatch
from clawstream.runtime.kafka import Cluster
from clawstream.schemas.records import Candidate, Reward
from clawstream.schemas.settings import Settings
from clawstream.schemas.settings.reward_models import Judge


def shorter(body: Any) -> Reply:
    """Prefer the shorter of two members."""
    first, second = body["messages"][1]["content"].split("\n\nAssistant B\n\n")
    if "slow" in second:
        threading.Event().wait()
    return chat(json.dumps({"score": int(len(first) < len(second) + len("Assistant A\n\n"))}))


def member(key: str, group: str, answer: str) -> list[Any]:
    said = replace(step(key, [1], [2]), response_json=orjson.dumps({"content": answer}))
    opened = session(key, "opened", metadata_json=b"{}", group_id=group, group_size=2)
    return [opened, said, session(key, "completed")]


def compared(jobs: Jobs) -> dict[str, Reward]:
    """Return the reward of each trajectory; all records of it have one identity and value.

    A worker that was killed repeats a comparison with the judge's cached verdicts, so the tokens
    that the details count may differ.
    """
    found = dict[str, Reward]()
    for _, reward in jobs.records(jobs.topics.rewards, Reward):
        reward = replace(reward, created_at=0, detail_json=None)
        assert reward == found.setdefault(reward.trajectory_key, reward)
    return found


@pytest.mark.long
def test_members_of_a_group_are_compared(
    settings: Settings, cluster: Cluster, tmp_path: Path, eventually: Eventually
) -> None:
    with model_endpoint(shorter) as endpoint:
        judge = Judge(
            type="genrm", url=endpoint.url, model="m", rubric="Short is good.", per="group"
        )
        functions: dict[str, Any] = {
            "reward_models": {"best": judge},
            "reward_functions": {"*": ("best@3",)},
        }
        with running(settings, cluster, tmp_path, **functions) as jobs:
            jobs.start()
            worker = jobs.start(job="compare")
            jobs.put(*member("a", "g", "22"), *member("waits", "h", "1"), *member("b", "g", "1"))
            jobs.producer.flush()
            first = eventually(lambda: found if len(found := compared(jobs)) == 2 else None, 180)
            assert {key: one.value for key, one in first.items()} == {"a": 0.0, "b": 1.0}
            assert {(r.source, r.name, r.reward_revision) for r in first.values()} == {
                ("judge", "best", 3)
            }
            eventually(lambda: all(jobs.candidates()[key].rewards for key in "ab"), 180)
            (waiting,) = (
                record
                for record, c in jobs.records(jobs.topics.candidates, Candidate)
                if c.trajectory_id == "waits"
            )
            watch, since = LagWatch(cluster, jobs.settings), time.monotonic()
            while time.monotonic() - since < PATIENCE_S + 5:
                (held,) = (
                    b
                    for b in watch.poll()
                    if (b.group, b.topic, b.partition)
                    == (f"{jobs.topics.prefix}-compare", waiting.topic, waiting.partition)
                )
                assert (held.position <= waiting.offset, held.status) == (True, "ok"), held
                time.sleep(1.0)
            worker.kill()
            worker.wait()
            positions = cluster.committed(f"{jobs.topics.prefix}-compare")
            assert positions[waiting.topic, waiting.partition] <= waiting.offset
            worker = jobs.start(job="compare")
            jobs.put(*member("late", "h", "1"))
            jobs.producer.flush()
            both = eventually(lambda: found if len(found := compared(jobs)) == 4 else None, 180)
            assert (both["waits"].value, both["late"].value) == (0.5, 0.5)  # equal, nothing asked
            assert len(endpoint.requests) == 2  # one pair in both orders, once
            jobs.put(*member("c", "s", "slow"), *member("d", "s", "slower"))
            jobs.producer.flush()
            eventually(lambda: len(endpoint.requests) == 4, 180)
            assert jobs.processes.stop(worker, 10) == 0  # it does not wait for the judge
            assert len(compared(jobs)) == 4
