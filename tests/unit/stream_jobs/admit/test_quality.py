"""Quality, curation and tags in admission; groups that wait for an assessment."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.admit import cand, fold, groups, policy, refusals, reward, tick

from clawstream.schemas.records import Candidate, CandidateStep, Late, ReadyBatch, Refused, RunEnded
from clawstream.stream_jobs.admit.policy import policy_rejection


def steps(tid: str, *changes: dict[str, Any]) -> tuple[CandidateStep, ...]:
    """Return steps of five tokens each."""
    plain = {"response_tokens": 5, "trainable": True, "oldest_sync_index": 0}
    return tuple(
        CandidateStep(step_id=f"{tid}~{i}.0", index=i, **{**plain, **c})
        for i, c in enumerate(changes)
    )


def many(tid: str, *changes: dict[str, Any], **more: Any) -> Candidate:
    """Return a trajectory of these steps."""
    return cand(tid, steps=steps(tid, *changes), trainable_tokens=5 * len(changes), **more)


def revised(c: Candidate, **changes: Any) -> Candidate:
    return dataclasses.replace(c, revision=c.revision + 1, **changes)


def members(decisions: list[Any]) -> dict[str, tuple[tuple[str, ...], int, int | None]]:
    """Map each admitted member to its untrainable steps, trainable tokens and oldest sync index."""
    return {
        m.trajectory_id: (m.untrainable_steps, m.trainable_tokens, m.oldest_sync_index)
        for d in decisions if isinstance(d, ReadyBatch) for g in d.groups for m in g.members
    }  # fmt: skip


def test_steps_below_the_quality_are_not_trained() -> None:
    strict = policy(min_step_quality=0.5)
    a = many("a", {"quality": 0.4}, {"quality": 0.5}, {"quality": None})
    out = fold(strict, a, cand("b", value=0.0))
    assert members(out) == {"a": (("a~0.0",), 10, 0), "b": ((), 5, 0)}
    (batch,) = out
    assert isinstance(batch, ReadyBatch) and batch.trainable_tokens == 15
    nothing_left = fold(
        policy(min_step_quality=0.5, group_size=3),
        many("a", {"quality": 0.0}),
        cand("b"),
        cand("c", value=0.0),
    )
    assert refusals(nothing_left) == [("untrainable", ("a",), False)]


def test_the_steps_left_out_count_for_no_staleness() -> None:
    strict = policy(min_step_quality=0.5, max_staleness=0, batch_groups=1)
    first = (cand("x", "f"), cand("y", "f", value=0.0))  # batch 0; the next batch trains version 1
    fresh = {"oldest_sync_index": 1}
    old = many("a", {"quality": 0.1}, fresh, oldest_sync_index=0)
    other = many("b", fresh, oldest_sync_index=1, value=0.0)
    assert members(fold(strict, *first, old, other))["a"] == (("a~0.0",), 5, 1)
    assert refusals(fold(policy(max_staleness=0), *first, old, other)) == [
        ("stale", ("a", "b"), True)
    ]
    unnamed = many(
        "a",
        {"quality": 0.1, "oldest_sync_index": None},
        {"oldest_sync_index": None},
        oldest_sync_index=0,
    )
    assert refusals(fold(strict, *first, unnamed, other)) == [("stale", ("a", "b"), True)], (
        "of an older release: all count"
    )


def test_a_trajectory_below_the_quality_is_refused_with_the_numbers() -> None:
    out = fold(
        policy(min_quality=0.5, group_size=3),
        cand("a", quality=0.25),
        cand("b"),
        cand("c", value=0.0),
    )
    (refused,) = (d for d in out if isinstance(d, Refused))
    assert (refused.reason, refused.detail, refused.n) == ("quality", "quality 0.25 below 0.5", 0)
    whole = fold(policy(min_quality=0.5), cand("a", quality=0.25), cand("b"))
    (refused,) = (d for d in whole if isinstance(d, Refused))
    assert (refused.reason, refused.n, refused.detail) == (
        "quality",
        2,
        "1 of 2 usable, 2 needed; 1 quality",
    )


def test_a_required_assessment_is_awaited_as_a_reward_is() -> None:
    needed = policy(require_assessment=True, group_size=3)
    a, b = cand("a", assessment_revision=1), cand("b", value=0.0, assessment_revision=1)
    waiting = (needed, a, b, cand("c"))
    assert fold(*waiting, tick(1009)) == []
    assert groups(fold(*waiting, revised(cand("c"), assessment_revision=1))) == [[["a", "b", "c"]]]
    late = fold(*waiting, tick(1010))
    assert refusals(late) == [("assessment_missing", ("c",), False)] and groups(late) == [
        [["a", "b"]]
    ]
    (refused, _) = late
    assert isinstance(refused, Refused) and refused.detail == "not assessed yet"
    ended = fold(*waiting, RunEnded(run_id="r", created_at=0))
    assert refusals(ended) == [("assessment_missing", ("c",), False)], (
        "the end of the run waits for nobody"
    )
    assert groups(fold(policy(group_size=3), *waiting[1:])) == [[["a", "b", "c"]]]


def test_a_flawed_member_is_not_waited_for() -> None:
    out = fold(
        policy(require_assessment=True),
        cand("a", outcome="timed_out"),
        cand("b", assessment_revision=1),
    )
    assert refusals(out) == [("outcome", ("a", "b"), True)]


def test_low_assessment_that_comes_in_time_refuses() -> None:
    needed = policy(require_assessment=True, min_quality=0.5, group_size=3)
    ok = (
        cand("a", assessment_revision=1, quality=0.9),
        cand("b", value=0.0, assessment_revision=1, quality=0.9),
    )
    out = fold(needed, *ok, cand("c"), revised(cand("c"), assessment_revision=1, quality=0.1))
    assert refusals(out) == [("quality", ("c",), False)] and groups(out) == [[["a", "b"]]]


def test_curation_before_admission_counts_and_after_it_is_late() -> None:
    half_full = policy(batch_groups=2)
    a, b = many("a", {}, {}), cand("b", value=0.0)
    other = (cand("c", "h"), cand("d", "h", value=0.0))
    marked = revised(
        a, steps=steps("a", {"trainable": False, "reason": "curation"}, {}), trainable_tokens=5
    )
    assert members(fold(half_full, a, b, marked, *other))["a"] == (("a~0.0",), 5, 0)
    out = fold(half_full, a, b, *other, marked)
    assert members(out)["a"] == ((), 10, 0)
    assert isinstance(out[-1], Late) and (out[-1].trajectory_id, out[-1].missed_batch_seq) == (
        "a",
        0,
    )
    banned = revised(a, trainable=False, reason="curation")
    out = fold(half_full, a, b, banned, *other)
    assert refusals(out) == [("untrainable", ("a", "b"), True)], (
        "it leaves the half-full batch again"
    )
    allowed = revised(banned, trainable=True, reason=None)
    assert groups(fold(policy(batch_groups=1), banned, allowed, b)) == [[["a", "b"]]]


def test_a_tag_of_the_whole_is_left_out_as_a_tag_of_a_step_is() -> None:
    out = fold(
        policy(untrained_tags=("leaked", "title"), group_size=3),
        cand("a", tags=("x", "leaked")),
        cand("b"),
        cand("c", value=0.0),
    )
    (refused,) = (d for d in out if isinstance(d, Refused))
    assert (refused.reason, refused.trajectory_ids, refused.detail) == (
        "untrainable",
        ("a",),
        "tagged leaked",
    )
    assert groups(fold(policy(), cand("a", tags=("leaked",)), cand("b", value=0.0))) == [
        [["a", "b"]]
    ]


def test_another_policy_judges_quality_again() -> None:
    waiting = (
        policy(batch_groups=2),
        many("a", {"quality": 0.1}, {}),
        cand("b", value=0.0, quality=0.3),
    )
    other = (cand("c", "h"), cand("d", "h", value=0.0))
    stricter = policy(batch_groups=2, policy_version=2, min_quality=0.5)
    assert refusals(fold(*waiting, stricter, *other)) == [("quality", ("a", "b"), True)]
    steps_only = policy(batch_groups=2, policy_version=2, min_step_quality=0.5)
    assert members(fold(*waiting, steps_only, *other))["a"] == (("a~0.0",), 5, 0)
    back = policy(batch_groups=2, policy_version=3)
    assert members(fold(*waiting, steps_only, back, *other))["a"] == ((), 10, 0), (
        "judged by what it was, not by what was left"
    )
    no_more = policy(policy_version=2)
    still = fold(policy(require_assessment=True), cand("a"), cand("b", value=0.0), no_more)
    assert groups(still) == [[["a", "b"]]], "nobody waits for an assessment any more"


def test_validation_asks_for_quality_too_but_not_for_freshness() -> None:
    val = {"channel": "val"}
    strict = policy(min_step_quality=0.5, min_quality=0.2, val_groups=1, max_staleness=0)
    low = many(
        "a",
        {"quality": 0.1, "oldest_sync_index": -9},
        {"oldest_sync_index": -9},
        oldest_sync_index=-9,
        **val,
    )
    assert members(fold(strict, low, cand("b", oldest_sync_index=-9, **val), channel="val")) == {
        "a": (("a~0.0",), 5, -9), "b": ((), 5, -9),
    }  # fmt: skip
    assert refusals(
        fold(strict, cand("a", quality=0.1, **val), cand("b", **val), channel="val")
    ) == [("quality", ("a", "b"), True)]


def test_failed_members_are_trained_unless_the_policy_says_otherwise() -> None:
    failed = cand("a", outcome="failed", value=0.0)
    assert groups(fold(policy(), failed, cand("b"))) == [[["a", "b"]]]
    assert refusals(
        fold(
            policy(train_outcomes=("completed",), group_size=3),
            failed,
            cand("b"),
            cand("c", value=0.5),
        )
    )[0] == ("outcome", ("a",), False)


def test_group_size_of_the_opened_event_stands_above_the_policy() -> None:
    three = [cand(f"t{i}", value=float(i), group_size=3) for i in range(3)]
    assert groups(fold(policy(), *three)) == [[["t0", "t1", "t2"]]]
    larger = policy(policy_version=2, group_size=5)
    assert groups(fold(policy(group_size=2), cand("a"), larger, cand("b", value=0.0))) == [
        [["a", "b"]]
    ], "as it was begun"
    assert groups(
        fold(
            policy(min_members=3, group_size=4),
            *(cand(f"t{i}", value=float(i)) for i in range(3)),
            tick(5010),
        )
    ) == [[["t0", "t1", "t2"]]]
    two = (cand("a"), cand("b", value=0.0))
    assert refusals(fold(policy(min_members=3, group_size=4), *two, tick(5010))) == [
        ("incomplete", ("a", "b"), True)
    ]


@pytest.mark.parametrize("name", ["min_quality", "min_step_quality"])
def test_a_quality_outside_of_its_range_is_no_policy(name: str) -> None:
    for wrong in (1.5, -0.1, float("nan")):
        rejection = policy_rejection(policy(**{name: wrong}), None)
        assert rejection is not None and name in rejection
    assert policy_rejection(policy(**{name: 1.0}), None) is None


def test_policies_that_say_the_same_are_the_same_whoever_says_it() -> None:
    assert fold(policy(), policy(published_by="ann", created_at=7)) == []
    assert reward(1.0).value == 1.0
