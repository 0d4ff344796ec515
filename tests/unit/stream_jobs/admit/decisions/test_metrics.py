"""Test what admission counts of its decisions."""

from __future__ import annotations

from support.admit import policy, refused

from clawstream.schemas.records import BatchGroup, Late, PolicyApplied, ReadyBatch
from clawstream.stream_jobs.admit.decisions.metrics import DecisionMetrics

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


def shown(metrics: DecisionMetrics) -> dict[tuple[str, ...], float]:
    samples = (s for metric in metrics.registry.collect() for s in metric.samples)
    return {
        (s.name.removeprefix("clawstream_admit_"), *s.labels.values()): s.value
        for s in samples
        if s.name.endswith("_total")
    }


def test_the_totals_of_each_channel_are_zero_before_the_first_decision() -> None:
    names = ("batches_total", "groups_total", "tokens_total", "late_total")
    assert shown(DecisionMetrics(("train", "val"))) == {
        (name, channel): 0 for name in names for channel in ("train", "val")
    }


def test_each_decision_is_counted_by_channel_and_refusals_by_reason() -> None:
    metrics = DecisionMetrics(())
    for channel, decision in (
        ("train", BATCH),
        ("train", refused("c", reason="stale", trajectory_ids=("s", "t"))),
        ("train", refused("c", n=0, reason="stale", trajectory_ids=("u",))),
        ("train", refused("c", n=0, reason="replaced", trajectory_ids=("v",))),
        ("train", APPLIED),
        ("val", LATE),
    ):
        metrics.count(channel, decision)
    assert shown(metrics) == {
        ("batches_total", "train"): 1,
        ("groups_total", "train"): 2,
        ("tokens_total", "train"): 7,
        ("refused_groups_total", "train", "stale"): 1,
        ("refused_groups_total", "train", "replaced"): 0,
        ("refused_members_total", "train", "stale"): 3,
        ("refused_members_total", "train", "replaced"): 1,
        ("late_total", "val"): 1,
    }
