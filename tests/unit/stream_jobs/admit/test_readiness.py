"""Readiness and previews: the reasons against training are those of admission."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from support.admit import cand, fold, policy, refusals

from clawstream.schemas.records import (
    AdmissionPolicy,
    Candidate,
    CandidateStep,
    Place,
    RewardValue,
)
from clawstream.stream_jobs.admit import group
from clawstream.stream_jobs.admit.eligibility import (
    Readiness,
    ineligibilities,
    readiness,
    unmet_step_conditions,
)
from clawstream.stream_jobs.admit.group import ClosedMember

PLACE = Place(topic_id="T", partition=0, first_offset=0, last_offset=0)


def test_a_trajectory_that_lacks_nothing_is_ready() -> None:
    assert readiness(cand("a"), policy(), True, 0) == Readiness((), False, 0, 5, 1.0)
    (step,) = cand("a").steps
    assert unmet_step_conditions(step, "train", policy(), 0) == []


def test_everything_that_is_lacking_is_named() -> None:
    strict = policy(
        min_trainable_tokens=6,
        max_trajectory_tokens=8,
        min_quality=0.5,
        max_staleness=1,
        require_assessment=True,
        min_step_quality=0.5,
        untrained_tags=("title",),
        group_size=1,
    )
    poor = CandidateStep(
        step_id="a~1.0",
        index=0,
        response_tokens=5,
        trainable=True,
        quality=0.4,
        tags=("title",),
        oldest_sync_index=0,
    )
    made = cand("a", value=None, outcome="timed_out", quality=0.4, steps=(poor,))
    whole = readiness(made, strict, False, 3)
    assert whole.unmet_conditions == (
        "outcome", "untrainable", "too_short", "too_long", "quality", "reward_missing",
        "assessment_missing", "stale",
    )  # fmt: skip
    assert (whole.awaiting_input, whole.staleness) == (False, 3)
    details = {lack.reason: lack.detail for lack in ineligibilities(made, strict, False)}
    assert details["quality"] == "quality 0.4 below 0.5"
    assert details["reward_missing"] == "no value of rule"
    assert unmet_step_conditions(poor, "train", strict, 3) == ["tagged", "quality", "stale"]
    assert unmet_step_conditions(poor, "val", strict, 3) == ["tagged", "quality"]


def test_what_may_still_come_is_awaited() -> None:
    waits = readiness(cand("a", rewards=()), policy(), True, None)
    assert (waits.awaiting_input, waits.unmet_conditions) == (True, ("reward_missing",))
    assessed = readiness(cand("a"), policy(require_assessment=True), True, None)
    assert (assessed.awaiting_input, assessed.unmet_conditions) == (True, ("assessment_missing",))
    hopeless = readiness(cand("a", rewards=(), outcome="lost"), policy(), True, None)
    assert not hopeless.awaiting_input
    assert hopeless.unmet_conditions == ("outcome", "reward_missing")


def test_validation_asks_for_no_version_and_no_freshness() -> None:
    old = cand("a", channel="val", oldest_sync_index=None)
    assert not readiness(old, policy(max_staleness=0), True, 9).unmet_conditions
    unknown = readiness(cand("a", oldest_sync_index=None), policy(), True, 9)
    assert unknown.unmet_conditions == ("untrainable",)


def test_the_excluded_steps_count_for_nothing() -> None:
    fresh, old = (
        CandidateStep(
            step_id=f"a~{index}.0", index=index, response_tokens=5, trainable=True, tags=tags,
            oldest_sync_index=sync_index,
        )
        for index, tags, sync_index in ((0, (), 4), (1, ("title",), 1))
    )  # fmt: skip
    made = cand("a", steps=(fresh, old), trainable_tokens=10, oldest_sync_index=1)
    whole = readiness(made, policy(untrained_tags=("title",)), True, 4)
    assert (whole.staleness, whole.trainable_tokens) == (0, 5)


def preview(
    applied: AdmissionPolicy, *candidates: Candidate, newest: int | None = 0,
    staleness: int | None = None,
) -> list[str | None]:  # fmt: skip
    members = [ClosedMember(c, PLACE, staleness) for c in candidates]
    return group.refusals(members, applied, newest)


def test_a_group_is_decided_with_the_members_that_it_has() -> None:
    pair = cand("a"), cand("b", value=0.0)
    assert preview(policy(), *pair) == [None, None]
    assert preview(policy(), cand("a")) == ["incomplete"]
    assert preview(policy(), cand("a"), cand("b")) == ["zero_variance"] * 2
    poor = cand("c", value=0.5, quality=0.1)
    assert preview(policy(min_quality=0.5), poor, *pair) == ["quality", None, None]
    assert preview(policy(min_quality=0.5, min_members=2), poor, pair[0]) == ["quality"] * 2
    gone = cand("d", outcome="replaced")
    assert preview(policy(), gone, *pair) == ["replaced", None, None]
    assert preview(policy(), cand("a", group_size=1)) == ["incomplete"], "it compares members"


def test_a_decided_trajectory_keeps_its_staleness() -> None:
    pair, fresh = (cand("a"), cand("b", value=0.0)), policy(max_staleness=1)
    assert preview(fresh, *pair, newest=2) == ["stale"] * 2
    assert preview(fresh, *pair, newest=2, staleness=1) == [None, None]
    assert preview(fresh, *pair, newest=None) == [None, None]


def drawn(rng: random.Random, number: int) -> tuple[Candidate, AdmissionPolicy]:
    """Draw a random candidate and policy whose values are close to each other's limits."""

    def maybe(*values: Any) -> Any:
        return rng.choice([None, *values])

    def a_reward() -> RewardValue:
        value = rng.choice([None, 0.0, 1.0, 0.5, float("nan"), 1e6])
        step = rng.choice([None, None, "x~1.0"])
        return RewardValue(
            source=rng.choice(["rule", "human", "env"]),
            name=rng.choice(["a", "b/c"]),
            function_version="1",
            step_id=step,
            value=value,
            reward_revision=0,
        )

    steps = tuple(
        CandidateStep(
            step_id=f"t{number}~{i}.0",
            index=i,
            response_tokens=rng.randint(0, 4),
            trainable=rng.random() < 0.8,
            quality=maybe(0.2, 0.5, 0.9),
            tags=tuple(rng.sample(["title", "x"], rng.choice([0, 0, 1]))),
            oldest_sync_index=rng.choice([None, 1, 2, 3, 4]),
        )
        for i in range(rng.randint(0, 3))
    )
    made = Candidate(
        run_id=f"r{number}",
        channel=rng.choice(["train", "val"]),
        trajectory_key=f"t{number}",
        trajectory_id=f"t{number}",
        group_id="g",
        revision=rng.randint(0, 3),
        outcome=rng.choice(["completed", "completed", "failed", "timed_out"]),
        opened_at=0,
        closed_at=1,
        rewards=tuple(a_reward() for _ in range(rng.randint(0, 3))),
        steps=steps,
        prompt_tokens=3,
        trainable_tokens=sum(s.response_tokens for s in steps if s.trainable),
        oldest_sync_index=maybe(1, 2, 3),
        trainable=rng.random() < 0.8,
        quality=maybe(0.2, 0.5, 0.9),
        tags=rng.choice([(), (), ("title",)]),
        assessment_revision=maybe(1),
    )
    asked = policy(
        run_id=made.run_id,
        required_rewards=rng.choice([(), ("rule",), ("rule/b/c", "human")]),
        reward_weights=rng.choice([{}, {"rule/a": 0.5}, {"rule/b/c": 2.0, "env/a": 0.0}]),
        max_staleness=maybe(0, 2),
        min_trainable_tokens=rng.choice([0, 3]),
        max_trajectory_tokens=maybe(6, 9),
        train_outcomes=rng.choice([("completed",), ("completed", "failed")]),
        min_quality=maybe(0.5),
        min_step_quality=maybe(0.5),
        untrained_tags=rng.choice([(), ("title",), ("title", "y")]),
        require_assessment=rng.random() < 0.3,
    )
    return made, asked


def test_admission_refuses_for_the_first_thing_that_is_lacking() -> None:
    """Groups of one: no other member can affect the decision."""
    rng = random.Random(7)
    seen = set()
    for number in range(600):
        c, p = drawn(rng, number)
        c = replace(c, run_id="r", channel="train", group_size=1)
        p = replace(p, run_id="r", algorithm="sft", min_members=1, drop_zero_variance=False)
        r, out = readiness(c, p, True, 0), fold(p, c)
        if not r.unmet_conditions:
            assert refusals(out) == [] and len(out) == 1
            assert preview(p, c) == [None]
        elif r.awaiting_input:
            assert out == []
            assert preview(p, c) == list(r.unmet_conditions)
        else:
            (reason, *_) = r.unmet_conditions
            assert refusals(out) == [(reason, (c.trajectory_id,), True)]
            assert preview(p, c) == [reason]
            seen.add(reason)
    assert seen >= {"outcome", "untrainable", "too_short", "too_long", "quality", "reward_missing"}
