"""Test what admission counts of its decisions."""

from __future__ import annotations

from support.admit import policy, refused

from schemas.records import BatchGroup, Late, PolicyApplied, ReadyBatch
from stream_jobs.admit.decisions.metrics import DecisionMetrics

BATCH = ReadyBatch(
    run_id="r", channel="train", batch_seq=0, policy_version=1, sync_every=1, algorithm="grpo",
    groups=tuple(BatchGroup(group_id=g, round=0, n=0, members=()) for g in "ab"),
    reward_weights={}, input_topic_id="t", input_partition=0, input_from=0, input_to=0,
    content_hash="", trainable_tokens=7, created_at_event_time=0,
)  # fmt: skip
LATE = Late(run_id="r", channel="val", trajectory_id="t", revision=1, input_to=0)
APPLIED = PolicyApplied(
    run_id="r", channel="train", policy=policy(), input_topic_id="t", from_offset=0
)


def test_each_decision_is_counted_by_channel_and_refusals_by_reason() -> None:
    metrics = DecisionMetrics()
    for channel, decision in (
        ("train", BATCH),
        ("train", refused("c", reason="stale")),
        ("train", APPLIED),
        ("val", LATE),
    ):
        metrics.count(channel, decision)
    samples = (s for metric in metrics.registry.collect() for s in metric.samples)
    assert {
        (s.name.removeprefix("clawstream_admit_"), *s.labels.values()): s.value
        for s in samples
        if s.name.endswith("_total")
    } == {
        ("batches_total", "train"): 1,
        ("groups_total", "train"): 2,
        ("tokens_total", "train"): 7,
        ("refused_total", "train", "stale"): 1,
        ("late_total", "val"): 1,
    }
