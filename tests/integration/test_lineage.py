"""Lineage over the outputs of the real jobs, admission and lake writer.

Every step on the log is accounted for.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from support.feed import POLICY, Feed, reward, step
from support.up import up

from clawstream.ops.lag import data_lag
from clawstream.query.connection import connect
from clawstream.query.lineage import Lineage
from clawstream.schemas.records import (
    Late,
    ReadyBatch,
    StepTraining,
    TrainedTrajectory,
    WeightVersion,
)
from clawstream.schemas.settings import Settings

RUN = "traced"


def trained(feed: Feed, version: str, batch: ReadyBatch) -> None:
    """Write what a trainer says of a batch of which it trained each step."""
    for member in batch.groups[0].members:
        key = member.trajectory_key
        step_id = next(s for s in feed.steps if s.startswith(f"{key}~"))
        record = TrainedTrajectory(
            run_id=RUN, trajectory_key=key, trajectory_id=member.trajectory_id, version_id=version,
            batch_seq=batch.batch_seq, steps=(StepTraining(step_id=step_id),),
        )  # fmt: skip
        feed.producer.put(feed.topics.trained_tokens, key.encode(), feed.codec.encode(record))


def test_every_step_is_accounted_for(kafka: str, tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {
            "run_id": RUN,
            "data_dir": tmp_path / "data",
            "kafka": {
                "bootstrap_servers": kafka,
                "topic_prefix": f"t{uuid4().hex[:10]}",
                "partitions": 2,
            },
            "jobs": {"tick_interval_s": 0.3},
            "admit": {"policy": POLICY},
            "lake": {"flush_interval_s": 0.2},
            "up": {"processes": ["assemble", "admit", "lake"]},
        }
    )
    feed = Feed(settings)
    journal = feed.topics.ready_batches(RUN, "train")
    with up(settings) as running:
        for batch, name in enumerate(("a", "b", "c")):
            feed.group(name)
            running.until(lambda n=batch + 1: len(feed.batches()) == n, f"{name} is admitted", 180)
        feed.put(reward(RUN, "a-0", 9.0, step_id=feed.steps[0]))
        late = step(RUN, "b-1")
        feed.put(late)
        running.until(lambda: feed.events(journal, Late), "a reward came too late")
        for sync, first in ((0, None), (1, 0), (2, 1)):
            version = WeightVersion(
                version_id=f"{RUN}/{sync}.0", run_id=RUN, sync_index=sync, attempt=0, format="full",
                files=(), channel="train", parent_version=f"{RUN}/{sync - 1}.0" if sync else None,
                batches_topic_id=feed.cluster.topic_id(journal), first_batch_seq=first,
                last_batch_seq=first, metrics={}, created_at=0,
            )  # fmt: skip
            feed.producer.put(
                feed.topics.weights, version.version_id.encode(), feed.codec.encode(version)
            )
            if first is not None:
                trained(feed, version.version_id, feed.batches()[first])
        feed.producer.flush()
        running.until(
            lambda: len(feed.column("weights", "version_id")) == 3, "the versions are in the lake"
        )
        running.until(
            lambda: late.step_id in feed.column("step_marks", "step_id"), "the late step is marked"
        )
        running.until(
            lambda: feed.column("late_revisions", "revision"), "the late reward is in the lake"
        )
        running.until(
            lambda: set(feed.steps) == set(feed.column("steps", "step_id")),
            "every step is in the lake",
        )
        running.until(
            lambda: len(feed.column("groups", "group_id")) == 3, "every group is in the lake"
        )
        group = f"{feed.topics.prefix}-lake"
        running.until(
            lambda: data_lag(feed.cluster, settings, group) == 0, "the lake has read all topics"
        )
        running.stop()
    feed.close()

    lineage = Lineage(connect(settings))
    for sync, name in ((1, "a"), (2, "b")):
        said = lineage.weights(f"{RUN}/{sync}.0")
        (batch,) = said["batches"]
        (group,) = batch["groups"]
        assert (batch["batch_seq"], group["group_id"]) == (sync - 1, name)
        assert sorted(m["reward"] for m in group["members"]) == [0.0, 1.0]
        steps = {s["step_id"]: s for m in group["members"] for s in m["steps"]}
        assert steps.keys() == {
            s for s in feed.steps if s.startswith(f"{name}-") and s != late.step_id
        }
        assert all(s["trained"] and s["sampled_by"] == [f"{RUN}/0.0"] for s in steps.values())
        assert said["totals"]["not_in_lake"] == []
    verdicts = {s: lineage.step(s)[0]["verdict"] for s in feed.steps}
    for s, verdict in verdicts.items():
        if s == late.step_id:
            assert verdict.startswith("late, so not trained: closed as completed")
        else:
            by = {
                "a": f"trained by {RUN}/1.0",
                "b": f"trained by {RUN}/2.0",
                "c": "which no version was trained on yet",
            }
            assert verdict.endswith(by[s[0]])
    (first,) = lineage.trajectory("a-0")
    assert [v["descendants"] for v in first["trained_by"]] == [[f"{RUN}/2.0"]]
    assert [r["missed_batch_seq"] for r in first["late_revisions"]] == [0]
    assert lineage.run(RUN)["batches"][0]["trained"] == 2
